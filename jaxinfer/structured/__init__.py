"""Structured outputs: token masks of grammars, computed by llguidance in helper processes. No jax."""
