"""Tests of transformers as an engine under test: without it, with a worker that is scripted, and the real one."""

import pathlib
import sys

import pytest

from jaxinfer.bench import transformers_backend
from jaxinfer.bench.iterations import Ran
from jaxinfer.bench.target import Item
from jaxinfer.bench.transformers_backend import BackendError, TransformersBackend
from jaxinfer.config.aliases import demo_folder

WORKER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "prompts" in asked:
        if asked["prompts"] == [[0]]:
            answer = {"error": "ValueError: 0"}
        elif asked["prompts"] == [[1]]:
            sys.exit(3)
        else:
            answer = {"seconds": 2.0, "deliveries": [[[0.5, 1], [1.5, 1]]], "finishes": ["length"], **asked}
    else:
        answer = {"versions": {"torch": "2"}} if not asked else {"device": "cpu", **asked}
    print(json.dumps(answer), flush=True)
"""


def make(python=sys.executable, **options):
    return TransformersBackend(str(python), **{"batch_size": 4, **options})


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(transformers_backend.transformers_worker, "__file__", str(tmp_path / "worker.py"))
    backend = make(ignore_eos=False)
    yield backend
    backend.close()


def test_iterations_are_asked_for_and_answered(scripted):
    assert scripted.about == {"versions": {"torch": "2"}}
    scripted.load("folder", "bfloat16")
    assert scripted.figures()["device"] == "cpu"
    assert (scripted.about["model"], scripted.about["dtype"], scripted.about["ignore_eos"]) == (
        "folder",
        "bfloat16",
        False,
    )
    assert scripted.run([Item([5, 6], 2, 7)]) == Ran(2.0, [[(0.5, 1), (1.5, 1)]], ["length"])


def test_a_failure_is_one_sentence(scripted):
    with pytest.raises(BackendError, match="ValueError: 0"):
        scripted.run([Item([0], 1, 1)])
    with pytest.raises(BackendError, match="exit code 3"):
        scripted.run([Item([1], 1, 1)])


def test_a_python_without_it_is_named(tmp_path):
    with pytest.raises(BackendError, match="torch"):
        make()  # the tests' environment has no torch
    with pytest.raises(BackendError, match="--transformers-python"):
        make(tmp_path / "nothing")


@pytest.mark.parity
def test_transformers_generates_what_was_asked_for(oracle_python: pathlib.Path):
    backend = make(oracle_python, batch_size=2)
    backend.load(str(demo_folder("demo")), "float32")
    ran = backend.run([Item([1, 2, 3], 3, 4), Item([7], 1, 2), Item([9, 8], 2, 3)])
    assert [len(each) for each in ran.deliveries] == [4, 2, 3]
    assert ran.finishes == ["length"] * 3
    times = [[time for time, _ in each] for each in ran.deliveries]
    assert all(each == sorted(each) for each in times)
    assert times[2][0] > times[0][-1]  # the second batch waits for the first
    assert ran.seconds >= times[2][-1]
    backend.close()
