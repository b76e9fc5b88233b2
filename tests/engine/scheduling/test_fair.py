"""Fair shares: light tenants never wait, heavy tenants get shares by weight, and outputs stay bitwise identical."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest

from jaxinfer.engine.scheduling.fair import FairQueue
from jaxinfer.engine.scheduling.sequence import Status
from tests.engine.fake_loop import RECOMPUTE, SWAP, Loop, make_loop, make_request
from tests.engine.scheduling.test_queues import make_sequence


def fair_loop(slots: int = 8, **changes: Any) -> Loop:
    return make_loop(
        **{
            "scheduling_policy": "fair",
            "max_num_seqs": slots,
            "max_num_batched_tokens": slots + 16,
            "num_pages": 40 * slots,
            "host_pages": 20 * slots,
            "costs": SWAP,
            **changes,
        }
    )


class Crowd:
    """Tenants that always have ``depth`` requests open."""

    def __init__(self, loop: Loop, tenants: dict[str, float], depth: int, prompt: int = 10, most: int = 60) -> None:
        self.loop, self.tenants, self.depth, self.length = loop, tenants, depth, (prompt, most)
        self.numbers = itertools.count()
        self.got = dict.fromkeys(tenants, 0)

    def fill(self) -> None:
        for tenant, weight in self.tenants.items():
            here = sum(name.startswith(f"{tenant}/") for name in self.loop.live)
            for _ in range(self.depth - here):
                number = next(self.numbers)
                name, (prompt, most) = f"{tenant}/{number}", self.length
                changes = {"seed": number, "tenant": tenant, "weight": weight, "cache_salt": name}
                self.loop.add(make_request(name, prompt, most, **changes))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.fill()
            before = {name: len(output[0].tokens) for name, output in self.loop.outputs.items()}
            self.loop.step()
            for name in list(self.loop.outputs):
                output, tenant = self.loop.outputs[name][0], name.split("/")[0]
                if tenant in self.got:
                    self.got[tenant] += len(output.tokens) - before[name]
                if name not in self.loop.live:
                    del self.loop.outputs[name]


def steps_to_first_token(loop: Loop, crowd: Crowd, **changes: Any) -> int:
    number = next(crowd.numbers)
    name = f"light/{number}"
    loop.add(make_request(name, 10, 4, seed=number, tenant="light", **changes))
    output = loop.outputs[name][0]
    for steps in range(1, 200):
        crowd.step()
        if output.tokens:
            return steps
    raise AssertionError("it starves")


def jain(shares: list[float]) -> float:
    """Return Jain's index of fairness: 1 where all shares are equal."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


# ---- light tenants


@pytest.mark.parametrize("way", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
@pytest.mark.parametrize("tenants", [1, 10, 100])
def test_who_uses_little_has_its_first_token_as_if_alone(unchecked, tenants, way):
    solo = fair_loop()
    alone = steps_to_first_token(solo, Crowd(solo, {}, 0))
    loop = fair_loop(costs=way)
    crowd = Crowd(loop, {f"flood{i}": 1.0 for i in range(tenants)}, depth=20 if tenants == 1 else 2)
    crowd.step(tenants + 40)
    assert loop.scheduler.running >= 6
    assert len(loop.scheduler._queue) >= 8
    waits = []
    for _ in range(8):
        waits.append(steps_to_first_token(loop, crowd))
        crowd.step(7)
    assert max(waits) <= 2 * alone, waits


def test_a_flood_of_prompts_does_not_take_the_whole_budget(unchecked):
    loop = fair_loop()
    crowd = Crowd(loop, {"flood": 1.0}, depth=20, prompt=120, most=2)
    crowd.step(40)
    assert [steps_to_first_token(loop, crowd) for _ in range(5)] == [2] * 5


def test_steps_are_short_where_tenants_share_and_a_first_token_shares_none(unchecked):
    loop = fair_loop(max_num_batched_tokens=8 + 48, prefill_sizes=(8, 16))
    crowd = Crowd(loop, {"flood": 1.0}, depth=20, prompt=120, most=2)
    prompts = list[set[str]]()

    def step(count: int) -> int:
        """Return the largest number of prompt tokens in a step; append the tenants of each step to ``prompts``."""
        most = 0
        for _ in range(count):
            crowd.step()
            plans = loop.scheduler._prefill.plans
            prompts.append({plan.sequence.request.tenant for plan in plans})
            most = max(most, sum(plan.chunk.size for plan in plans))
        return most

    assert step(20) == 48
    loop.add(make_request("light/0", 40, 4, seed=0, tenant="light", cache_salt="light"))
    prompts.clear()
    assert step(8) == 16
    first = prompts.index({"light"})
    assert first < 2, "the planned step"
    assert prompts[first : first + 4] == [{"light"}] * 3 + [{"flood"}]
    assert step(40) == 16


def test_prompts_wait_for_a_first_token_up_to_a_quantum():
    queue = FairQueue(slots=2, quantum=32, chunk=16)
    flood, light = (make_sequence(place, tenant=name, prompt=100) for place, name in enumerate(("flood", "light")))
    queue.push(flood)
    assert queue.pop() is flood
    queue.charge(flood, prompt=16)
    assert queue.prompt_limit(flood) is None
    queue.push(light)
    assert queue.pop() is light
    flood.status = light.status = Status.RUNNING
    for computed in (31, 1):
        assert (queue.prompt_limit(flood), queue.prompt_limit(light)) == (0, 16)
        queue.charge(light, prompt=computed)
    assert (queue.prompt_limit(flood), queue.prompt_limit(light)) == (16, 16)
    queue.left(light)
    assert queue.prompt_limit(flood) == 16, "it may come again"


def test_it_has_its_share_of_the_slots_at_once(unchecked):
    loop = fair_loop()
    crowd = Crowd(loop, {"flood": 1.0}, depth=20)
    crowd.step(30)
    crowd.tenants["late"], crowd.got["late"] = 1.0, 0
    crowd.step(10)
    here = [sequence.request.tenant for sequence in loop.scheduler._running.values()]
    assert sorted(here) == ["flood"] * 4 + ["late"] * 4


# ---- shares


@pytest.mark.parametrize(
    ("weights", "depth"),
    [([1, 1], 12), ([1] * 5, 6), ([1] * 24, 2), ([1, 2, 3], 12), ([1, 4], 12), ([1, 1, 1, 5] * 3, 4)],
)
def test_what_is_computed_goes_by_weight(unchecked, weights, depth):
    loop = fair_loop()
    tenants = {f"t{i}": float(weight) for i, weight in enumerate(weights)}
    crowd = Crowd(loop, tenants, depth)
    crowd.step(100)
    start = dict(crowd.got)
    crowd.step(40 * len(weights) + 300)
    shares = [(crowd.got[name] - start[name]) / weight for name, weight in tenants.items()]
    assert jain(shares) >= 0.95, shares


def test_shares_are_of_what_is_used_not_of_what_is_asked_for(unchecked):
    """A tenant that requests 1,000 tokens and stops after 5 is served before one that uses all 10 that it requested."""
    queue = FairQueue(slots=2)
    asked = make_sequence(0, tenant="stops", prompt=3, most=1000)
    other = make_sequence(1, tenant="takes", prompt=3, most=10)
    queue.push(asked)
    queue.push(other)
    assert {queue.pop(), queue.pop()} == {asked, other}
    for sequence, output in ((asked, 5), (other, 10)):
        queue.charge(sequence, prompt=3, output=output)
        queue.push(make_sequence(sequence.arrival + 10, tenant=sequence.request.tenant))
        queue.left(sequence)
    first = queue.peek()
    assert first is not None
    assert first.request.tenant == "stops", "it used 13, not 2003"


@pytest.mark.parametrize("agrees", [False, True])
def test_what_is_computed_again_is_not_charged_again(unchecked, agrees):
    settings = {"num_pages": 12, "max_model_len": 64, "costs": RECOMPUTE, "enable_prefix_caching": False}
    loop = fair_loop(slots=3, **settings, decode_agrees=agrees)
    queue, charged = loop.scheduler._queue, dict.fromkeys("abc", 0)
    charge = queue.charge

    def counted(sequence, prompt=0, output=0):
        charged[sequence.request.tenant] += prompt + output
        charge(sequence, prompt, output)

    queue.charge = counted  # type: ignore[method-assign]
    for tenant in "abc":
        loop.add(make_request(tenant, 9, 40, seed=ord(tenant), tenant=tenant))
    loop.drain()
    assert loop.scheduler.stats.snapshot().preemptions["recompute"]
    assert charged == dict.fromkeys("abc", 8 + 40)


def test_adapters_of_a_tenant_share_alike_what_it_gets(unchecked):
    """Requests of the popular adapter come first and cost ten times the tokens: the least served adapter is next."""
    queue, turns = FairQueue(slots=2), []
    for arrival in range(30):
        queue.push(make_sequence(arrival, tenant="one", lora="popular"))
    for arrival in range(30, 40):
        queue.push(make_sequence(arrival, tenant="one", lora=("rare", None)[arrival % 2]))
    for _ in range(12):
        sequence = queue.pop()
        lora = sequence.request.lora
        turns.append("none" if lora is None else lora.name)
        queue.charge(sequence, output=10 if turns[-1] == "popular" else 1)
        queue.left(sequence)
    assert turns == ["popular", *["rare", "none"] * 5, "popular"]
    assert queue._tenants["one"].used == 2 * (2 * 10 + 10)


def test_an_adapter_that_comes_saves_nothing_up(unchecked):
    queue = FairQueue(slots=1)
    for arrival in range(4):
        queue.push(make_sequence(arrival, lora="stays"))
    for _ in range(2):
        queue.charge(sequence := queue.pop(), output=50)
        queue.left(sequence)
    queue.push(make_sequence(4, lora="comes"))
    queue.push(make_sequence(5, lora="comes"))
    assert queue.pop().arrival == 4, "it begins where the last one that was served stood"
    assert queue._tenants[""].waiting._accounts["comes"].used == 100


def test_adapters_that_are_gone_leave_no_trace(unchecked):
    queue = FairQueue(slots=1)
    queue.push(make_sequence(0, lora="stays"))
    for arrival in range(1, 1000):
        queue.push(sequence := make_sequence(arrival, lora=str(arrival)))
        queue.remove(sequence)
    assert len(queue._tenants[""].waiting._accounts) < 100


def test_what_was_under_way_when_its_adapter_was_taken_is_charged_to_an_absent_tenant():
    queue = FairQueue(slots=1)
    queue.push(make_sequence(0, tenant="other"))
    queue.push(away := make_sequence(1, tenant="away", lora="pirate"))
    queue.remove(away)  # the queue of an adapter holds it
    queue.charge(away, output=50)
    queue.push(away)
    assert queue._tenants["away"].used == 100


# ---- no loopholes


def test_leaving_for_a_moment_pays_no_debt():
    queue = FairQueue(slots=1, quantum=100)
    stays, comes = make_sequence(0, tenant="stays"), make_sequence(1, tenant="comes")
    queue.push(stays)
    assert queue.pop() is stays
    queue.charge(stays, prompt=1)
    queue.push(comes)
    assert queue.preemption_victim() is stays, "its first tokens"
    queue.push(stays)
    queue.left(stays)
    assert queue.pop() is comes
    queue.charge(comes, output=100)
    queue.left(comes)
    queue.push(make_sequence(2, tenant="comes"))
    assert queue.pop() is stays
    assert queue.preemption_victim() is None, "it has used 200 more than the other one"


def test_nobody_saves_up_while_away():
    queue = FairQueue(slots=1)
    busy = make_sequence(0, tenant="busy")
    queue.push(busy)
    assert queue.pop() is busy
    queue.charge(busy, output=1000)
    late = make_sequence(1, tenant="late")
    queue.push(late)
    assert queue._tenants["late"].used == 2000


def test_more_tenants_than_slots_take_turns_a_quantum_each():
    queue = FairQueue(slots=1, quantum=10)
    first, second = make_sequence(0, tenant="a"), make_sequence(1, tenant="b")
    queue.push(first)
    assert queue.pop() is first
    queue.charge(first, prompt=1)
    queue.push(second)
    queue.charge(make_sequence(1, tenant="b"), prompt=1)  # no longer new
    queue.charge(first, output=5)
    assert queue.preemption_victim() is None, "ten ahead"
    queue.charge(first, output=1)
    assert queue.preemption_victim() is first


def test_tenants_that_are_gone_leave_no_trace():
    queue = FairQueue(slots=1)
    queue.push(make_sequence(0, tenant="stays"))
    tracemalloc.start()
    try:
        for arrival in range(1, 3000):
            queue.push(sequence := make_sequence(arrival, tenant=str(arrival)))
            queue.remove(sequence)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(queue._debts) < 100
    assert grown < 100_000
