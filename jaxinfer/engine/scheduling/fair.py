"""Fair queueing between tenants by the tokens that they use. No jax."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Any

from jaxinfer.engine.scheduling.sequence import Sequence, Status

OUTPUT_TOKEN = 2
"""Cost of a generated token in prompt tokens: it takes its own step."""
_SLACK = 64  # dead entries that a heap may always keep


class Heap[K: Hashable, V]:
    """Values under distinct keys, least order first. Removal is lazy: O(1), entries are dropped when they surface."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, K]] = []  # order, version, key
        self._live: dict[K, tuple[int, V]] = {}
        self._versions = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def values(self) -> Iterator[V]:
        return (value for _, value in self._live.values())

    def put(self, key: K, order: Any, value: V) -> None:
        """Insert a value, or replace the value and order of ``key``."""
        self._versions += 1
        self._live[key] = (self._versions, value)
        heapq.heappush(self._entries, (order, self._versions, key))
        self._compact()

    def discard(self, key: K) -> None:
        self._live.pop(key, None)
        self._compact()

    def first(self) -> tuple[Any, V] | None:
        """Return the least order and its value."""
        while self._entries:
            order, version, key = self._entries[0]
            if (live := self._live.get(key)) is not None and live[0] == version:
                return order, live[1]
            heapq.heappop(self._entries)
        return None

    def _compact(self) -> None:
        """Drop dead entries, so that they never outnumber live ones by much: amortised constant cost per removal."""
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            live = {version for version, _ in self._live.values()}
            self._entries = [entry for entry in self._entries if entry[1] in live]
            heapq.heapify(self._entries)


@dataclasses.dataclass(eq=False)
class _Tenant:
    """Tenant with sequences here; ``used``: tokens computed for it, by weight; ``fresh``: none since it came."""

    name: str
    place: int
    used: float
    weight: float = 1.0
    fresh: bool = True
    waiting: _Line = dataclasses.field(default_factory=lambda: _Line())
    running: dict[int, Sequence] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Account:
    """Requests of one tenant with one adapter, or with none; ``used``: tokens computed for them."""

    name: str
    used: float = 0.0
    running: int = 0
    waiting: Heap[int, Sequence] = dataclasses.field(default_factory=Heap)

    @property
    def is_here(self) -> bool:
        return self.running > 0 or len(self.waiting) > 0


class _Line:
    """Waiting sequences of a tenant: the earliest arrival of the adapter that has used least is first. So many requests
    of one adapter do not delay those of another. A new adapter starts at the count of the adapter that was served last,
    or at its own former count where that is more."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._waiting: Heap[str, _Account] = Heap()  # accounts with waiting sequences
        self._charged: set[_Account] = set()  # accounts with an outdated position
        self._floor = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for account in self._accounts.values() for sequence in account.waiting.values())

    def __contains__(self, sequence: Sequence) -> bool:
        account = self._accounts.get(_adapter(sequence))
        return account is not None and sequence.arrival in account.waiting

    @property
    def first(self) -> Sequence:
        """Next sequence to serve. At least one must wait."""
        for account in self._charged:
            if self._accounts.get(account.name) is account:  # else it was forgotten meanwhile
                self._place(account)
        self._charged.clear()
        found = self._waiting.first()
        assert found is not None
        sequence = found[1].waiting.first()
        assert sequence is not None
        return sequence[1]

    def put(self, sequence: Sequence) -> None:
        account = self._account(sequence)
        account.waiting.put(sequence.arrival, sequence.arrival, sequence)
        self._length += 1
        self._place(account)

    def discard(self, sequence: Sequence) -> None:
        account = self._accounts[_adapter(sequence)]
        account.waiting.discard(sequence.arrival)
        self._length -= 1
        self._place(account)

    def start(self, sequence: Sequence) -> None:
        """Record that a sequence runs from now on; it still waits, until `discard`."""
        account = self._accounts[_adapter(sequence)]
        account.running += 1
        self._floor = max(self._floor, account.used)

    def left(self, sequence: Sequence) -> None:
        account = self._accounts[_adapter(sequence)]
        account.running -= 1
        self._place(account)

    def charge(self, sequence: Sequence, cost: float) -> None:
        account = self._account(sequence)
        account.used += cost
        self._charged.add(account)

    def _account(self, sequence: Sequence) -> _Account:
        account = self._accounts.setdefault(_adapter(sequence), _Account(_adapter(sequence)))
        if not account.is_here:
            account.used = max(account.used, self._floor)
        return account

    def _place(self, account: _Account) -> None:
        first = account.waiting.first()
        if first is None:
            self._waiting.discard(account.name)
        else:
            self._waiting.put(account.name, (account.used, account.running, first[0]), account)
        if len(self._accounts) > 2 * len(self._waiting) + 64:
            self._forget()

    def _forget(self) -> None:
        """Forget adapters without sequences, except those whose count exceeds the floor."""
        kept = {name: each for name, each in self._accounts.items() if each.is_here or each.used > self._floor}
        self._accounts = kept


def _adapter(sequence: Sequence) -> str:
    lora = sequence.request.lora
    return "" if lora is None else lora.identity


def _begins(sequence: Sequence) -> bool:
    """Whether the step with its first token is still to be planned, and waits for no grammar."""
    began = sequence.generated or sequence.in_flight or sequence.held
    return sequence.status is Status.RUNNING and (sequence.prefilling or not began)


class FairQueue:
    """Queue that serves the tenant that has used least, by virtual token counters (Sheng et al., "Fairness in Serving
    Large Language Models", OSDI 2024), and preempts running sequences for it.

    A counter grows by the tokens computed, when they are computed, divided by the tenant's weight: a prompt token
    counts 1, a generated one `OUTPUT_TOKEN`; cached tokens, tokens fed again after a preemption, and rejected draft
    tokens count nothing. A tenant that comes starts at the least counter of the present ones, so that idle time is not
    saved up, or at its own former counter where that is more, so that leaving for a moment clears no debt.

    When all slots are taken, the tenant with the least counter takes one from a tenant whose counter is more, the
    latest sequence of the one that has used most:

    - for its first tokens since it came, until which its counter is taken to be ``quantum`` less: a tenant that uses
      little does not wait, whatever the others do;
    - while it has fewer slots than its share, from one that has more than its own;
    - when it is more than ``quantum`` behind. So more tenants than slots take turns.

    A slot is of no use in a step that is full of other tenants' prompts, so steps are short where tenants share an
    engine (`prompt_limit`): they compute one chunk of prompts, and only that of a tenant that has just come until its
    first token is in flight.

    A tenant's own adapters share its tokens equally (`_Line`).

    A preempted sequence resumes later with bitwise identical results. Everything is O(log tenants), except
    `preemption_victim`, which is called when a sequence waits and looks at the tenants that run.
    """

    def __init__(self, slots: int, quantum: int = 512, chunk: int | None = None) -> None:
        if quantum < 1:
            raise ValueError(f"quantum = {quantum} must be at least 1")
        self._slots, self._quantum, self._chunk = slots, quantum, chunk
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: Heap[str, _Tenant] = Heap()  # tenants with waiting sequences, by tokens used
        self._present: Heap[str, _Tenant] = Heap()  # all present tenants, by tokens used
        self._charged: set[_Tenant] = set()  # tenants with an outdated position in both heaps
        self._opening: dict[_Tenant, Sequence] = {}  # first sequences of tenants that were admitted fresh
        self._debts: dict[str, float] = {}  # counters of tenants that left above the least counter
        self._floor = 0.0  # lower bound of the counters of present tenants
        self._weights = 0.0  # the sum over all present tenants
        self._places = 0
        self._length = self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for tenant in self._tenants.values() for sequence in tenant.waiting)

    # ---- waiting and running

    def push(self, sequence: Sequence) -> None:
        tenant = self._tenants.get(sequence.request.tenant) or self._enter(sequence)
        if sequence in tenant.waiting:
            raise ValueError(f"sequence {sequence.arrival} waits already")
        tenant.waiting.put(sequence)
        self._count(sequence, 1)
        self._weigh(tenant, sequence.request.weight)
        self._place(tenant)

    def peek(self) -> Sequence | None:
        tenant = self._first()
        return None if tenant is None else tenant.waiting.first

    def pop(self) -> Sequence:
        if (tenant := self._first()) is None:
            raise IndexError("nobody waits")
        sequence = tenant.waiting.first
        tenant.running[sequence.arrival] = sequence
        tenant.waiting.start(sequence)
        if tenant.fresh:
            self._opening[tenant] = sequence
        self.remove(sequence)
        return sequence

    def left(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.request.tenant]
        del tenant.running[sequence.arrival]
        tenant.waiting.left(sequence)
        self._place(tenant)

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None or sequence not in tenant.waiting:
            raise KeyError(sequence.arrival)
        tenant.waiting.discard(sequence)
        self._count(sequence, -1)
        self._place(tenant)

    def charge(self, sequence: Sequence, prompt: int = 0, output: int = 0) -> None:
        name, tokens = sequence.request.tenant, float(prompt + OUTPUT_TOKEN * output)
        if (tenant := self._tenants.get(name)) is None:  # preempted under way, it waits for its adapter elsewhere
            before = max(self._debts.get(name, 0.0), self._floor)
            self._debts[name] = before + tokens / sequence.request.weight
            return
        cost = tokens / tenant.weight
        tenant.used += cost
        tenant.waiting.charge(sequence, cost)
        tenant.fresh = False
        self._charged.add(tenant)

    # ---- order

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Rank by the time of a sequence's first slot: counters change, and a preempted sequence must not take its
        pages back before the one that took them has advanced."""
        first = sequence.times.first_scheduled
        return (math.inf if first is None else first, sequence.arrival)

    def precedes(self, started: Sequence) -> bool:
        tenant = self._first()
        return tenant is not None and self._counter(tenant) < self._tenants[started.request.tenant].used

    def prompt_limit(self, sequence: Sequence) -> int | None:
        """Return the prompt tokens of a step up to which this prompt may be computed: none while a tenant that has just
        come, and has not got a quantum ahead since, waits for its first token; a chunk where there has been another
        tenant since the queue was last empty; else None, for all that fit."""
        self._opening = {each: first for each, first in self._opening.items() if _begins(first)}
        tenant = self._tenants[sequence.request.tenant]
        if tenant not in self._opening and any(each.used - self._quantum < tenant.used for each in self._opening):
            return 0
        return None if len(self._tenants) + len(self._debts) == 1 else self._chunk

    def preemption_victim(self) -> Sequence | None:
        first = self._first()
        if first is None:
            return None
        # Not from a tenant still waiting for first tokens: two new tenants would preempt each other forever.
        ahead = [each for each in self._tenants.values() if each.running and each is not first and not each.fresh]
        ahead = [each for each in ahead if each.used > self._counter(first)]  # else they would get it back at once
        most = max(ahead, key=lambda each: each.used, default=None)
        if most is None or not (first.fresh or most.used - first.used > self._quantum):
            rich = [each for each in ahead if len(each.running) > self._share(each)]
            poor = len(first.running) + 1 <= self._share(first)
            most = max(rich, key=lambda each: each.used, default=None) if poor else None
        return None if most is None else max(most.running.values(), key=self.rank)

    def _counter(self, tenant: _Tenant) -> float:
        return tenant.used - self._quantum if tenant.fresh else tenant.used

    def _share(self, tenant: _Tenant) -> float:
        return self._slots * tenant.weight / self._weights

    def _settle(self) -> None:
        """Reorder the tenants that were charged: once per step, not once per token."""
        for tenant in self._charged:
            if self._tenants.get(tenant.name) is tenant:  # else it has left meanwhile
                self._place(tenant)
        self._charged.clear()

    def _first(self) -> _Tenant | None:
        self._settle()
        first = self._waiting.first()
        return None if first is None else first[1]

    # ---- present tenants

    def _enter(self, sequence: Sequence) -> _Tenant:
        name = sequence.request.tenant
        if not self._tenants:
            self._debts.clear()  # a tenant that is alone has no debts
        self._settle()
        self._raise_floor()
        self._places += 1
        used = max(self._debts.pop(name, 0.0), self._floor)
        tenant = self._tenants[name] = _Tenant(name, self._places, used, sequence.request.weight)
        self._weights += tenant.weight
        return tenant

    def _place(self, tenant: _Tenant) -> None:
        """Put a tenant at its current position; a tenant without sequences is removed, and only its debt is kept."""
        order = (self._counter(tenant), len(tenant.running) / tenant.weight, tenant.place)
        if len(tenant.waiting):
            self._waiting.put(tenant.name, order, tenant)
        else:
            self._waiting.discard(tenant.name)
        if len(tenant.waiting) or tenant.running:
            self._present.put(tenant.name, tenant.used, tenant)
        else:
            self._leave(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        self._present.discard(tenant.name)
        del self._tenants[tenant.name]
        self._weights = self._weights - tenant.weight if self._tenants else 0.0
        self._raise_floor()
        self._debts[tenant.name] = tenant.used
        if len(self._debts) > 2 * len(self._tenants) + 64:
            self._debts = {name: used for name, used in self._debts.items() if used > self._floor}

    def _raise_floor(self) -> None:
        if (least := self._present.first()) is not None:
            self._floor = max(self._floor, least[0])

    def _weigh(self, tenant: _Tenant, weight: float) -> None:
        """Update a tenant's weight, which may change while its requests are present."""
        self._weights += weight - tenant.weight
        tenant.weight = weight

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._length += sign
        self._tokens += sign * len(sequence.prompt)
