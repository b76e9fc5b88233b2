"""Assignment of adapters to the slots of the device's banks. No jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Part = Mapping[str, np.ndarray]
"""Arrays of one part of an adapter, by "path/of/parameter:a", in the shapes of a bank slot."""

Load = tuple[int, int, Part]
"""Part of an adapter to be written before a step's programs: slot, number of the part, its arrays."""


@dataclasses.dataclass(eq=False)
class _Slot:
    """State of one slot; an adapter occupies it from its first part on, and is usable once all ``parts`` are sent."""

    number: int
    identity: str | None = None
    parts: Sequence[Part] = ()
    sent: int = 0
    pins: int = 0
    used: int = 0  # time when it was last released, or placed
    placed: int = 0
    last_step: int = 0  # last step launched while it was pinned
    fresh: bool = False  # unused since it was placed

    @property
    def loading(self) -> bool:
        return self.sent < len(self.parts)


class Slots:
    """Adapters by identity in the slots of the device, with LRU eviction.

    Running sequences pin their adapter. A slot is not overwritten while it is pinned, while a step launched under a pin
    has not been read, or while its parts are still being sent. Only for the engine thread.

    Args:
        count: number of slots, at least 1.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count = {count} must be at least 1")
        self._slots = [_Slot(number) for number in range(count)]
        self._by_identity: dict[str, _Slot] = {}
        self._loading: collections.deque[_Slot] = collections.deque()
        self._now = self._launched = self._read = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, identity: str) -> bool:
        """Return whether an adapter is in a slot or is being loaded."""
        return identity in self._by_identity

    @property
    def identities(self) -> list[str]:
        """Adapters in slots, including those being loaded, the longest resident first."""
        return sorted(self._by_identity, key=lambda identity: self._by_identity[identity].placed)

    def usable(self, identity: str) -> bool:
        """Return whether an adapter is completely in its slot, for the step being planned."""
        return (slot := self._by_identity.get(identity)) is not None and not slot.loading

    @property
    def used(self) -> int:
        """Number of slots that hold or are loading an adapter."""
        return len(self._by_identity)

    def whole(self, number: int) -> str | None:
        """Return the adapter of a slot if it is completely loaded."""
        slot = self._slots[number]
        return None if slot.loading else slot.identity

    def fresh(self, identity: str) -> bool:
        """Return whether an adapter is unused since it was placed."""
        return self._by_identity[identity].fresh

    # ---- use

    def acquire(self, identity: str) -> int:
        """Pin a usable adapter for one sequence; return its slot, which is fixed until `release`."""
        slot = self._by_identity[identity]
        if slot.loading:
            raise AssertionError(f"adapter {identity} is used before all of it is loaded")
        slot.pins += 1
        slot.fresh = False
        return slot.number

    def release(self, identity: str) -> None:
        """Release a pin; launched steps may still use the slot."""
        slot = self._by_identity[identity]
        if not slot.pins:
            raise AssertionError(f"adapter {identity} is let go of more often than it was taken")
        slot.pins -= 1
        slot.used, slot.last_step = self._tick(), self._launched

    def launched(self) -> None:
        """Note that a step was launched."""
        self._launched += 1

    def read(self) -> None:
        """Note that the earliest unread step is read now."""
        self._read += 1

    # ---- placing

    def vacant(self, spared: Callable[[str], bool] = lambda identity: False) -> int | None:
        """Return the slot for the next adapter: an empty one, or that of the least recently used adapter that is
        evictable and not ``spared``; None if there is none now."""
        free = (each for each in self._slots if self._idle(each))
        left = (each for each in free if each.identity is None or not spared(each.identity))
        found = min(left, key=lambda each: (each.identity is not None, each.used), default=None)
        return None if found is None else found.number

    def _idle(self, slot: _Slot) -> bool:
        return not slot.pins and not slot.loading and slot.last_step <= self._read

    def place(self, number: int, identity: str, parts: Sequence[Part]) -> str | None:
        """Assign a vacant slot to an adapter, whose parts are loaded one by one; return its previous identity."""
        slot = self._slots[number]
        if identity in self or not self._idle(slot):
            raise AssertionError(f"adapter {identity} cannot be placed in slot {number}, which has {slot.identity}")
        before, slot.identity = slot.identity, identity
        if before is not None:
            del self._by_identity[before]
        slot.parts, slot.sent, slot.fresh = parts, 0, True
        slot.used = slot.placed = self._tick()
        self._by_identity[identity] = slot
        self._loading.append(slot)
        return before

    def next_load(self) -> Load | None:
        """Return the part to write before the programs of the step being planned; one part per step bounds the added
        time. After the last part the adapter is usable."""
        if not self._loading:
            return None
        slot = self._loading[0]
        load = slot.number, slot.sent, slot.parts[slot.sent]
        slot.sent += 1
        if not slot.loading:
            slot.parts, slot.sent = (), 0
            self._loading.popleft()
        return load

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def check(self, running: Sequence[tuple[str, int]]) -> None:
        """Check that the pins match the running sequences, and each adapter is in one slot.

        Args:
            running: adapter and assumed slot of each running sequence that has one.

        Raises:
            AssertionError: they do not match.
        """
        held = [(each.identity, each.number) for each in self._slots for _ in range(each.pins)]
        if sorted(map(str, held)) != sorted(map(str, running)):
            raise AssertionError(f"slots are pinned by {held}, sequences run with {running}")
        lying = [each.identity for each in self._slots if each.identity is not None]
        if sorted(lying) != sorted(self._by_identity):
            raise AssertionError(f"slots have {lying}, known are {list(self._by_identity)}")
