"""Figures against their goals, and the resulting exit status."""

import pytest

from benchmarks.gpu import server, step, throughput
from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check import goals, workloads
from jaxinfer.gpu_check.table import markdown

H100 = {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"}
H200, OTHER = "NVIDIA H200", "NVIDIA GH200 480GB"


def step_of(share):
    records = [{"key": "decode, 64 rows, auto, context 512", "share_of_copy": share}]
    return {"step": {"status": "ok", "seconds": 1.0, "records": records}}


@pytest.mark.parametrize(("share", "word"), [(0.81, "goal"), (0.75, "floor"), (0.7, "below floor")])
def test_figures_stand_beside_their_goals(share, word):
    (verdict,) = goals.verdicts(step_of(share), H100["kind"])
    assert (verdict.word, verdict.figure) == (word, share)
    content = {"device": H100, "date": "2026-01-01", "quick": False, "git": {"commit": "a"}, "sections": step_of(share)}
    assert f"| {share:.4g} | 0.8 | 0.72 | {word} |" in markdown(content, gpu_check.COLUMNS)
    assert (
        goals.verdicts(step_of(share), H200) == goals.verdicts(step_of(share), OTHER) == [(verdict.goal, share, word)]
    )


def test_a_goal_over_another_section_is_a_ratio():
    def section(rate):
        return {"records": [{"key": "64 requests, 512 + 256 tokens", "output_tokens_s": rate}]}

    found = goals.verdicts({"engine": section(850.0), "relaxed": section(1000.0)}, H100["kind"])
    assert [(verdict.figure, verdict.word) for verdict in found] == [(0.85, "below goal")]
    assert goals.verdicts({"engine": section(850.0)}, H100["kind"]) == []


def test_a_goal_beside_another_record_is_a_ratio():
    shape = str(workloads.MANY_ROWS[0])
    rates = {f"{shape}: mosaic": 630.0, f"{shape}: xla": 700.0}
    kernels = {"records": [{"key": key, "tflop_s": rate} for key, rate in rates.items()]}
    (found,) = goals.verdicts({"kernels": kernels}, H100["kind"])
    assert (found.figure, found.word) == (0.9, "below goal")
    assert f"tflop_s over {shape}: xla's 0.9" in str(found)
    assert goals.verdicts({"kernels": {"records": kernels["records"][:1]}}, H100["kind"]) == []


@pytest.mark.parametrize(("kind", "goal"), [(H100["kind"], 150), (H200, 200), (OTHER, None)])
def test_times_have_goals_by_device(tmp_path, capsys, kind, goal):
    records = [{"key": "1 requests, 512 + 256 tokens", "output_tokens_s": 160.0}]
    engine = {"engine": {"status": "ok", "seconds": 1.0, "records": records}}
    found = goals.verdicts(engine, kind)
    assert [(one.goal.goal, one.word) for one in found] == (
        [] if goal is None else [(goal, ("below goal", "goal")[goal < 160])]
    )
    assert goals.has_times(kind) == (goal is not None)
    results = gpu_check.Results(tmp_path, {"kind": kind, "platform": "gpu"}, quick=False)
    for name, section in (engine | step_of(0.81)).items():
        results.put(name, section)
    assert gpu_check.summary(results, ["engine", "step"]) == 0
    said = "no goals in times"
    assert (said in capsys.readouterr().out) == (said in results.path.with_suffix(".md").read_text()) == (goal is None)


def test_a_floor_in_times_is_of_its_device():
    records = [{"key": "decode, 1 rows, 4096 keys, page 64: mosaic", "best_ms": 0.02}]
    words = [
        [one.word for one in goals.verdicts({"kernels": {"records": records}}, kind)]
        for kind in (H100["kind"], H200, OTHER)
    ]
    assert words == [["below floor"], ["below goal"], []]


def test_every_goal_is_of_something_that_is_measured():
    keys = {str(shape) for shape in (*workloads.attention(quick=False), *workloads.others(quick=False))}
    loads = set(map(throughput.title, throughput.LOADS))
    decoded = {
        f"{work}, context {context}"
        for work in step.WORK
        if isinstance(work, step.Decode)
        for context in (*work.contexts, *(goals.LONGEST_OF_256.values() if work.rows == 256 else ()))
    }
    for goal in goals.GOALS:
        assert goal.section in gpu_check.NAMES
        assert goal.section != "kernels" or goal.key.removesuffix(": mosaic") in keys
        assert goal.section != "engine" or goal.key in loads
        assert goal.section != "step" or goal.key in decoded or goal.key.startswith("swap")
        assert goal.section != "server" or goal.key in set(map(throughput.title, server.LOADS))


@pytest.mark.parametrize(("share", "code"), [(0.75, 0), (0.7, 1)])
def test_the_exit_status_knows_floors(tmp_path, capsys, share, code):
    results = gpu_check.Results(tmp_path, H100, quick=False)
    for name, section in step_of(share).items():
        results.put(name, section)
    assert gpu_check.summary(results, ["step"]) == code
    assert ("below floor" in capsys.readouterr().out) == (code == 1)
