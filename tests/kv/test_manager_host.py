"""Pages on the host: swapped-out sequences, and evicted pages that are loaded again."""

import pytest

from jaxinfer.kv.manager import KVUsage
from jaxinfer.kv.store import Export, Import
from tests.kv.fake_device import FakeDevice, check_order
from tests.kv.scenes import PROMPT, manager, match, sequence, serve, served


def test_a_swapped_sequence_comes_back():
    kv = manager(host_pages=5)
    device = FakeDevice(kv)
    new = sequence()
    assert kv.admit(0, None, 17)
    kv.take_moves()
    new.slot, new.scheduled = 0, 17
    device.compute(new, [new])
    swapped = kv.swap_out(0, 17)
    assert swapped is not None
    assert kv.usage() == KVUsage(total=16, free=16, cached=0, held=0, host_total=5, host_used=5)
    kv.check()
    assert kv.admit(1, None, 32), "the pages are free in the same step"
    assert kv.swap_in(2, swapped)
    exports, _, imports = moves = kv.take_moves()
    assert [len(exports), len(imports)] == [5, 5]
    device.move(*moves)
    new.slot = 2
    device.verify(new)
    assert kv.usage().host_used == 0
    kv.check()


def test_too_little_host_memory_swaps_nothing():
    kv = manager(host_pages=4)
    serve(kv, 0, sequence())
    before = kv.usage()
    assert kv.swap_out(0, 17) is None
    assert kv.usage() == before
    assert kv.take_moves() == ([], [], [])


def test_bytes_that_are_still_to_come_are_not_swapped():
    kv = manager(host_pages=9)
    assert kv.admit(0, None, 8)
    assert kv.swap_out(0, 8) is None
    kv.take_moves()
    assert kv.swap_out(0, 8) is not None


def test_a_sequence_that_ends_outside_frees_its_host_pages():
    kv = manager(host_pages=5)
    serve(kv, 0, sequence())
    swapped = kv.swap_out(0, 17)
    kv.drop(swapped)
    assert kv.usage().host_used == 0
    assert kv.take_moves()[0] == [], "nobody wants the bytes any more"
    with pytest.raises(KeyError):
        kv.drop(swapped)


def test_evicted_pages_come_back_from_the_host():
    kv = manager(pages=4, host_pages=4)
    new = sequence(PROMPT[:16])
    pages = served(kv, new)
    assert kv.admit(0, None, 16)
    exports, _, _ = kv.take_moves()
    assert [move.source for move in exports] == [(page,) for page in reversed(pages)]
    kv.release(0)
    hit = kv.match(new.keys, new.codes, 16)
    assert hit.tokens == 16
    assert kv.admit(0, hit, 16)
    _, _, imports = kv.take_moves()
    hosts = {move.source[0]: move.host for move in exports}
    table = kv.tables[0, 0].tolist()
    assert imports == [Import(hosts[old], (table[index],)) for index, old in enumerate(pages)]
    kv.check()


def test_what_is_on_the_host_already_is_not_exported_again():
    kv = manager(pages=2, host_pages=4)
    new = sequence(PROMPT[:8])
    served(kv, new)
    for exported in (2, 0):
        assert kv.admit(0, None, 8)
        assert len(kv.take_moves()[0]) == exported
        kv.release(0)
        assert kv.admit(0, kv.match(new.keys, new.codes, 8), 8)
        assert len(kv.take_moves()[2]) == 2
        kv.release(0)


def test_the_head_of_a_page_on_the_host_is_imported():
    kv = manager(pages=4, host_pages=4)
    served(kv, sequence(PROMPT[:16]))
    assert kv.admit(0, None, 12)
    kv.take_moves()
    kv.release(0)
    new = sequence([*PROMPT[:6], 1, 2, 3])
    assert kv.match(new.keys, new.codes, 8).tokens == 6
    assert kv.admit(0, kv.match(new.keys, new.codes, 8), 9)
    _, copies, imports = kv.take_moves()
    assert copies == []
    assert [move.target for move in imports] == [(int(kv.tables[0, 0, 1]),)]
    assert kv.match(sequence().keys, sequence().codes, 16).tokens == 16, "the donor is still there"
    kv.check()


def test_swapping_takes_host_pages_from_the_cache():
    kv = manager(pages=4, host_pages=2)
    cached = sequence(PROMPT[:8])
    served(kv, cached)
    assert kv.admit(0, None, 16)
    assert kv.usage().host_used == 2
    kv.take_moves()
    assert kv.swap_out(0, 4) is not None
    assert kv.match(cached.keys, cached.codes, 8).tokens == 4
    assert kv.usage().host_used == 2
    kv.check()


def test_the_oldest_on_the_host_gives_way_to_a_newer():
    kv = manager(pages=2, host_pages=2)
    old, young = sequence(PROMPT[:8]), sequence(range(50, 58))
    served(kv, old)
    served(kv, young)
    assert kv.match(old.keys, old.codes, 8).tokens == 8
    assert kv.admit(0, None, 8)
    assert kv.match(old.keys, old.codes, 8).tokens == 0
    assert kv.match(young.keys, young.codes, 8).tokens == 8
    exports = kv.take_moves()[0]
    assert len(exports) == len({move.host for move in exports}) == 2
    kv.check()


def test_what_was_evicted_last_stays_longest_on_the_host():
    kv = manager(pages=2, host_pages=2)
    first, second = sequence(PROMPT[:4]), sequence(range(50, 54))
    served(kv, first)
    served(kv, second)

    def fill(*found):
        for slot, one in enumerate(found):
            assert kv.admit(slot, kv.match(one.keys, one.codes, 4), 4)
        kv.take_moves()
        for slot in range(len(found)):
            kv.release(slot)

    assert kv.admit(0, None, 8)
    kv.take_moves()
    kv.release(0)
    fill(second, first)  # both are on the device and still on the host
    fill(first)
    assert kv.admit(0, None, 8)  # evicts the second, then the first; nothing is exported
    assert kv.take_moves()[0] == []
    third = sequence(range(70, 74))
    kv.release(0)
    served(kv, third)
    assert kv.admit(0, None, 8)
    assert kv.match(second.keys, second.codes, 4).tokens == 0
    assert kv.match(first.keys, first.codes, 4).tokens == 4


def test_a_better_copy_replaces_the_one_on_the_host():
    kv = manager(host_pages=4, windows=(None, 6))
    new = sequence(PROMPT[:8])
    for whole in (False, True):
        served(kv, new)
        if not whole:
            kv._store._evict(1), kv._store._evict(1)  # pages of the windowed group only
        kv._store._evict(0), kv._store._evict(0)
        assert [move.source[1] >= 0 for move in kv.take_moves()[0]] == [whole] * 2
        assert kv.match(new.keys, new.codes, 8).tokens == (8 if whole else 0)
        kv.check()


def test_a_path_on_its_way_stays_whole():
    kv = manager(pages=4, host_pages=8)
    new = sequence(PROMPT[:12])
    served(kv, new)
    assert kv.admit(0, None, 12)  # evicts the last two pages
    kv.take_moves()
    kv.release(0)
    assert kv.admit(0, kv.match(new.keys, new.codes, 12), 12)
    kv.release(0)
    assert not kv.admit(0, None, 8), "one page is free, the path waits for its bytes"
    assert len(kv.take_moves()[2]) == 2
    assert kv.admit(0, None, 8)
    assert kv.match(new.keys, new.codes, 12).tokens == 12
    kv.check()


def test_a_leaf_is_evicted_first_also_if_it_came_with_its_parent():
    kv = manager(pages=2, host_pages=2)
    new = sequence(PROMPT[:8])
    served(kv, new)
    assert kv.admit(0, None, 8)
    kv.take_moves()
    kv.release(0)
    assert kv.admit(0, kv.match(new.keys, new.codes, 8), 8)
    first = int(kv.tables[0, 0, 0])
    kv.release(0)
    kv.take_moves()
    assert kv.admit(0, None, 4)
    assert kv.tables[0, 0, 0] != first
    check_order(kv)


def test_a_page_that_is_on_its_way_is_not_swapped():
    kv = manager(pages=8, host_pages=8)
    new = sequence(PROMPT[:8])
    served(kv, new)
    assert kv.admit(0, None, 32)
    kv.take_moves()
    kv.release(0)
    assert kv.admit(0, None, 8)  # computes pages that are on the host
    kv.take_moves()
    assert kv.admit(1, kv.match(new.keys, new.codes, 8), 8)
    kv.publish(0, new.keys, new.codes, 8)
    assert kv.tables[0, 0, :2].tolist() == kv.tables[0, 1, :2].tolist()
    assert kv.swap_out(0, 8) is None
    kv.take_moves()
    assert kv.swap_out(0, 8) is not None
    kv.check()


def test_an_export_holds_all_groups():
    kv = manager(pages=2, host_pages=2, windows=(None, 6))
    served(kv, sequence(PROMPT[:4]))
    table = kv.tables[:, 3, 0].tolist()
    assert kv.admit(0, None, 8)
    assert kv.take_moves()[0] == [Export(tuple(table), 0)]


def test_a_page_that_is_only_coming_from_the_host_is_not_copied_for_a_fork():
    """A slot shares an identical page that another slot is loading: copies run before loads."""
    kv = manager(pages=4, host_pages=4)
    short = sequence(PROMPT[:6])
    served(kv, sequence(PROMPT[:4]))
    assert kv.admit(0, None, 6)
    kv.take_moves()
    assert kv.admit(1, None, 8)  # exports the cached page to the host
    kv.take_moves()
    kv.release(1)
    loaded = sequence(PROMPT[:5])
    assert kv.admit(2, match(kv, loaded), 5)
    kv.publish(0, short.keys, short.codes, 4)
    assert kv.tables[0, 0, 0] == kv.tables[0, 2, 0]
    assert not kv.fork(0, 3, 2)
    kv.take_moves()
    assert kv.fork(0, 3, 2)
    kv.check()
