"""Chat requests and responses independent of the API: tool choice, parsers, messages. No jax."""
