"""benchmarks/images_beside_text.py: its loads and arithmetic, and a run of a real server."""

import io
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from benchmarks import images_beside_text as beside
from jaxinfer.bench.record import Record
from jaxinfer.protos.v1 import inference_pb2 as pb


def record(times: list[float], due: float = 0.0) -> Record:
    made = Record(0, due, due, 0, 0)
    for time in times:
        made.note(time, 1)
    return made


def test_loads_of_a_round_have_the_same_arrivals_and_other_prompts() -> None:
    one, other = (beside.prepared(50.0, 2.0, 7, beside.text(16, 4), [7, load]) for load in (0, 1))
    assert [each.due for each in one] == [each.due for each in other]
    assert one[0].due > 0
    assert one[-1].due < 2.0
    assert not {each.message for each in one} & {each.message for each in other}
    request = pb.GenerateRequest.FromString(one[0].message)
    assert (len(request.token_ids.ids), request.sampling.max_tokens, request.sampling.ignore_eos) == (16, 4, True)


def test_an_image_has_the_size_of_a_photograph() -> None:
    request = beside.with_image(4)(np.random.default_rng(0))
    data = request.chat.messages[0].parts[0].image.data
    assert Image.open(io.BytesIO(data)).size == (640, 480)
    assert 20_000 < len(data) < 200_000


def test_ratios_are_of_percentiles_of_all_turns_together() -> None:
    alone = {"alone": [record([1.0, 1.1]), record([2.0, 2.1, 2.2], due=1.5)]}
    turn = {**alone, "images": [record([1.0, 1.2])], "tokens": [record([1.0, 1.1])]}
    failed = record([])
    failed.error_kind = "timeout"
    found = beside.summary([turn, {**turn, "images": [record([1.0, 1.4]), failed]}])
    assert found["failed"] == {"alone": 0, "images": 1, "tokens": 0}
    assert found["ms"]["alone"]["itl"] == pytest.approx({"p50": 100, "p99": 100})
    assert found["ms"]["alone"]["ttft"]["p50"] == pytest.approx(750)
    assert found["ratios"]["images/alone"]["itl"]["p50"] == pytest.approx(3)
    assert [each["itl"]["p50"] for each in found["rounds"]] == pytest.approx([2, 4])


@pytest.mark.slow
def test_a_run_keeps_its_figures(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    options = ["--rounds", "1", "--seconds", "3", "--prompt", "32", "--output", "8", "--share", "0.5"]
    assert beside.main([*options, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert all(found["requests"].values())
    assert not any(found["failed"].values())
    assert all(found["ratios"]["images/alone"][figure]["p99"] > 0 for figure in ("itl", "ttft"))
    assert "| images/tokens |" in capsys.readouterr().out
