"""Bound what waits for the engine, by tenant: too much is refused before it costs anything. No jax.

The engine bounds its queue too, and has the last word (`jaxinfer.engine.scheduling.queues.require_room`). Here it is
known what comes together, so that all of it is taken or none, and whose it is. A tenant may have as much waiting as
there is room left (dynamic thresholds, Choudhury & Hahne 1998): k of them that take what they can get end with
1 / (k + 1) of the queue each, and as much is left for whoever comes next.

A request waits until its first token. What fills slots that are free does not wait: as much more is let in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.sampling_params import QueueFullError, RequestError


class Load(NamedTuple):
    """Load that waits: requests, their outputs, the tokens of their prompts as far as they are known."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0


class Place:
    """Place of one request, from `Room.enter` until it has left. Each step may be told again, and is counted once."""

    def __init__(self, room: Room, tenant: str, load: Load) -> None:
        self._room, self._tenant, self._load = room, tenant, load
        self._waits, self._runs = True, 0

    def measure(self, tokens: int) -> None:
        """Count the prompt's tokens, which are known by now.

        Raises:
            QueueFullError: with so many tokens it is too much.
        """
        if self._waits:
            load = self._load._replace(tokens=tokens)
            self._room.count(self._tenant, self._load, -1)
            self._load = Load()
            self._room.require(self._tenant, load)
            self._load = load
            self._room.count(self._tenant, load, 1)

    def begin(self) -> None:
        """Stop waiting: the first token is there."""
        if self._waits:
            self._waits = False
            self._room.count(self._tenant, self._load, -1)
            self._runs = self._load.sequences
            self._room.running += self._runs

    def ended(self) -> None:
        """Free the slot of an output that has ended."""
        if self._runs:
            self._runs -= 1
            self._room.running -= 1

    def leave(self) -> None:
        """Leave: the request has ended, or was refused."""
        self.begin()
        self._room.running -= self._runs
        self._runs = 0


class Room:
    """Load that waits for one engine, by tenant.

    Args:
        engine: its settings: ``max_waiting_requests``, ``max_waiting_sequences``, ``max_waiting_tokens`` (None: no
            bound), and those that say how many slots there are.

    Attributes:
        running: outputs of requests that have begun, and that have not ended.
    """

    def __init__(self, engine: Mapping[str, Any]) -> None:
        most = {name: engine.get(f"max_waiting_{name}") for name in Load._fields}
        self._most: dict[str, int] = {name: limit for name, limit in most.items() if limit is not None}
        self._slots = slots_of(engine)
        self._all = Load()
        self._tenants: dict[str, Load] = {}
        self.running = 0

    @property
    def waiting(self) -> Load:
        """What waits, of all tenants."""
        return self._all

    @property
    def empty(self) -> bool:
        """Whether nothing waits, and nothing runs."""
        return not (any(self._all) or self._tenants or self.running)

    def enter(self, tenant: str, loads: Sequence[Load]) -> list[Place]:
        """Places for requests that come together: all or none.

        Args:
            tenant: "": nobody in particular, of whom all may wait that can.

        Raises:
            QueueFullError: too much waits.
            RequestError: so many could not wait if nobody else did.
        """
        self.require(tenant, Load(*map(sum, zip(*loads, strict=True))))
        for load in loads:
            self.count(tenant, load, 1)
        return [Place(self, tenant, load) for load in loads]

    def count(self, tenant: str, load: Load, sign: int) -> None:
        """Add what waits (``sign`` 1), or take it off (-1)."""
        self._all = _sum(self._all, load, sign)
        waiting = _sum(self._tenants.get(tenant, Load()), load, sign)
        if waiting.requests:
            self._tenants[tenant] = waiting
        else:
            self._tenants.pop(tenant, None)

    def require(self, tenant: str, new: Load) -> None:
        """Raises as `enter`: there is no room for ``new``."""
        free = max(0, self._slots - self.running)
        if self._all.sequences + new.sequences <= free:  # nobody would wait
            return
        waiting = self._tenants.get(tenant, Load())
        for name, most in self._most.items():
            if new.requests > 1:
                self._require_possible(tenant, name, new)
            room = most + (free if name != "tokens" else 0)
            before, more = getattr(self._all, name), getattr(new, name)
            if before + more > room and (self._all.requests or new.requests > 1):
                raise QueueFullError(f"{before} {name} wait already, {more} more are too many: {self._limit(name)}")
            its = getattr(waiting, name)
            if tenant and before + its + 2 * more > room and (waiting.requests or new.requests > 1):
                raise QueueFullError(
                    f"{its} {name} of {tenant!r} wait already, {more} more would leave others too little room: "
                    f"{self._limit(name)}"
                )

    def _require_possible(self, tenant: str, name: str, new: Load) -> None:
        """Refuse what comes together and could not wait even if it were alone."""
        room = (self._most[name] + (self._slots if name != "tokens" else 0)) // (2 if tenant else 1)
        if getattr(new, name) > room:
            raise RequestError(
                "prompt",
                f": {new.requests} prompts are {getattr(new, name)} {name}, and no more than {room} could wait: "
                f"{self._limit(name)}",
            )

    def _limit(self, name: str) -> str:
        """The bound of the queue, and how many outputs run at once before it."""
        return f"max_waiting_{name} = {self._most[name]}, behind {self._slots} slots (max_num_seqs)"


def nowhere() -> Place:
    """A place that is not counted."""
    return Place(Room({}), "", Load())


def slots_of(engine: Mapping[str, Any]) -> int:
    """Slots of all replicas, or of all ranks."""
    ranks = engine.get("expert_parallel_size", 1) if engine.get("enable_dp_attention") else 1
    return int(engine.get("max_num_seqs", 0) * engine.get("data_parallel_size", 1) * ranks)


def _sum(one: Load, other: Load, sign: int) -> Load:
    requests, sequences, tokens = other
    return Load(one[0] + sign * requests, one[1] + sign * sequences, one[2] + sign * tokens)
