"""Checkpoint folders: one file, shards, and every way in which they can be incomplete."""

import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.weights import open_checkpoint
from tests.weights.files import refused, tiny_tensors, write_index, write_sharded, write_tensors

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: pathlib.Path) -> pathlib.Path:
    tensors = tiny_tensors()
    names = list(tensors)
    shards = {ONE: {n: tensors[n] for n in names[:4]}, TWO: {n: tensors[n] for n in names[4:]}}
    write_sharded(tmp_path, shards)
    return tmp_path


def test_shards_read_as_one(sharded: pathlib.Path) -> None:
    checkpoint = open_checkpoint(sharded)
    expected = tiny_tensors()
    assert checkpoint.tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_the_single_file_goes_first(sharded: pathlib.Path) -> None:
    write_tensors(sharded / "model.safetensors", {"only": np.ones(1, np.float32)})
    assert list(open_checkpoint(sharded).tensors) == ["only"]


def test_any_single_file_will_do(tmp_path: pathlib.Path) -> None:
    write_tensors(tmp_path / "weights.safetensors", tiny_tensors())
    assert open_checkpoint(tmp_path).tensors.keys() == tiny_tensors().keys()


def test_a_missing_shard(sharded: pathlib.Path) -> None:
    (sharded / TWO).unlink()
    with refused(f"{TWO} does not exist"):
        open_checkpoint(sharded)


def test_a_truncated_shard(sharded: pathlib.Path) -> None:
    content = (sharded / TWO).read_bytes()
    (sharded / TWO).write_bytes(content[:-1])
    with refused(f"{TWO} is not a valid safetensors file: .*truncated"):
        open_checkpoint(sharded)


def test_folders_read_as_one(sharded: pathlib.Path) -> None:
    other, same = sharded / "other", sharded / "same"
    for folder in (other, same):
        folder.mkdir()
    write_tensors(other / "x.safetensors", {"more": np.full(2, 7, np.float32)})
    first = next(iter(tiny_tensors()))
    write_tensors(same / "x.safetensors", {first: np.ones(1, np.float32)})
    found = open_checkpoint(sharded, other)
    assert found.tensors.keys() == {*tiny_tensors(), "more"}
    assert found.folder == sharded
    assert found.read("more").tolist() == [7, 7]
    with refused(f"'{first}' is in .* and in {same}"):
        open_checkpoint(sharded, other, same)


def test_a_tensor_that_no_shard_has_is_passed_over(sharded: pathlib.Path) -> None:
    write_index(sharded, {**dict.fromkeys(list(tiny_tensors())[:4], ONE), "mtp.extra.weight": TWO})
    found = open_checkpoint(sharded)
    assert found.tensors.keys() == tiny_tensors().keys()


def test_a_tensor_that_is_not_in_the_index_is_there_and_may_be_left(sharded: pathlib.Path) -> None:
    write_index(sharded, {**dict.fromkeys(list(tiny_tensors())[:3], ONE), "x": TWO})
    found = open_checkpoint(sharded)
    assert found.tensors.keys() == tiny_tensors().keys()
    assert {name for name, info in found.tensors.items() if info.listed} == set(list(tiny_tensors())[:3])
    for name, value in tiny_tensors().items():
        np.testing.assert_array_equal(found.read(name), value)


@pytest.mark.parametrize("chosen", [ONE, TWO])
def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path: pathlib.Path, chosen: str) -> None:
    both = {shard: {"x": np.full(3, value, np.float32)} for value, shard in enumerate((ONE, TWO))}
    write_sharded(tmp_path, {ONE: {**both[ONE], "a": np.ones(1)}, TWO: {**both[TWO], "b": np.ones(1)}})
    write_index(tmp_path, {"x": chosen, "a": ONE, "b": TWO})
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("x"), both[chosen]["x"])


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/a.safetensors",
        "..\\a.safetensors",
        "C:a.safetensors",
        ".safetensors",
        "..",
        "model.bin",
        "",
        "a\0.safetensors",
        3,
        None,
        [ONE],
    ],
)
def test_shards_outside_the_folder_are_refused(sharded: pathlib.Path, shard: Any) -> None:
    write_tensors(sharded.parent / "secret.safetensors", {"embed.weight": np.ones(1, np.float32)})
    write_index(sharded, {"embed.weight": shard})
    with refused("sends tensor 'embed.weight' to .*, not a shard's name"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
    ],
)
def test_a_bad_index(tmp_path: pathlib.Path, content: bytes, pattern: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with refused(f"model.safetensors.index.json.* {pattern}"):
        open_checkpoint(tmp_path)


def test_the_index_is_a_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.safetensors.index.json").mkdir()
    with refused("index.json does not exist or is not a file"):
        open_checkpoint(tmp_path)


def test_an_index_beyond_all_bounds(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(100_000_001)
    with refused("index.json is larger than 100000000 bytes"):
        open_checkpoint(tmp_path)


def test_several_files_and_no_index(tmp_path: pathlib.Path) -> None:
    for name in (ONE, TWO):
        write_tensors(tmp_path / name, tiny_tensors())
    with refused(f"2 safetensors files .*{ONE}.* but no model.safetensors.index.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.00.pth"])
def test_other_formats_are_named_and_not_read(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with refused(f"holds '{name}' but no safetensors file: convert it"):
        open_checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: pathlib.Path) -> None:
    with refused("holds no weights: expected model.safetensors"):
        open_checkpoint(tmp_path)
    with refused("absent is not a folder"):
        open_checkpoint(tmp_path / "absent")
