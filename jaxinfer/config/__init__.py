"""Settings of an engine: see `jaxinfer.config.engine`."""

from jaxinfer.config.engine import EngineConfig, EngineConfigError, ResolvedEngine, check, resolve

__all__ = ["EngineConfig", "EngineConfigError", "ResolvedEngine", "check", "resolve"]
