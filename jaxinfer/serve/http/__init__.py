"""The OpenAI API over HTTP. No jax."""
