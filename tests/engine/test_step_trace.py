"""Steps of an engine in a file, as lines of JSON."""

import json
import pathlib

import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.serve import fake_engine as fake

PROMPT = tuple(range(3, 43))


def request(name: str, **params: object) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens=5, seed=7, **params), frozenset({fake.EOS}))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_trace_has_every_chunk_row_and_token(tmp_path: pathlib.Path, async_scheduling: bool) -> None:
    path = tmp_path / "steps.jsonl"
    engine = fake.FakeEngine(trace_steps=str(path), async_scheduling=async_scheduling)
    engine.add(request("a", n=2))
    engine.add(request("b"))
    while engine.has_work:
        engine.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["engine"] for line in lines}) == 1
    plans = {line["step"]: line for line in lines if "tokens" not in line}
    results = {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    assert list(plans) == sorted(plans)
    assert all(set(results) <= set(plans) and len(plans[step]["decodes"]) == len(results[step]) for step in results)
    admitted = [entry[:2] for plan in plans.values() for entry in plan.get("admitted", ())]
    assert sorted(admitted) == [["a", 0], ["a", 1], ["b", 0]]
    for name in ("a", "b"):
        chunks = [chunk for plan in plans.values() for chunk in plan.get("prefills", ()) if chunk[0] == name]
        assert sum(length for _, _, _, length, _ in chunks) == len(PROMPT) - 1
        rows = [
            (position, token)
            for step, plan in plans.items()
            for (request_id, sample, _, position, *_), (token, *_) in zip(
                plan.get("decodes", ()), results.get(step, ()), strict=True
            )
            if (request_id, sample) == (name, 0)
        ]
        wanted = fake.expected_tokens(PROMPT, 7, 0, 5)
        assert dict(rows[:5]) == {len(PROMPT) - 1 + i: token for i, token in enumerate(wanted)}


def test_a_file_that_cannot_be_written_is_an_error_of_the_setting(tmp_path: pathlib.Path) -> None:
    with pytest.raises(EngineConfigError, match="trace_steps"):
        fake.FakeEngine(trace_steps=str(tmp_path / "missing" / "steps.jsonl"))
