"""What a drafter is, and which ones there are. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jaxinfer.config import EngineConfigError
from jaxinfer.spec.tree import Tree
from jaxinfer.speculative import SpeculativeConfig


class Drafted(NamedTuple):
    """A sequence as drafters see it.

    Attributes:
        number: the same for as long as the sequence lives, and never another's.
        namespace: of the prefix cache; nothing may be learnt from sequences of another one.
        prompt: tokens of the prompt.
        tokens: all that are known, the prompt first; a view, good until the call returns.
    """

    number: int
    namespace: bytes
    prompt: int
    tokens: Int32[np.ndarray, " tokens"]


@runtime_checkable
class Drafter(Protocol):
    """Guesses continuations of sequences. Whatever it says, output stays the same: it decides about speed alone."""

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """Propose token ids to follow those of the sequence, at most ``limit`` behind each other; none if there is no
        good guess."""
        ...

    def end(self, sequence: Drafted) -> None:
        """Forget a sequence that has ended, or learn from it."""
        ...

    def reset(self) -> None:
        """Forget what was learnt from sequences that have ended."""
        ...


class Bounded:
    """A drafter whose drafts can be fed whatever it says: at most ``limit`` tokens behind each other, each path up to
    the first that is no id of the vocabulary. (Keys and values of such an id would be NaN, which a masked product does
    not hide.)"""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self.end, self.reset = drafter.end, drafter.reset

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        return self._drafter.propose(sequence, limit).bounded(limit, self._vocab_size)


class DeviceDrafter:
    """A drafter whose drafts are on the device: it names them, and the step that verifies them takes them from there.

    The token ``-2 - i`` stands for the i-th draft of a sequence, until the step's results are read. Of several paths
    each has ``most`` of them.
    """

    def __init__(self, most: int, paths: int = 1) -> None:
        self._most, self._paths = most, paths

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """As many as are wanted, of as many paths as there may be."""
        if self._paths == 1:
            return Tree.chain(np.arange(-2, -2 - limit, -1, dtype=np.int32))
        firsts = range(-2, -2 - self._paths * self._most, -self._most)
        return Tree.of_paths([list(range(first, first - limit, -1)) for first in firsts])

    def end(self, sequence: Drafted) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""


class NoDrafter:
    """A drafter that has no guess: what grammars leave no choice about is drafted without one."""

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        """Nothing."""
        return Tree.of_paths([])

    def end(self, sequence: Drafted) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""


def path_of(names: Sequence[int], most: int) -> int:
    """The path of `DeviceDrafter` to which names of drafts belong."""
    return (-2 - names[0]) // most


_MAKERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {}


def register(name: str, make: Callable[[SpeculativeConfig], Drafter]) -> None:
    """Make a drafter known under a name of ``speculative``.

    Raises:
        ValueError: the name is taken.
    """
    if name in _MAKERS:
        raise ValueError(f"there is a drafter {name!r} already")
    _MAKERS[name] = make


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """The drafter that ``speculative`` names; None: no speculation.

    Raises:
        EngineConfigError: there is none of this name.
    """
    if config.speculative is None:
        return None
    if config.speculative not in _MAKERS:
        names = ", ".join(["None", *_MAKERS])
        raise EngineConfigError(f"speculative = {config.speculative} must be one of {names}")
    return _MAKERS[config.speculative](config)
