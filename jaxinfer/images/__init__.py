"""Images: decoding, processors, and their places in prompts. No jax."""
