"""1,000 random schedules of loads, unloads, reloads under one name, requests and aborts: nothing is stale or leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxinfer.lora.queue import AdapterQueue
from jaxinfer.lora.store import LoRAStore
from tests.engine.fake_loop import RECOMPUTE, SWAP, Loop
from tests.engine.scheduling.test_adapters import ask, loop_of
from tests.lora.fakes import Folders


def draw_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "count": rng.choice((1, 1, 2, 3)),
        "capacity": rng.choice((3, 3, 6)),
        "max_num_seqs": rng.choice((1, 2, 3, 4)),
        "max_num_batched_tokens": 20,
        "num_pages": rng.choice((16, 18, 30)),
        "host_pages": rng.choice((0, 12)),
        "costs": rng.choice((SWAP, RECOMPUTE, None)),
        "scheduling_policy": rng.choice(("fcfs", "priority", "fair")),
        "async_scheduling": rng.choice((True, True, False)),
        "batching": rng.choice(("continuous", "continuous", "static")),
        "exactness": rng.choice(("exact", "relaxed")),
        "decode_agrees": rng.choice((False, True)),
        "speculative": rng.choice((None, None, "ngram", "suffix")),
    }


def run_schedule(seed: int) -> None:
    """Run random loads, unloads, reloads under one name, requests and aborts. Check every token, all pins after each
    step, and that in the end nothing is left."""
    rng = random.Random(seed)
    names, changes = "pqrst", draw_settings(rng)
    folders = Folders(**{name: number + 1 for number, name in enumerate(names)})
    if changes["speculative"]:
        changes["rows"] = changes["max_num_seqs"] + 3
    loop, store, now = loop_of(changes.pop("count"), folders, changes.pop("capacity"), **changes)
    loop.patience, contents, came = 300, len(names), 0
    for _ in range(40):
        now.late = rng.random() < 0.3
        match rng.randrange(8):
            case 0:  # new contents under the same name
                contents += 1
                name = rng.choice(names)
                path = f"{name}{contents}"
                folders.contents[path] = contents
                store.load(name, path)
            case 1 if len(store.list()) > 1:
                store.unload(rng.choice(store.list()).name)
            case 2 if loop.live:
                loop.abort(rng.choice(sorted(loop.live)), rng.choice((None, None, 0)))
            case 3:
                now.run()
            case _:
                came += 1
                name = rng.choice([*(each.name for each in store.list()), None])
                own = {"n": rng.choice((1, 1, 2)), "priority": rng.randrange(3), "tenant": rng.choice("xy")}
                loop.add(ask(store, str(came), name, rng.randrange(1, 40), rng.randrange(1, 20), seed=came, **own))
        check_usage(loop, store)
        for _ in range(rng.randrange(4)):
            loop.step()
            check_usage(loop, store)
    now.late = False
    now.run()
    loop.drain()
    loop.check_empty()
    check_nothing_left(loop, store)


def check_usage(loop: Loop, store: LoRAStore) -> None:
    """Compare the reported adapter usage with a count over all sequences."""
    scheduler = loop.scheduler
    queue = scheduler._loras
    assert isinstance(queue, AdapterQueue)
    usage, waiting = scheduler.lora_usage(), list(queue)
    assert usage is not None
    names = [
        {each.request.lora.name for each in some if each.request.lora}
        for some in (scheduler._running.values(), waiting)
    ]
    assert [set(usage.running), set(usage.waiting)] == names
    assert sum(usage.running.values()) == sum(bool(each.request.lora) for each in scheduler._running.values())
    assert sum(usage.waiting.values()) == sum(bool(each.request.lora) for each in waiting)
    held = {each for wanted in queue._held.values() for each in wanted.sequences.values()}
    reasons = scheduler.waiting
    assert (held, reasons["adapter"]) == (queue.held, len(held))
    assert reasons["preempted"] == len(scheduler._preempted - held)
    assert reasons["capacity"] == len(waiting) - len(scheduler._preempted | held)
    assert usage.loaded == len(store.list())
    assert usage.slots_used == usage.loads - usage.evictions <= usage.slots


def check_nothing_left(loop: Loop, store: LoRAStore) -> None:
    """Check that all contents kept are named or resident on the device."""
    queue = loop.scheduler._loras
    assert isinstance(queue, AdapterQueue)
    loop.step()
    left = queue._held, queue._line, queue._inside, queue._running, queue._coming, queue._draining
    assert not any(left), left
    named, lying = {each.identity for each in store.list()}, set(queue._slots.identities)
    assert set(store._contents) == named | lying
    for identity, content in store._contents.items():
        assert (content.live, content.pins) == (0, int(identity in lying))


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(more, marks=pytest.mark.slow) for more in range(2, 10))])
def test_random_schedules_leave_nothing_stale(block: int, seed: int) -> None:
    for number in range(100):
        case = 1000 * seed + 100 * block + number
        try:
            run_schedule(case)
        except Exception as error:
            error.add_note(f"schedule {case}")
            raise
