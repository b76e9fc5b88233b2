"""Speculation on the host: guesses at what a sequence goes on with, for the engine to verify. No jax."""

from jaxinfer.spec.ngram import Drafter, NgramDrafter

__all__ = ["Drafter", "NgramDrafter"]
