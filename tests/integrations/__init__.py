"""Tests of `jaxinfer.integrations`, without the integrated programs."""
