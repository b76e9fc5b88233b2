"""Orchestrator-independent support for replicas; imports no orchestrator. No jax."""
