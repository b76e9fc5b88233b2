"""Weights and memory of a group, with threads as processes and no devices: all change, or none."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxinfer.engine.core import Pace
from jaxinfer.engine.distributed.leader import follow
from jaxinfer.group_weights import FollowingWeights, LeadingWeights
from jaxinfer.models.model import Model
from jaxinfer.parallel.group import Group
from jaxinfer.sampling_params import RequestError
from jaxinfer.served import ServedModel
from jaxinfer.weights.fit import checksum_of, leaves_of
from tests.fakes import random_model
from tests.parallel.test_group import group_of
from tests.serve.fake_weights import write_fake_weights

LAYER = "layers_1"


class Memory:
    """An `EngineMemory` that records what is done with it."""

    def __init__(self) -> None:
        self.pace, self.weight_version, self.shares_weights = Pace.PAUSED, 0, False
        self.done = list[Any]()

    def pause(self, mode: str = "wait") -> None: ...

    def resume(self) -> None: ...

    def stage(self, model: Any, *, drafts: bool = False) -> Any:
        return dict(model.params)

    def swap(self, weights: Any, version: int, *, restart: bool = True) -> None:
        self.done.append([name for each in weights for name in each])
        self.weight_version = version

    def sleep(self, *, cache: bool, weights: bool) -> None:
        self.done.append(("sleep", cache, weights))

    def wake(self) -> None:
        self.done.append("wake")


@dataclasses.dataclass
class Pair:
    """Process 0 and the other one, each with a folder of weights ``a`` and what it reads there."""

    group: Group
    leading: LeadingWeights
    following: ServedModel[Memory]
    weights: FollowingWeights
    roots: list[pathlib.Path]
    contents: list[dict[str, Any]]

    def update(self, **options: Any) -> None:
        staged = self.leading.stage((str(self.roots[0] / "a"),), **options)
        self.leading.commit(staged)

    def until_done(self) -> None:
        """Wait until the other process has made all calls, and answered all notes."""
        self.leading.sleep(1, [])

    def params(self) -> list[Any]:
        self.until_done()
        return [self.leading.model.params, self.following.model.params]


@pytest.fixture
def pair(tmp_path) -> Iterator[Pair]:
    model, roots, contents = random_model(), [tmp_path / "0", tmp_path / "1"], [{}, {}]
    new = jax.tree.map(lambda x: 2 * x, model.params)
    for root, content in zip(roots, contents, strict=True):
        write_fake_weights(root / "a", "a")
        write_fake_weights(root / "b", "b")
        content["a+b"] = model.replace(params=jax.tree.map(lambda x: 3 * x, model.params))
        content["a"] = model.replace(params=new)

    def reader(content: dict[str, Any]) -> Any:
        def read(*folders: str) -> Model:
            found = content["+".join(pathlib.Path(folder).name for folder in folders)]
            if isinstance(found, Exception):
                raise found
            return found

        return read

    with group_of() as (members, ends):
        leading = LeadingWeights(model, Memory(), members[0], reader(contents[0]), str(roots[0]))
        following = ServedModel(model, Memory())
        weights = FollowingWeights(following, members[1], reader(contents[1]), str(roots[1]))
        for run in (weights.listen, lambda: follow({}, members[1], weights.changes)):
            threading.Thread(target=run, daemon=True).start()
        members[0].ready()
        yield Pair(members[0], leading, following, weights, roots, contents)
        assert not ends.reasons


def same(one: Any, other: Any) -> bool:
    return all(a is b for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def changed(pair: Pair) -> list[bool]:
    """Return whether each process serves the new weights."""
    return [same(own, pair.contents[0]["a"].params) for own in pair.params()]


def test_all_processes_serve_new_weights(pair):
    pair.update()
    assert changed(pair) == [True, True]
    assert pair.leading.engine.weight_version == 1
    assert pair.leading.engine.done == pair.following.engine.done
    assert not pair.weights._staged


def test_weights_may_be_in_several_folders(pair):
    pair.leading.commit(pair.leading.stage(tuple(str(pair.roots[0] / name) for name in "ab")))
    assert all(same(own, content["a+b"].params) for own, content in zip(pair.params(), pair.contents, strict=True))


WRONG = {
    "cannot be read": RequestError("path", ": lacks a tensor"),
    "has no memory": MemoryError("none left"),
    "is of another shape": "shape",
}


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("kind", WRONG)
def test_an_error_in_one_process_changes_nothing_in_any(pair, process, kind):
    good, wrong = pair.contents[process]["a"], WRONG[kind]
    cut = {**good.params, "final_norm": {"scale": good.params["final_norm"]["scale"][:-1]}}
    pair.contents[process]["a"] = good.replace(params=cut) if wrong == "shape" else wrong
    with pytest.raises((RequestError, MemoryError)) as refused:
        pair.update()
    if process:
        assert (refused.value.field, "process 1" in str(refused.value)) == ("path", True)
    pair.contents[process]["a"] = good
    assert changed(pair) == [False, False]
    assert pair.leading.engine.weight_version == 0
    pair.leading.checksums()  # answered after the note to drop what is staged
    assert not pair.weights._staged
    pair.update()
    assert changed(pair) == [True, True]


def test_a_folder_that_one_process_lacks(pair):
    (pair.roots[1] / "a" / "model.safetensors").unlink()
    with pytest.raises(RequestError) as refused:
        pair.update()
    assert refused.value.field == "path"
    assert changed(pair) == [False, False]


def test_weights_that_are_staged_and_not_served_are_forgotten(pair):
    staged = pair.leading.stage((str(pair.roots[0] / "a"),))
    pair.leading.engine.weight_version = 7
    with pytest.raises(RequestError) as refused:
        pair.leading.commit(staged, 3)
    assert refused.value.field == "version"
    pair.leading.discard(staged)
    assert changed(pair) == [False, False]
    pair.leading.checksums()
    assert not pair.weights._staged


@pytest.mark.parametrize(
    ("given", "options", "field"),
    [({}, {}, "params"), (("a",), {"partial": True}, "partial"), (("a",), {"drafts": True}, "drafts")],
)
def test_what_several_processes_do_not_take_is_named(pair, given, options, field):
    with pytest.raises(RequestError) as refused:
        pair.leading.stage(given, **options)
    assert refused.value.field == field
    assert changed(pair) == [False, False]


def test_all_sleep_and_wake(pair):
    expected = pair.leading.checksums()
    pair.leading.sleep(1)
    assert pair.leading.asleep == pair.following.asleep == ["kv_cache", "weights"]
    pair.leading.wake_up(["weights"])
    assert pair.leading.asleep == pair.following.asleep == ["kv_cache"]
    pair.leading.wake_up()
    assert pair.leading.asleep == pair.following.asleep == []
    assert pair.leading.checksums() == expected
    assert pair.leading.engine.done == pair.following.engine.done
    pair.leading.sleep(2)
    pair.leading.wake_up()
    pair.update()
    assert changed(pair) == [True, True]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda weights: weights.sleep(3), "level"),
        (lambda weights: weights.sleep(1, ["pages"]), "tags"),
        (lambda weights: weights.wake_up(["pages"]), "tags"),
    ],
)
def test_wrong_arguments_reach_no_process(pair, call, field):
    sent = pair.group.sent
    with pytest.raises(RequestError) as refused:
        call(pair.leading)
    assert refused.value.field == field
    assert pair.group.sent == sent


def test_checksums_are_of_all_processes(pair):
    model = pair.leading.model
    expected = {path: checksum_of([(path, leaf)]) for path, leaf in leaves_of(model.params)}
    assert pair.leading.checksums() == expected
    pair.leading.model = model.replace(params={**model.params, LAYER: _abstract(model.params[LAYER])})
    assert pair.leading.checksums() == expected  # those of the process that has the layer
    pair.following.model = pair.contents[1]["a"]
    with pytest.raises(RequestError) as refused:
        pair.leading.checksums()
    assert refused.value.field == "checksums"


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
