"""Prompts: token ids if the server accepts them, else words."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from jaxinfer.bench.target import Served, Target

_TEXT = """
the of and to in is that it he was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only way
find use may water long little very after words called just where most know
"""
WORDS = tuple(_TEXT.split())


@runtime_checkable
class Prompts(Protocol):
    """Factory of prompts of given lengths."""

    def draw(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return random material of ``length`` tokens, int [n]."""
        ...

    def build(self, material: np.ndarray) -> str | list[int]:
        """Convert material to the prompt for the server."""
        ...

    def length(self, material: np.ndarray) -> int:
        """Return the number of tokens of a prompt."""
        ...


@dataclasses.dataclass(frozen=True)
class Ids:
    """Prompts of random token ids, with exact lengths."""

    vocab: int

    def draw(self, length: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.vocab, size=length, dtype=np.int32)

    def build(self, material: np.ndarray) -> str | list[int]:
        ids: list[int] = material.tolist()
        return ids

    def length(self, material: np.ndarray) -> int:
        return len(material)


@dataclasses.dataclass(frozen=True)
class Words:
    """Prompts of random common words, lengths right on average. ``tokens``: tokens per word by the server's count."""

    tokens: float

    def draw(self, length: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(len(WORDS), size=max(1, round(length / self.tokens)), dtype=np.int32)

    def build(self, material: np.ndarray) -> str | list[int]:
        return " ".join(WORDS[number] for number in material.tolist())

    def length(self, material: np.ndarray) -> int:
        return max(1, round(len(material) * self.tokens))


async def tokens_per_word(target: Target) -> float:
    """Return the tokens per word, by the server's count for all the words once.

    Raises:
        TargetError: the request failed.
    """
    return await target.count_tokens(" ".join(WORDS)) / len(WORDS)


def usable_ids(served: Served) -> Ids | None:
    """Return a factory of random ids, if the server accepts ids and their range is known."""
    return Ids(served.vocab_size) if served.accepts_ids and served.vocab_size else None
