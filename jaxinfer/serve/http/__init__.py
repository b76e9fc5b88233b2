"""HTTP API server: OpenAI-compatible and Anthropic-compatible endpoints. No jax."""
