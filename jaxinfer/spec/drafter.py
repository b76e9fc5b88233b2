"""Protocol of drafters, and their registry by name. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jaxinfer.config import EngineConfigError
from jaxinfer.config.speculative import SpeculativeConfig
from jaxinfer.spec.tree import Tree


class Drafted(NamedTuple):
    """A sequence in the view of a drafter.

    Attributes:
        number: unique number of the sequence for its lifetime.
        namespace: its prefix cache namespace; a drafter must not learn from other namespaces.
        prompt: tokens of the prompt.
        tokens: all known tokens, the prompt first; a view, valid until the call returns.
    """

    number: int
    namespace: bytes
    prompt: int
    tokens: Int32[np.ndarray, " tokens"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations of sequences. Drafts never change the output: they only affect speed.

    By default a drafter keeps no state.
    """

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """Propose token ids to follow the sequence, at most ``limit`` deep; none if there is no good guess."""

    def end(self, sequence: Drafted) -> None:
        """Drop the state of a finished sequence, or learn from it."""
        return

    def reset(self) -> None:
        """Drop what was learnt from finished sequences."""
        return


class Bounded:
    """A drafter wrapper that makes drafts valid: at most ``limit`` tokens deep, each path up to the first id outside
    the vocabulary. (Keys and values of such an id would be NaN, which a masked product does not hide.)"""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self.end, self.reset = drafter.end, drafter.reset

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        return self._drafter.propose(sequence, limit).bounded(limit, self._vocab_size)


class DeviceDrafter(Drafter):
    """A drafter with drafts on the device: it returns placeholders, and the verifying step reads the tokens there.

    The placeholder ``-2 - i`` is the i-th draft token of a sequence, until the step's results are read. With several
    paths each has ``most`` placeholders.
    """

    def __init__(self, most: int, paths: int = 1) -> None:
        self._most, self._paths = most, paths

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """Return ``limit`` placeholders for each path."""
        if self._paths == 1:
            return Tree.chain(np.arange(-2, -2 - limit, -1, dtype=np.int32))
        firsts = range(-2, -2 - self._paths * self._most, -self._most)
        return Tree.of_paths([list(range(first, first - limit, -1)) for first in firsts])


class NoDrafter(Drafter):
    """A drafter without guesses: tokens forced by grammars are drafted without one."""

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """Return an empty tree."""
        return Tree.of_paths([])


def path_of(names: Sequence[int], most: int) -> int:
    """Return the index of the `DeviceDrafter` path to which placeholders belong."""
    return (-2 - names[0]) // most


_MAKERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {}


def register(name: str, make: Callable[[SpeculativeConfig], Drafter]) -> None:
    """Register a drafter under a name of ``speculative``.

    Raises:
        ValueError: the name is taken.
    """
    if name in _MAKERS:
        raise ValueError(f"there is a drafter {name!r} already")
    _MAKERS[name] = make


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """Return the drafter that ``speculative`` names; None: no speculation.

    Raises:
        EngineConfigError: no drafter has this name.
    """
    if config.speculative is None:
        return None
    if config.speculative not in _MAKERS:
        names = ", ".join(["None", *_MAKERS])
        raise EngineConfigError(f"speculative = {config.speculative} must be one of {names}")
    return _MAKERS[config.speculative](config)
