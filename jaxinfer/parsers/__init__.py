"""Streaming parsers of model output: reasoning and tool calls. No jax, no engine."""
