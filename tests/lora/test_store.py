"""The adapter store: names, and which adapters are in memory."""

from __future__ import annotations

import threading

import pytest

from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.store import LoRAError, LoRAStore
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import LoRARef
from tests.lora.fakes import Folders, in_memory, make_adapter, make_store, parts_of


def test_a_name_means_what_was_loaded_last() -> None:
    folders = Folders(p=1)
    store, _ = make_store(folders)
    assert store.load("poet", "p") == LoRARef("poet", "1")
    assert store.resolve("poet") == LoRARef("poet", "1")
    folders.contents["p"] = 2
    assert store.resolve("poet").identity == "1", "until it is loaded again"
    store.load("poet", "p")
    assert store.resolve("poet") == LoRARef("poet", "2")
    assert [each.identity for each in store.list()] == ["2"]


def test_what_is_loaded_is_listed_by_name() -> None:
    store, _ = make_store(Folders(p=1, q=2))
    store.load("b", "p")
    store.load("a", "q")
    store.load("c", "p")
    assert [tuple(each) for each in store.list()] == [("a", "q", "2", 1), ("b", "p", "1", 1), ("c", "p", "1", 1)]
    store.unload("b")
    assert [each.name for each in store.list()] == ["a", "c"], "the same content under another name stays"
    assert store.resolve("c").identity == "1"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    store, _ = make_store(Folders(p=1))
    with pytest.raises(RequestError, match="lora='poet' is no adapter that is loaded: known: none"):
        store.resolve("poet")
    store.load("poet", "p")
    with pytest.raises(RequestError, match=r"lora='poett' .*did you mean poet\?.* known: poet$"):
        store.resolve("poett")
    with pytest.raises(RequestError, match=r"'bard' .*known: poet"):
        store.unload("bard")


def test_many_known_names_do_not_fill_the_message() -> None:
    store, _ = make_store(Folders(p=1))
    for number in range(100):
        store.load(f"n{number:03}", "p")
    with pytest.raises(RequestError, match=r"n007 and 92 more$") as raised:
        store.resolve("zzz")
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("name", "path", "said"), [("poet", "nowhere", "'poet': nowhere: no such"), ("", "p", "empty")]
)
def test_what_cannot_be_loaded_says_why_and_changes_nothing(name: str, path: str, said: str) -> None:
    store, _ = make_store(Folders(p=1))
    store.load("poet", "p")
    with pytest.raises(LoRAError, match=said):
        store.load(name, path)
    assert store.resolve("poet").identity == "1"


def test_the_least_recently_used_is_left_in_its_folder_and_read_again() -> None:
    folders = Folders(a=1, b=2, c=3)
    store, _ = make_store(folders, capacity=2)
    refs = [store.load(path, path) for path in "abc"]
    assert in_memory(store) == 2
    for ref in refs:
        store.retain(ref)
    assert store.prepare("2").result()[0]["w:a"] == 2
    assert folders.reads["b"] == 1
    assert store.prepare("1").result()[0]["w:a"] == 1
    assert folders.reads["a"] == 2, "it was the first to go"
    assert in_memory(store) == 2
    store.prepare("2").result()
    assert folders.reads["b"] == 1, "it was used after c"


def test_on_the_device_they_stay_in_memory() -> None:
    folders = Folders(a=1, b=2, c=3)
    store, _ = make_store(folders, capacity=1)
    store.load("a", "a")
    store.pin("1")
    store.load("b", "b")
    store.load("c", "c")
    store.prepare("1").result()
    assert folders.reads["a"] == 1
    store.unpin("1")
    assert in_memory(store) == 1


def test_what_was_replaced_is_kept_for_its_requests_whatever_its_folder_has_now() -> None:
    folders = Folders(p=1, q=7)
    store, _ = make_store(folders, capacity=1)
    old = store.load("poet", "p")
    store.retain(old)
    folders.contents["p"] = 2
    store.load("poet", "p")
    store.load("other", "q")
    assert store.prepare("1").result()[0]["w:a"] == 1
    store.release(old)
    with pytest.raises(LoRAError, match="adapter 1 was unloaded"):
        store.prepare("1").result()
    with pytest.raises(RequestError, match="'poet' was unloaded or replaced"):
        store.retain(old)


def test_a_folder_that_changed_since_is_told_and_not_served() -> None:
    folders = Folders(p=1, q=3)
    store, _ = make_store(folders, capacity=1)
    store.retain(store.load("poet", "p"))
    store.load("other", "q")  # evicts the first one from memory
    folders.contents["p"] = 2
    with pytest.raises(LoRAError, match="adapter 'poet': p has changed since it was loaded"):
        store.prepare("1").result()
    del folders.contents["p"]
    with pytest.raises(LoRAError, match="adapter 'poet': p: no such folder"):
        store.prepare("1").result()


def test_unloading_while_requests_run_keeps_the_content_to_their_end() -> None:
    store, _ = make_store(Folders(p=1))
    ref = store.load("poet", "p")
    store.retain(ref)
    store.unload("poet")
    assert store.list() == []
    assert store.prepare("1").result()[0]["w:a"] == 1
    store.pin("1")
    store.release(ref)
    store.unpin("1")
    assert in_memory(store) == 0


def test_only_load_waits_while_a_folder_is_read() -> None:
    """Lookups and the engine thread's calls do not wait for a slow reader."""
    reading, go_on = threading.Event(), threading.Event()

    def read(path: str) -> Adapter:
        if path == "slow":
            reading.set()
            assert go_on.wait(60)
        return make_adapter(len(path))

    store = LoRAStore(read, parts_of, 2)
    ref = store.load("fast", "fast")
    loads = threading.Thread(target=store.load, args=("slow", "slow"))
    loads.start()
    assert reading.wait(60)
    store.retain(ref)
    coming = store.prepare(ref.identity)
    assert [each.name for each in store.list()] == ["fast"]
    assert not coming.done(), "one after another"
    go_on.set()
    loads.join()
    assert coming.result(60)[0]["w:a"] == 4
    assert [each.name for each in store.list()] == ["fast", "slow"]
