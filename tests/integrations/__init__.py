"""Tests of `jaxinfer.integrations`, without the programs that it serves."""
