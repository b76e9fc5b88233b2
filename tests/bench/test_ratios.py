"""Tests of comparisons with the file of an earlier run."""

import json

import pytest

from jaxinfer.bench import ratios
from jaxinfer.bench.names import OptionsError


def figures(rate, seconds):
    times = dict.fromkeys(("mean", "p50", "p90", "p99"), seconds)
    return {"requests_per_second": rate, "output_tokens_per_second": 0.0, "latency": {"ttft": times, "itl": None}}


def test_ratios_of_what_both_have():
    before, now = figures(2.0, 0.5), figures(3.0, 0.25)
    now["latency"]["e2e"] = now["latency"]["ttft"]
    found = {title: numbers for title, *numbers in ratios.compared(before, now)}
    assert found["requests/s"] == [2.0, 3.0, 1.5]
    assert found["TTFT p99, ms"] == [500.0, 250.0, 0.5]
    assert len(found) == 5  # no ratio to 0, and none of a latency that one lacks
    assert ratios.table("t", before, now, ("before", "now")).row_count == 5


def test_what_differs_is_named_and_what_does_not_matter_is_not():
    before = {"input_len": [1, 1], "seed": 0, "out": "a.json", "backend": "jaxinfer"}
    now = {"input_len": [1, 1], "seed": 1, "out": "b.json", "backend": "transformers", "max_num_seqs": 4}
    assert ratios.differences(before, now) == ["max_num_seqs None -> 4", "seed 0 -> 1"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "no json",
        "[]",
        '{"format": 2, "command": "latency", "backends": {}, "settings": {}}',
        '{"format": 1, "command": "latency", "settings": {}}',
        '{"format": 1, "command": "throughput", "backends": {}, "settings": {}}',
    ],
)
def test_a_file_that_is_no_earlier_run_is_refused(tmp_path, content):
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionsError, match="--compare"):
        ratios.read(path, "latency")


def test_a_file_of_the_same_command_is_read(tmp_path):
    content = {"format": ratios.FORMAT, "command": "latency", "backends": {"jaxinfer": {}}, "settings": {}}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert ratios.read(tmp_path / "a.json", "latency") == content
