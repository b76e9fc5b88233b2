"""Tests of `jaxinfer.integrations.replicas`."""
