"""Structured outputs: which tokens a grammar allows next. llguidance, in helper processes. No jax."""
