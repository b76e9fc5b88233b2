"""Parsers of what models write: reasoning and tool calls, from text as it comes. No jax, no engine."""
