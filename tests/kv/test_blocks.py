"""Page pools: pages are never lost or freed twice, and the least recently used page is evicted first."""

import pytest

from jaxinfer.kv.blocks import BlockPool, OutOfPagesError


def test_running_out_takes_nothing():
    pool = BlockPool[str](2)
    pool.take(), pool.take()
    with pytest.raises(OutOfPagesError, match="none of 2 pages is free"):
        pool.take()
    assert (pool.free, pool.held, pool.cached) == (0, 2, 0)
    pool.check({0: 1, 1: 1})


def test_the_last_freed_page_is_taken_first():
    pool = BlockPool[str](4)
    pages = [pool.take() for _ in range(3)]
    pool.drop(pages[1])
    assert pool.take() == pages[1]


def test_a_page_lives_as_long_as_it_has_references():
    pool = BlockPool[str](1)
    page = pool.take()
    pool.hold(page)
    pool.drop(page)
    assert pool.held == 1
    pool.drop(page)
    assert pool.free == 1
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.drop(page)
    with pytest.raises(AssertionError, match="free and cannot be held"):
        pool.hold(page)


def test_cached_pages_are_available_and_can_be_held_again():
    pool = BlockPool[str](2)
    page = pool.take()
    pool.assign(page, "me")
    pool.drop(page)
    assert (pool.free, pool.cached, pool.available, pool.owner(page)) == (1, 1, 2, "me")
    pool.hold(page)
    assert (pool.cached, pool.held) == (0, 1)
    pool.disown(page)
    pool.drop(page)
    assert pool.free == 2


def test_the_longest_unused_is_the_oldest():
    pool = BlockPool[str](3)
    pages = [pool.take() for _ in range(3)]
    for page in pages:
        pool.assign(page, "me")
        pool.drop(page)
    pool.hold(pages[0])
    pool.drop(pages[0])
    assert pool.oldest() == pages[1]
    pool.touch(pages[1])
    assert list(pool._cached) == [pages[2], pages[0], pages[1]]
    pool.disown(pages[2])
    assert (pool.oldest(), pool.free) == (pages[0], 1)


def test_a_page_has_one_owner():
    pool = BlockPool[str](2)
    page = pool.take()
    pool.assign(page, "me")
    with pytest.raises(AssertionError, match="has an owner"):
        pool.assign(page, "you")
    with pytest.raises(AssertionError, match="is free"):
        pool.assign(1 - page, "you")


def _free_twice(pool):
    pool._free.append(pool._free[-1])


def _free_though_held(pool):
    pool._free.append(0)


def _cached_without_owner(pool):
    pool._owners[1] = None


def _reference_too_many(pool):
    pool._refs[0] += 1


def _lost(pool):
    pool._free.pop()


@pytest.mark.parametrize("damage", [_free_twice, _free_though_held, _cached_without_owner, _reference_too_many, _lost])
def test_check_sees(damage):
    pool = BlockPool[str](4)
    for _ in range(2):
        pool.assign(pool.take(), "me")
    pool.drop(1)
    pool.drop(pool.take())
    pool.check({0: 1})
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check({0: 1})


def test_check_compares_with_the_references_that_are_known():
    pool = BlockPool[str](2)
    pool.take()
    with pytest.raises(AssertionError, match="page 0 counts 1 references, 2 are known"):
        pool.check({0: 2})
