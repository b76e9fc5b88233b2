"""Tests of cores in a group: the group key, and settings that all cores must share."""

import dataclasses
import pathlib

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.opening import model_folder
from jaxinfer.parallel.group import GroupError
from jaxinfer.serve.core import group as groups
from jaxinfer.serve.core.settings import CoreSettings

SETTINGS = CoreSettings(
    socket="none",
    model="demo",
    num_processes=2,
    coordinator_address="127.0.0.1:1",
    engine=EngineConfig(prefill_sizes=(64,), seed=1),
)


def refuse() -> None:
    raise AssertionError("nobody is waited for")


def test_one_process_is_no_group():
    alone = dataclasses.replace(SETTINGS, num_processes=1)
    assert groups.enter_group(alone, model_folder("demo"), refuse) is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "cannot be read: "), (b"", "holds 0 bytes"), (b" fifteen bytes..\n", "holds 15 bytes, and must hold 16")],
)
def test_without_a_key_there_is_no_group(tmp_path: pathlib.Path, content, sentence):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    settings = dataclasses.replace(SETTINGS, group_key_file=str(path))
    with pytest.raises(GroupError, match=sentence):
        groups.enter_group(settings, model_folder("demo"), refuse)


def test_a_newline_does_not_belong_to_the_key(tmp_path: pathlib.Path):
    (tmp_path / "key").write_bytes(b"sixteen bytes...\n")
    assert groups._key(str(tmp_path / "key")) == b"sixteen bytes..."


def test_what_decides_which_programs_run_is_shared(tmp_path: pathlib.Path):
    mine = groups._shared(SETTINGS, model_folder("demo"))
    (tmp_path / "config.json").write_bytes((model_folder("demo") / "config.json").read_bytes())
    engine = dataclasses.replace(SETTINGS.engine, seed=2)
    elsewhere = dataclasses.replace(SETTINGS, model=str(tmp_path), process_id=1, engine=engine)
    assert groups._shared(elsewhere, tmp_path) == mine, "the same, at another path, with another seed"
    for changed, name in (
        (dataclasses.replace(SETTINGS, dtype="float32"), "dtype"),
        (dataclasses.replace(SETTINGS, num_processes=3), "num_processes"),
        (dataclasses.replace(SETTINGS, engine=EngineConfig(prefill_sizes=(64, 128))), "prefill_sizes"),
    ):
        theirs = groups._shared(changed, model_folder("demo"))
        assert [each for each in mine if mine[each] != theirs[each]] == [name]
    other = groups._shared(SETTINGS, model_folder("demo-draft"))
    assert [each for each in mine if mine[each] != other[each]] == ["the SHA-256 of config.json"]
