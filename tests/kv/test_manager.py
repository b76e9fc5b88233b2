"""KV manager calls, one behaviour per test; `test_kv_machine.py` checks the stored contents."""

import pytest

from jaxinfer.kv.manager import KVUsage
from jaxinfer.kv.store import Copy
from tests.kv.scenes import PROMPT, manager, match, sequence, serve, served

# ---- capacity


def test_pages_on_demand():
    kv = manager(pages=3)
    assert kv.admit(0, None, 5)
    assert kv.usage() == KVUsage(total=3, free=1, cached=0, held=2, host_total=0, host_used=0)
    assert kv.extend(0, 8)
    assert kv.available == 1, "the page was there"
    assert kv.extend(0, 9)
    assert not kv.extend(0, 13)
    assert kv.available == 0
    assert len(set(kv.tables[0, 0, :3])) == 3
    kv.release(0)
    assert kv.available == 3


def test_no_room_changes_nothing():
    kv = manager(pages=3)
    assert kv.admit(0, None, 5)
    before = kv.usage()
    assert not kv.admit(1, None, 8)
    assert not kv.extend(0, 13)
    assert kv.usage() == before
    kv.check()
    assert kv.admit(1, None, 4), "the slot is still empty"


def test_a_slot_is_filled_once_and_a_table_has_a_width():
    kv = manager()
    assert kv.admit(0, None, 4)
    with pytest.raises(AssertionError, match="slot 0 is in use"):
        kv.admit(0, None, 4)
    with pytest.raises(ValueError, match="33 tokens need 9 pages, a sequence can have 8"):
        kv.extend(0, 33)


# ---- prefix hits


def test_a_prompt_that_was_served_is_found():
    kv = manager()
    pages = served(kv, sequence())
    assert kv.usage().cached == 4, "the fifth page is not full"
    again = sequence()
    hit = match(kv, again)
    assert hit.tokens == 16
    assert kv.usage().held == 0, "a match holds nothing"
    assert kv.admit(0, hit, 17)
    assert kv.tables[0, 0, :4].tolist() == pages[:4]
    assert kv.usage().held == 5
    kv.check()


@pytest.mark.parametrize(
    "other",
    [
        sequence(salt=b"tenant"),
        sequence(kind=1),
        sequence(prompt=0),
        sequence([9, *PROMPT[1:]]),
    ],
    ids=["namespace", "class", "decoded", "tokens"],
)
def test_what_differs_is_not_found(other):
    kv = manager()
    served(kv, sequence())
    assert match(kv, other).tokens == 0


def test_the_limit_bounds_the_match():
    kv = manager()
    served(kv, sequence())
    assert [match(kv, sequence(), limit).tokens for limit in (0, 3, 4, 7, 8, 99)] == [0, 3, 4, 7, 8, 16]


def test_nothing_is_found_with_the_cache_off():
    kv = manager(prefix_caching=False)
    served(kv, sequence())
    assert match(kv, sequence()).tokens == 0
    assert kv.usage().free == 16


def test_the_head_of_a_page_is_copied():
    kv = manager()
    pages = served(kv, sequence())
    new = sequence([*PROMPT[:6], 1, 2, 3])
    hit = match(kv, new)
    assert hit.tokens == 6
    assert kv.admit(0, hit, 9)
    own = int(kv.tables[0, 0, 1])
    assert own not in pages[:4], "only the last page, which is not full, was free"
    assert kv.take_moves() == ([], [Copy((pages[1],), (own,))], [])
    assert match(kv, sequence()).tokens == 16, "the donor is still there"
    kv.check()


def test_a_donor_gives_its_own_page_where_there_is_no_other():
    kv = manager(pages=3)
    served(kv, sequence(PROMPT[:12]))
    new = sequence([*PROMPT[:6], 1, 2, 3, 4, 5, 6])
    hit = match(kv, new)
    assert hit.tokens == 6
    assert kv.admit(0, hit, 12)
    _, (copy,), _ = kv.take_moves()
    assert copy.source[0] in kv.tables[0, 0, :3]
    assert kv.usage().held == 3
    kv.check()


def test_a_match_is_refused_after_an_eviction():
    kv = manager(pages=5)
    served(kv, sequence())
    hit = match(kv, sequence())
    assert kv.admit(0, None, 20)
    with pytest.raises(AssertionError, match="evicted since the match"):
        kv.admit(1, hit, 17)


def test_equal_pages_become_one():
    kv = manager()
    first, second = sequence(), sequence()
    assert kv.admit(0, None, 17)
    assert kv.admit(1, None, 17)
    kv.take_moves()
    kv.publish(0, first.keys, first.codes, 17)
    assert kv.usage().held == 10
    kv.publish(1, second.keys, second.codes, 17)
    assert kv.usage().held == 6
    assert kv.tables[0, 0, :4].tolist() == kv.tables[0, 1, :4].tolist()
    assert kv.tables[0, 0, 4] != kv.tables[0, 1, 4]
    kv.check()


def test_publishing_goes_on_where_it_stopped():
    kv = manager()
    new = sequence(PROMPT[:6])
    assert kv.admit(0, None, 6)
    kv.publish(0, new.keys, new.codes, 6)
    assert match(kv, sequence()).tokens == 0, "nothing is computed before the next step"
    kv.take_moves()
    kv.publish(0, new.keys, new.codes, 6)
    assert match(kv, sequence()).tokens == 4
    new.feed(PROMPT[6:12])
    assert kv.extend(0, 12)
    kv.publish(0, new.keys, new.codes, 12)
    assert kv.match(new.keys, new.codes, 12).tokens == 12
    kv.check()


# ---- eviction


def test_the_longest_unused_is_evicted_leaves_first():
    kv = manager(pages=5)
    old, young = sequence(PROMPT[:8]), sequence(range(50, 58))
    served(kv, old)
    served(kv, young)
    for evicted, found in [(0, 8), (1, 4), (2, 0)]:
        assert kv.match(old.keys, old.codes, 8).tokens == found, evicted
        assert kv.match(young.keys, young.codes, 8).tokens == 8
        assert kv.extend(0, 4 * (evicted + 2)) if evicted else kv.admit(0, None, 8)
    assert kv.match(young.keys, young.codes, 8).tokens == 4


def test_a_hit_makes_young_again():
    kv = manager(pages=4)
    old, young = sequence(PROMPT[:8]), sequence(range(50, 58))
    served(kv, old)
    served(kv, young)
    assert kv.admit(0, kv.match(old.keys, old.codes, 8), 8)
    kv.release(0)
    assert kv.admit(0, None, 8)
    assert kv.match(old.keys, old.codes, 8).tokens == 8
    assert kv.match(young.keys, young.codes, 8).tokens == 0


def test_what_a_slot_uses_is_never_evicted():
    kv = manager(pages=6)
    new = sequence()
    serve(kv, 0, new)
    assert kv.available == 1
    assert not kv.admit(1, None, 8)
    assert kv.admit(1, None, 4)
    assert kv.match(new.keys, new.codes, 16).tokens == 16


def test_reset_forgets_also_what_runs_but_takes_nothing_away():
    kv = manager(host_pages=2)
    served(kv, sequence(range(50, 58)))
    serve(kv, 0, sequence())
    table, held = kv.tables[0, 0].tolist(), kv.usage().held
    assert kv.reset_prefix_cache() == 2 + 4
    assert (kv.usage().cached, kv.usage().held) == (0, held)
    assert kv.tables[0, 0].tolist() == table
    assert match(kv, sequence()).tokens == match(kv, sequence(range(50, 58))).tokens == 0
    kv.check()
    whole = sequence()
    kv.publish(0, whole.keys, whole.codes, 16)
    assert match(kv, sequence()).tokens == 0, "what was computed before the reset stays out"
    kv.release(0)
    assert kv.usage().free == kv.usage().total
    served(kv, sequence())
    assert match(kv, sequence()).tokens == 16, "and what is computed after it does not"


def test_what_was_swapped_out_before_a_reset_stays_out():
    kv = manager(host_pages=8)
    serve(kv, 0, sequence())
    swapped = kv.swap_out(0, 16)
    kv.take_moves()
    kv.reset_prefix_cache()
    assert kv.swap_in(0, swapped)
    kv.take_moves()
    whole = sequence()
    kv.publish(0, whole.keys, whole.codes, 16)
    assert match(kv, sequence()).tokens == 0
    assert kv.fork(0, 1, 16)
    kv.take_moves()
    kv.publish(1, whole.keys, whole.codes, 16)
    assert match(kv, sequence()).tokens == 0
    kv.check()


# ---- forks


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_pages_and_copies_the_rest(caching):
    kv = manager(prefix_caching=caching)
    serve(kv, 0, sequence(PROMPT[:10]))
    assert kv.fork(0, 1, 10)
    parent, child = kv.tables[0, :2, :3].tolist()
    assert parent[:2] == child[:2]
    assert kv.take_moves() == ([], [Copy((parent[2],), (child[2],))], [])
    assert kv.usage().held == 4
    kv.check()
    kv.release(0)
    assert kv.usage().held == 3
    kv.check()


def test_a_fork_needs_no_page_at_the_end_of_one():
    kv = manager(pages=2)
    serve(kv, 0, sequence(PROMPT[:8]))
    assert kv.fork(0, 1, 8)
    assert kv.take_moves() == ([], [], [])
    assert not kv.extend(1, 9)
    kv.check()


def test_a_page_that_is_not_computed_yet_is_not_copied():
    kv = manager()
    assert kv.admit(0, None, 6)
    assert not kv.fork(0, 1, 6)
    assert kv.fork(0, 1, 4), "full pages are shared, not copied"
    kv.take_moves()
    assert kv.fork(0, 2, 6)


def test_a_child_publishes_on_from_its_parent():
    kv = manager()
    parent = sequence(PROMPT[:9])
    serve(kv, 0, parent)
    assert kv.fork(0, 1, 9)
    child = sequence(PROMPT)
    kv.take_moves()
    assert kv.extend(1, 17)
    kv.publish(1, child.keys, child.codes, 17)
    assert match(kv, sequence()).tokens == 16
    kv.check()


def test_a_child_cannot_publish_what_is_known_under_another_key():
    kv = manager()
    known, other = sequence(PROMPT[:8]), sequence(PROMPT[:8], salt=b"tenant")
    assert kv.admit(0, None, 8)
    assert kv.fork(0, 1, 8)
    kv.take_moves()
    kv.publish(0, known.keys, known.codes, 8)
    kv.publish(1, other.keys, other.codes, 8)
    assert match(kv, known, 8).tokens == 8
    assert match(kv, other).tokens == 0
    kv.check()


def test_nothing_is_found_below_a_page_that_is_lost():
    kv = manager(pages=6)
    known = sequence(PROMPT[:4])
    serve(kv, 2, known)
    new = sequence(PROMPT[:8])
    assert kv.admit(0, None, 8)
    kv.take_moves()
    assert kv.fork(0, 1, 8)  # keeps the first page, which slot 0 replaces by the known one
    kv.publish(0, new.keys, new.codes, 8)
    kv.release(0)
    kv.release(2)
    assert kv.match(new.keys, new.codes, 8).tokens == 8
    assert kv.admit(3, None, 16)
    assert kv.match(new.keys, new.codes, 8).tokens == 0
    kv.take_moves()
    kv.publish(1, new.keys, new.codes, 8)
    assert kv.match(new.keys, new.codes, 8).tokens == 8
    kv.check()


# ---- windows


def test_pages_that_no_query_sees_are_freed():
    kv = manager(windows=(None, 6))
    assert kv.admit(0, None, 16)
    kv.slide(0, 8)  # sees 3..8
    assert kv.usage().held == 4
    assert [pool.held for pool in kv._store.pools] == [4, 4]
    kv.slide(0, 9)  # sees 4..9
    assert [pool.held for pool in kv._store.pools] == [4, 3]
    assert kv.tables[1, 0, 0] == 0
    kv.slide(0, 16)  # sees 11..16
    assert [pool.held for pool in kv._store.pools] == [4, 2]
    kv.check()


def test_a_windowed_sequence_runs_in_few_pages():
    kv = manager(pages=3, windows=(6,))
    new = sequence([])
    assert kv.admit(0, None, 1)
    for length in range(1, 32):
        new.feed([1])
        kv.publish(0, new.keys, new.codes, length)
        kv.slide(0, length)
        assert kv.extend(0, length + 1)
        kv.check()


def test_a_hit_needs_only_what_the_windows_show():
    kv = manager(pages=8, windows=(None, 6))
    new = sequence()
    serve(kv, 0, new)
    kv.slide(0, 17)
    assert kv.extend(0, 28)
    kv.release(0)
    windowed = kv._store.pools[1]
    while windowed.free < 6:
        kv._store._evict(1)  # pages outside the window are evicted first
    assert match(kv, new).tokens == 16
    assert match(kv, new, 12).tokens == 0, "the window before token 12 is lost"
    assert kv.admit(0, match(kv, new), 17)
    assert [pool.held for pool in kv._store.pools] == [5, 3]
    assert kv.tables[1, 0, :2].tolist() == [0, 0]
    kv.check()


def test_a_child_is_refused_what_its_parent_let_go():
    kv = manager(windows=(6,))
    serve(kv, 0, sequence())
    kv.slide(0, 17)
    assert not kv.fork(0, 1, 9)
    assert kv.fork(0, 1, 17)
    kv.check()


# ---- forks that are adopted


@pytest.mark.parametrize("length", [8, 10])
def test_a_slot_goes_on_with_the_pages_of_its_fork(length):
    kv = manager()
    known = sequence(PROMPT[:length])
    serve(kv, 0, known)
    assert kv.fork(0, 2, length)
    assert kv.extend(0, 17)
    assert kv.extend(2, 13)
    kv.take_moves()
    own, fork = kv.tables[0, 0, :5].tolist(), kv.tables[0, 2, :4].tolist()
    kv.adopt(0, 2)
    kv.check()
    assert kv.tables[0, 0, :4].tolist() == fork
    assert kv.tables[0, 2, :5].tolist() == own
    held = kv.usage().held
    kv.release(2)
    kv.check()
    assert kv.usage().held == held - 3, "what was shared is the slot's"
    assert kv.extend(0, 17), "the table goes on where the fork's ended"
    assert kv.tables[0, 0, :4].tolist() == fork
    whole = sequence(PROMPT)
    kv.publish(0, whole.keys, whole.codes, 17)
    kv.check()
    assert kv.tables[0, 0, 1] == fork[1]
    assert match(kv, sequence()).tokens == 16, "it publishes on from what was published before the fork"
    kv.release(0)
    kv.reset_prefix_cache()
    assert kv.usage().free == 16


def test_pages_of_forks_that_lost_are_free_at_once():
    kv = manager(pages=6)
    serve(kv, 0, sequence(PROMPT[:10]))
    for fork in (1, 2, 3):
        assert kv.fork(0, fork, 10)
    assert not kv.available
    for fork in (1, 2, 3):
        kv.release(fork)
    assert not kv.available, "copies are on their way to their pages"
    kv.take_moves()
    assert kv.available == 3
    kv.check()


# ---- the consistency check


def _lost_reference(kv):
    kv._slots[0].pages[0].pop()
    kv._counts[0] -= 1


def _wrong_table(kv):
    kv.tables[0, 0, 1] += 1


def _shared_writable(kv):
    kv._slots[1].sealed = 0


def _unknown_to_the_tree(kv):
    next(kv._store.tree.nodes()).pages[0] = 15


def _pins(kv):
    kv._slots[0].cursor = None


def _window_gap(kv):
    kv._slots[0].firsts[0] = 1


def _host_page_lost(kv):
    kv._swapped.clear()


def _wrong_count(kv):
    kv._counts[0] += 1


def _half_adopted(kv):
    kv._slots[0], kv._slots[1] = kv._slots[1], kv._slots[0]


DAMAGE = [
    _lost_reference, _wrong_table, _shared_writable, _unknown_to_the_tree, _pins, _window_gap, _host_page_lost,
    _wrong_count, _half_adopted,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_sees(damage):
    kv = manager(host_pages=8)
    serve(kv, 0, sequence())
    assert kv.fork(0, 1, 17)
    served(kv, sequence(range(50, 58)))
    serve(kv, 2, sequence(range(30, 36)))
    assert kv.swap_out(2, 6) is not None
    kv.check()
    damage(kv)
    with pytest.raises(AssertionError):
        kv.check()
