"""Sequences with adapters: each runs with its own adapter during loads, and waits for no other request's adapter.

The arithmetic device (`tests.engine.fake_device`) computes every number with the contents of the row's slot, so a wrong
slot, a slot written too early, a stale page or a draft of another adapter changes the answer.
"""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.lora import queue as adapters
from jaxinfer.lora.store import LoRAStore
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import FinishReason, LoRARef, Request
from tests.engine.fake_loop import Loop, ids, make_loop, make_request
from tests.lora.fakes import PARTS, Folders, Now, make_store


def loop_of(count: int, folders: Folders, capacity: int = 8, **changes: Any) -> tuple[Loop, LoRAStore, Now]:
    """Return a loop with ``count`` adapter slots; each folder is loaded under its own name."""
    store, now = make_store(folders, capacity)
    loop = make_loop(loras=store, enable_lora=True, max_loras=count, **changes)
    for name in folders.contents:
        store.load(name, name)
    return loop, store, now


def ask(store: LoRAStore, name: str, adapter: str | None, prompt: int = 9, most: int = 8, **changes: Any) -> Request:
    lora = None if adapter is None else store.resolve(adapter)
    return make_request(name, prompt, most, lora=lora, **changes)


def test_adapters_and_none_are_mixed_in_a_batch() -> None:
    loop, store, _ = loop_of(2, Folders(a=1, b=2))
    outputs = loop.run(*(ask(store, name or "base", name) for name in ("a", "b", None)))
    assert len({tuple(output[0]) for output in outputs}) == 3, "equal prompts, other answers"
    loop.check_empty()


def test_a_sequence_runs_in_the_step_of_the_last_part() -> None:
    loop, store, _ = loop_of(1, Folders(a=1))
    loop.add(ask(store, "r", "a"))
    loads, admitted = [], []
    for _ in range(PARTS + 2):
        plan = loop.step()
        loads.append([(slot, part) for slot, part, _ in plan.loads])
        admitted.append(ids(plan.admitted))
    # In the first step the queue finds that the adapter is not resident.
    assert loads == [[], *([(0, part)] for part in range(PARTS)), []]
    assert admitted == [[], [], [], ["r"], []]


def test_one_part_a_step() -> None:
    loop, store, _ = loop_of(3, Folders(a=1, b=2, c=3))
    for name in "abc":
        loop.add(ask(store, name, name))
    counts = [len(loop.step().loads) for _ in range(3 * PARTS + 2)]
    assert counts == [0, *[1] * (3 * PARTS), 0]


def test_nobody_waits_for_an_adapter_that_is_read() -> None:
    loop, store, now = loop_of(2, Folders(a=1, b=2))
    now.late = True
    loop.add(ask(store, "slow", "a"))
    for number in range(3):
        loop.add(ask(store, f"base{number}", None))
    while len(loop.live) > 1:
        loop.step()
    assert list(loop.live) == ["slow"]
    now.run()
    loop.drain()


def test_nobody_waits_for_slots_that_are_taken() -> None:
    loop, store, _ = loop_of(1, Folders(a=1, b=2))
    loop.add(ask(store, "long", "a", most=60))
    for _ in range(PARTS + 2):
        loop.step()
    loop.add(ask(store, "rare", "b"))
    loop.add(ask(store, "base", None))
    loop.add(ask(store, "same", "a"))
    while {"base", "same"} & set(loop.live):
        loop.step()
    assert set(loop.live) == {"long", "rare"}
    loop.drain()


def test_a_rare_adapter_gets_a_slot_from_those_that_never_rest() -> None:
    """Two hot adapters have overlapping requests: without a drain their slots would never be free."""
    loop, store, _ = loop_of(2, Folders(a=1, b=2, rare=3), max_num_seqs=5, max_num_batched_tokens=24, num_pages=60)
    number = 0

    def keep_hot() -> None:
        nonlocal number
        for name in "ab":
            if sum(key.startswith(name) for key in loop.live) < 2:
                number += 1
                loop.add(ask(store, f"{name}{number}", name, most=20 + number % 7))

    for _ in range(40):
        keep_hot()
        loop.step()
    loop.add(ask(store, "rare", "rare"))
    for _ in range(adapters.PATIENCE + 27 + PARTS + 20):
        keep_hot()
        loop.step()
    assert "rare" not in loop.live
    assert any(key.startswith("a") for key in loop.live), "the others go on"
    loop.drain()


def test_who_waits_for_a_turn_keeps_the_slot_until_then() -> None:
    """Two adapters share one slot while no row is free: otherwise each would evict the other, over and over."""
    loop, store, now = loop_of(1, Folders(a=1, b=2), max_num_seqs=1)
    now.late = True
    loop.add(ask(store, "a", "a"))
    loop.add(ask(store, "b", "b"))
    loop.step()
    loop.add(ask(store, "base", None, most=60))
    loop.step()
    now.late = False
    now.run()
    loads = 0
    while "base" in loop.live:
        loads += len(loop.step().loads)
    assert loads == PARTS
    loop.drain()


def test_an_adapter_that_cannot_be_had_ends_its_requests_with_the_reason() -> None:
    folders = Folders(a=1, b=2)
    loop, store, _ = loop_of(1, folders, capacity=1)
    folders.contents["a"] = 9  # and its contents are evicted from host memory, after b is read
    wanted, ends = ask(store, "r", "a", n=2), []
    loop.scheduler.add(wanted)
    for _ in range(6):
        launched = loop.core.launch()
        ends += loop.core.read(launched)
    assert [(end.index, end.finish_reason) for end in ends] == [
        (0, FinishReason.UNAVAILABLE),
        (1, FinishReason.UNAVAILABLE),
    ]
    assert ends[0].stop_reason == "adapter 'a': a has changed since it was loaded: load it again"
    assert not loop.busy


def test_without_adapters_a_request_for_one_is_refused() -> None:
    loop = make_loop()
    with pytest.raises(RequestError, match=r"lora='poet': this engine serves no adapters \(enable_lora is off\)"):
        loop.scheduler.add(make_request("r", 9, lora=LoRARef("poet", "1")))
    assert not loop.busy


def test_what_was_unloaded_before_the_request_came_is_refused() -> None:
    loop, store, _ = loop_of(1, Folders(a=1))
    request = ask(store, "r", "a")
    store.unload("a")
    with pytest.raises(RequestError, match="lora='a' was unloaded"):
        loop.scheduler.add(request)
    assert not loop.busy


def test_a_reload_serves_new_bytes_and_running_requests_end_on_the_old_ones() -> None:
    folders = Folders(a=1)
    loop, store, _ = loop_of(2, folders)
    before = ask(store, "before", "a", most=30)
    loop.add(before)
    for _ in range(8):
        loop.step()
    folders.contents["a"] = 2
    store.load("a", "a")
    after = ask(store, "after", "a", most=30)
    assert (before.lora, after.lora) == (LoRARef("a", "1"), LoRARef("a", "2"))
    loop.add(after)
    loop.drain()
    old, new = (loop.outputs[name][0] for name in ("before", "after"))
    assert old.tokens != new.tokens
    assert new.cached_tokens == 0
    assert store.list()[0].identity == "2"


def test_pages_are_found_under_the_same_content_alone() -> None:
    folders = Folders(a=1, b=2, twin=1)
    loop, store, _ = loop_of(3, folders)
    cached = []
    for number, name in enumerate(("a", "b", None, "a", "twin", "b")):
        loop.run(ask(store, str(number), name, prompt=25))
        cached.append(loop.outputs[str(number)][0].cached_tokens)
    assert cached == [0, 0, 0, 24, 24, 24]


@pytest.mark.parametrize("name", ["a", None])
def test_drafts_are_learnt_from_the_same_content_alone(name: str | None) -> None:
    """Output of one adapter is no draft for another: its text would show in the speed."""
    loop, store, _ = loop_of(2, Folders(a=1, b=2), speculative="suffix", rows=8)
    loop.run(ask(store, "first", "b", most=30))
    drafter = loop.scheduler._drafts._drafter  # type: ignore[union-attr]
    kept = set(drafter.end.__self__._ended)  # type: ignore[attr-defined]
    other = loop.scheduler._sequence(ask(store, "second", name), 0)
    assert len(kept) == 1
    assert other.keys.namespace not in kept
    assert loop.scheduler._sequence(ask(store, "third", "b"), 0).keys.namespace in kept
