"""The journal reports exactly the cached pages, to a listener that starts at any time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxinfer.kv.cache_key import cache_identity
from jaxinfer.kv.journal import DEVICE, HOST
from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.kv.radix import Mark, PageKeys
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core.messages import KvStored
from jaxinfer.types import LoRARef, Request
from tests.kv.fake_device import FakeSequence
from tests.kv.journals import Listener, shareable
from tests.kv.scenes import PROMPT, manager, sequence, serve, served
from tests.kv.test_kv_machine import PAGE, PAGES, RARE, SLOTS, WEIGHTS, WIDTH, Cache, _allowed, _arguments


def journalled(**settings) -> tuple[KVManager, Listener]:
    kv = manager(**settings)
    return kv, Listener(kv)


def test_without_a_change_there_is_nothing_to_tell():
    kv, listener = journalled()
    assert listener.look() is None
    serve(kv, 0, sequence())
    assert listener.look() is not None
    assert listener.look() is None
    kv.release(0)
    assert listener.look() is None, "what is cached is as good as what runs"


def test_a_run_of_pages_is_told_in_one_with_its_parent_first():
    kv, listener = journalled()
    served(kv, sequence(PROMPT[:8]))
    served(kv, sequence(PROMPT))
    served(kv, sequence([*PROMPT[:8], *range(70, 78)]))
    changes = listener.look()
    assert changes is not None
    first, fork = changes.stored
    assert (first.parent, len(first.hashes), first.medium, first.extra) == (None, 4, DEVICE, "")
    assert first.lora is None
    assert (fork.parent, len(fork.hashes)) == (first.hashes[1], 2)
    assert not changes.removed


def test_what_is_evicted_goes_and_what_comes_back_before_anyone_looked_is_not_told():
    kv, listener = journalled(pages=4)
    served(kv, sequence(PROMPT[:16]))
    known = listener.look()
    served(kv, sequence(range(50, 66)))
    served(kv, sequence(PROMPT[:16]))
    assert listener.look() is None
    served(kv, sequence(range(50, 66)))
    changes = listener.look()
    assert known is not None
    assert changes is not None
    assert sorted(changes.removed[0].hashes) == sorted(known.stored[0].hashes)


def test_pages_on_the_host_have_their_medium():
    kv, listener = journalled(pages=5, host_pages=4)
    served(kv, sequence())
    listener.look()
    served(kv, sequence(range(50, 66)))
    changes = listener.look()
    assert changes is not None
    assert {run.medium for run in changes.stored} == {DEVICE, HOST}
    assert [gone.medium for gone in changes.removed] == [DEVICE]
    listener.check()


def test_a_reset_is_told_in_one_word():
    kv, listener = journalled()
    serve(kv, 0, sequence())
    listener.look()
    kv.reset_prefix_cache()
    served(kv, sequence(range(50, 58)))
    changes = listener.look()
    assert changes is not None
    assert (changes.cleared, len(changes.removed), len(changes.stored)) == (True, 0, 1)
    kv.release(0)
    listener.check()


def identity(**changes) -> bytes:
    return cache_identity(Request("a", (1,), SamplingParams(), **changes))


def labelled(kv: KVManager, listener: Listener, namespace: bytes) -> tuple[KvStored, list[bytes]]:
    served(kv, FakeSequence(namespace, list(PROMPT), len(PROMPT), 0, kv.config.page_size))
    changes = listener.look()
    assert changes is not None
    return changes.stored[0], list(changes.stored[0].hashes)


def test_equal_tokens_of_other_namespaces_are_other_pages_and_secrets_stay_secret():
    found = [journalled(pages=64), journalled(pages=64)]
    names = [
        {},
        {"cache_salt": "s"},
        {"cache_scope": "tenant:a"},
        {"cache_scope": "tenant:b"},
        {"lora": LoRARef("x", "hash")},
    ]
    told = [[labelled(*each, identity(**changes)) for changes in names] for each in found]
    for labels in told:
        assert len({hashes[0] for _, hashes in labels}) == len(names)
        assert [label.lora and label.lora.identity for label, _ in labels] == [None, None, None, None, "hash"]
        assert [bool(label.extra) for label, _ in labels] == [False, True, True, True, False]
        assert len({label.extra for label, _ in labels}) == 4
    same = [one[1] == other[1] for one, other in zip(*told, strict=True)]
    assert same == [one[0].extra == other[0].extra for one, other in zip(*told, strict=True)]
    assert same == [True, False, False, False, True], "who guesses a salt cannot try it"


def test_pages_of_images_are_runs_with_keys_of_their_own():
    kv, listener = journalled()
    size = kv.config.page_size
    new = FakeSequence(b"", list(PROMPT), len(PROMPT), 0, size)
    new.keys = PageKeys(b"", size, [Mark(size + 1, size + 2, "a")])
    new.keys.extend(PROMPT)
    served(kv, new)
    changes = listener.look()
    assert changes is not None
    runs = changes.stored
    assert [bool(run.images) for run in runs] == [False, True, False]
    assert (
        b"".join(run.tokens for run in runs) == np.array(PROMPT, np.int32).tobytes()[: 4 * size * (len(PROMPT) // size)]
    )
    assert [run.parent for run in runs[1:]] == [run.hashes[-1] for run in runs[:-1]]
    assert runs[1].extra_keys == (runs[1].images,)


def test_a_code_is_a_part_of_the_hash():
    kv, listener = journalled()
    for kind in (0, 1):
        new = FakeSequence(b"", list(PROMPT), len(PROMPT), kind, kv.config.page_size)
        served(kv, new)
    changes = listener.look()
    assert changes is not None
    first, other = changes.stored
    assert first.tokens == other.tokens
    assert not set(first.hashes) & set(other.hashes)


def test_what_is_shown_can_be_matched():
    """Each reported page matches, for one group, a sequence that begins with it."""
    kv, listener = journalled(pages=5)
    rng = random.Random(1)
    for _ in range(200):
        tokens = [*PROMPT[: rng.choice([4, 8, 12])], *(rng.randint(1, 3) for _ in range(rng.randint(1, 8)))]
        served(kv, sequence(tokens))
        listener.look()
        for node in shareable(kv).values():
            path: list[bytes] = []
            at = node
            while at.parent is not None:
                path.append(at.key[1])
                at = at.parent
            assert kv.match(*_keys(path[::-1], kv.config.page_size), 10**6).tokens >= 4 * len(path)
    listener.check()


def _keys(pages, size):
    tokens = [int.from_bytes(page[at : at + 4], "little") for page in pages for at in range(0, len(page), 4)]
    made = FakeSequence(b"", tokens, len(tokens), 0, size)
    return made.keys, made.codes


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 6), (5, 11)], ids=str)
@pytest.mark.parametrize("host_pages", [0, 3, 9])
@pytest.mark.parametrize("steps", [400, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_journal_is_the_tree_all_its_life(windows, host_pages, steps):
    class Configured(Cache):
        config = KVConfig(PAGES, PAGE, SLOTS, WIDTH, windows, host_pages)

    machine, rng = Configured(), random.Random(repr((windows, host_pages, steps)))
    listener, rules = Listener(machine.kv), WEIGHTS | RARE
    for _ in range(steps):
        (name,) = rng.choices(list(rules), list(rules.values()))
        if name in ("step", "reset") or _allowed(machine, name):
            getattr(machine, name)(**_arguments(rng)[name])
            if rng.random() < 0.5:
                listener.look()
                listener.check()
    listener.look()
    listener.check()
    assert listener.looks > steps / 20
