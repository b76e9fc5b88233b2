"""Adapter statistics of an engine, and of the requests that wait for adapters."""

from __future__ import annotations

from jaxinfer.lora.usage import LoRAUsage, merged_usage
from tests.engine.fake_loop import make_loop, make_request
from tests.engine.scheduling.test_adapters import ask, loop_of
from tests.lora.fakes import PARTS, Folders


def test_who_waits_for_an_adapter_waits_for_nothing_else() -> None:
    loop, store, _ = loop_of(1, Folders(a=1, b=2), max_num_seqs=2)
    loop.add(ask(store, "long", "a", most=60))
    assert loop.scheduler.waiting == {"capacity": 1, "preempted": 0, "adapter": 0, "sibling": 0}
    loop.step()
    assert loop.scheduler.waiting == {"capacity": 0, "preempted": 0, "adapter": 1, "sibling": 0}
    for _ in range(PARTS + 2):
        loop.step()
    loop.add(ask(store, "rare", "b", n=2))
    for name in ("one", "two"):
        loop.add(ask(store, name, None, most=60))
    loop.step()
    assert loop.scheduler.waiting == {"capacity": 1, "preempted": 0, "adapter": 1, "sibling": 1}
    loop.abort("rare")
    assert loop.scheduler.waiting == {"capacity": 1, "preempted": 0, "adapter": 0, "sibling": 0}
    loop.drain()


def test_adapters_are_counted_as_they_come_and_go() -> None:
    loop, store, _ = loop_of(1, Folders(a=1, b=2, twin=1), max_num_seqs=2)
    assert loop.scheduler.lora_usage() == LoRAUsage(3, 1, 0, 0, 0, {}, {})
    loop.add(ask(store, "one", "a", most=20))
    loop.step()
    assert loop.scheduler.lora_usage() == LoRAUsage(3, 1, 0, 0, 0, {}, {"a": 1})
    loop.step()
    assert loop.scheduler.lora_usage() == LoRAUsage(3, 1, 1, 1, 0, {}, {"a": 1})
    for _ in range(PARTS):
        loop.step()
    loop.add(ask(store, "same", "twin", most=20))
    loop.add(ask(store, "other", "b"))
    store.unload("twin")
    loop.step()
    assert loop.scheduler.lora_usage() == LoRAUsage(2, 1, 1, 1, 0, {"a": 1, "twin": 1}, {"b": 1})
    loop.drain()
    assert loop.scheduler.lora_usage() == LoRAUsage(2, 1, 1, 2, 1, {}, {})


def test_the_wait_for_an_adapter_is_timed() -> None:
    """The clock of the loop counts steps."""
    loop, store, now = loop_of(1, Folders(a=1))
    now.late = True
    loop.patience = 20
    loop.add(ask(store, "r", "a"))
    for _ in range(10):
        loop.step()
    assert loop.core.stats().lora_load_time.count == 0
    now.run()
    loop.drain()
    time = loop.core.stats().lora_load_time
    # The adapter is missing from the first step on, and read after the tenth.
    assert (time.count, time.sum) == (1, 9 + PARTS)


def test_what_comes_for_nobody_is_not_timed() -> None:
    loop, store, _ = loop_of(1, Folders(a=1))
    loop.add(ask(store, "r", "a"))
    loop.step()
    loop.step()
    loop.abort("r")
    loop.run(ask(store, "base", None, most=PARTS + 2))
    stats = loop.core.stats()
    assert stats.loras is not None
    assert (stats.loras.loads, stats.lora_load_time.count) == (1, 0)


def test_without_adapters_there_is_nothing_to_tell() -> None:
    loop = make_loop()
    loop.add(make_request("r", 9, 4))
    assert loop.scheduler.waiting["adapter"] == 0
    assert loop.core.stats().loras is None
    loop.drain()


def test_several_engines_share_names_and_have_slots_of_their_own() -> None:
    one, two = LoRAUsage(3, 2, 1, 5, 4, {"a": 1}, {"b": 2}), LoRAUsage(3, 2, 2, 1, 0, {"a": 2, "c": 1}, {})
    assert merged_usage([one, two]) == LoRAUsage(3, 4, 3, 6, 4, {"a": 3, "c": 1}, {"b": 2})
