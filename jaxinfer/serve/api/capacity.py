"""Per-tenant admission control: requests over the limit are rejected before tokenization. No jax.

The engine bounds its queue too, and decides last (`jaxinfer.engine.scheduling.queues.require_capacity`). This module
also knows the tenant, and which requests belong together, so that all of them are admitted or none. A tenant may have
as much waiting as there is capacity left (dynamic thresholds, Choudhury & Hahne 1998): k tenants that take what they
can get end with 1 / (k + 1) of the queue each, and as much is left for the next tenant.

A request waits until its first token. Requests that fill free slots do not wait: that many more are admitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.sampling_params import QueueFullError, RequestError


class Load(NamedTuple):
    """Waiting load: requests, their outputs (sequences), and the tokens of their prompts as far as they are known."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0


class Place:
    """A queue reservation of a request, from `CapacityLimiter.enter` to `leave`; repeated calls count once."""

    def __init__(self, room: CapacityLimiter, tenant: str, load: Load) -> None:
        self._room, self._tenant, self._load = room, tenant, load
        self._waits, self._runs = True, 0

    def measure(self, tokens: int) -> None:
        """Count the prompt tokens, which are known after tokenization.

        Raises:
            QueueFullError: the prompt has too many tokens for the queue.
        """
        if self._waits:
            load = self._load._replace(tokens=tokens)
            self._room.count(self._tenant, self._load, -1)
            self._load = Load()
            self._room.require(self._tenant, load)
            self._load = load
            self._room.count(self._tenant, load, 1)

    def begin(self) -> None:
        """Stop waiting: the first token has been generated."""
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
        """Release the reservation: the request has ended, or was rejected."""
        self.begin()
        self._room.running -= self._runs
        self._runs = 0


class CapacityLimiter:
    """Admission control of one engine's queue, by tenant.

    Args:
        engine: engine settings: ``max_waiting_requests``, ``max_waiting_sequences``, ``max_waiting_tokens`` (None: no
            bound), and those that determine the number of slots.

    Attributes:
        running: outputs that have not ended, of requests that have a first token.
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
        """Waiting load of all tenants."""
        return self._all

    @property
    def empty(self) -> bool:
        """Whether no request waits or runs."""
        return not (any(self._all) or self._tenants or self.running)

    def enter(self, tenant: str, loads: Sequence[Load]) -> list[Place]:
        """Reserve capacity for requests that belong together: for all or none.

        Args:
            tenant: "": no tenant in particular, which may use the whole queue.

        Raises:
            QueueFullError: too much load waits.
            RequestError: the requests would not fit into an empty queue.
        """
        self.require(tenant, Load(*map(sum, zip(*loads, strict=True))))
        for load in loads:
            self.count(tenant, load, 1)
        return [Place(self, tenant, load) for load in loads]

    def count(self, tenant: str, load: Load, sign: int) -> None:
        """Add waiting load (``sign`` 1), or remove it (-1)."""
        self._all = _sum(self._all, load, sign)
        waiting = _sum(self._tenants.get(tenant, Load()), load, sign)
        if waiting.requests:
            self._tenants[tenant] = waiting
        else:
            self._tenants.pop(tenant, None)

    def require(self, tenant: str, new: Load) -> None:
        """Raise as `enter` if there is no capacity for ``new``."""
        free = max(0, self._slots - self.running)
        if self._all.sequences + new.sequences <= free:  # all outputs get a slot at once
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
        """Reject requests that belong together and would not fit into an empty queue."""
        room = (self._most[name] + (self._slots if name != "tokens" else 0)) // (2 if tenant else 1)
        if getattr(new, name) > room:
            raise RequestError(
                "prompt",
                f": {new.requests} prompts are {getattr(new, name)} {name}, and no more than {room} could wait: "
                f"{self._limit(name)}",
            )

    def _limit(self, name: str) -> str:
        """Return the bound of the queue and the number of slots, as text."""
        return f"max_waiting_{name} = {self._most[name]}, behind {self._slots} slots (max_num_seqs)"


def nowhere() -> Place:
    """Return a reservation that is not counted."""
    return Place(CapacityLimiter({}), "", Load())


def slots_of(engine: Mapping[str, Any]) -> int:
    """Return the number of slots of all replicas, or of all data-parallel attention ranks."""
    ranks = engine.get("expert_parallel_size", 1) if engine.get("enable_dp_attention") else 1
    return int(engine.get("max_num_seqs", 0) * engine.get("data_parallel_size", 1) * ranks)


def _sum(one: Load, other: Load, sign: int) -> Load:
    requests, sequences, tokens = other
    return Load(one[0] + sign * requests, one[1] + sign * sequences, one[2] + sign * tokens)
