"""Integrations with orchestrators that run and scale servers; only the module of an orchestrator imports it."""
