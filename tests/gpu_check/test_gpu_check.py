"""gpu_check runs end to end without a GPU, keeps records of a killed section, and never reports a CPU as a GPU."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.gpu_check import __main__ as gpu_check
from jaxinfer.gpu_check import demo, kernels, parity, workloads
from jaxinfer.gpu_check.measure import Inside, deviation
from jaxinfer.gpu_check.problem import MOSAIC, Problem
from jaxinfer.gpu_check.problems import FIRST, PROBLEMS
from jaxinfer.gpu_check.report import Report, read_records
from jaxinfer.gpu_check.sections import Section
from jaxinfer.gpu_check.table import NOT_A_GPU, markdown
from pallas_kernels.choice import Target
from pallas_kernels.grouped_matmul.arg_specs import Mixture
from pallas_kernels.linear_attention.arg_specs import Layer, States
from pallas_kernels.matmul import arg_specs as matmul
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.arg_specs import Decode, Prefill
from pallas_kernels.paged_attention.hopper.softmax import GRID
from pallas_kernels.quant_matmul import arg_specs as quant_matmul
from pallas_kernels.specs import op_folders

H100 = {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"}


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "records", seconds=600, quick=True, limits={"gb_s": {"copy": 100.0}, "tflop_s": {}})


def written(report):
    return {record["key"]: record for record in read_records(report.path)}


def quick_run(folder, *arguments):
    code = gpu_check.main(["--quick", "--out", str(folder), *arguments])
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    failed = {name: section for name, section in content["sections"].items() if section["status"] != "ok"}
    assert code == 0, failed
    return path, content


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the result of a run of two sections in separate processes."""
    return quick_run(tmp_path_factory.mktemp("results"), "--only", "device,copy")


def records_of(content, section):
    return {record["key"]: record for record in content["sections"][section]["records"]}


def test_a_cpu_is_called_a_cpu(results):
    path, content = results
    assert path.name == f"cpu-{content['date']}-quick.json"
    assert (content["device"]["platform"], content["quick"], content["note"]) == ("cpu", True, gpu_check.CPU_NOTE)
    assert records_of(content, "device")["nvidia-smi"]
    assert records_of(content, "copy")["best"]["gb_s"] > 0
    assert {each.suffix for each in path.parent.iterdir()} == {".json", ".md"}


def test_the_table_of_a_cpu_has_no_figures(results):
    path, _ = results
    table = path.with_suffix(".md").read_text()
    assert NOT_A_GPU in table
    assert "gb_s" not in table


def the_problem(text):
    return next(problem for problem in PROBLEMS if str(problem).startswith(text))


def test_the_ops_equal_float64(report):
    parity.check(report, [the_problem("quant_matmul: 16"), the_problem("grouped_matmul: 600")], ("xla",))
    parity.check(report, [the_problem("kv_copy.copy_pages")], ("xla", "mosaic"))
    parity.check(report, [problem for problem in PROBLEMS if problem.op == "matmul"], ("xla", "mosaic"))
    parity.check(report, [problem for problem in PROBLEMS if problem.op == "token_quant"], ("xla", "mosaic"))
    assert len(written(report)) == 4 + 2 * 5 + 2 * 2
    assert all(record["ok"] for record in written(report).values()), written(report)


def test_every_op_with_a_kernel_is_checked():
    folders = {folder.name for folder in op_folders() if (folder / "reference.py").is_file()}
    assert {problem.op.split(".")[0] for problem in PROBLEMS} == folders


def test_every_path_is_there():
    for problem in PROBLEMS:
        assert all(callable(problem.function(path)) for path in problem.paths), problem


def neighbours_matter(x, weights, scales):
    return x @ (weights.astype(x.dtype)).T * 0 + jnp.arange(x.shape[0], dtype=x.dtype)[:, None]


def reads_what_is_poison(q, pool, tables, lengths, **options):
    return jnp.full(q.shape, jnp.nan, q.dtype)


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("quant_matmul: 16", neighbours_matter, {"same_bits_reversed": False, "same_bits_twice": True}),
        ("paged_attention.decode", reads_what_is_poison, {"same_finite": False}),
    ],
)
def test_a_wrong_path_is_told(report, monkeypatch, name, function, wrong):
    monkeypatch.setattr(Problem, "function", lambda self, path: function)
    parity.check(report, [the_problem(name)], ("xla",))
    (record,) = written(report).values()
    assert {"ok": False, **wrong}.items() <= record.items()


def test_an_op_that_is_not_there_does_not_stop_the_others(report):
    copies = the_problem("kv_copy.copy_pages")
    absent = copies._replace(name="absent", paths={"xla": "pallas_kernels.nothing:copy"})
    parity.check(report, [absent, copies], ("xla",))
    assert "ModuleNotFoundError" in written(report)["kv_copy.copy_pages: absent (xla)"]["error"]
    assert written(report)[f"{copies} (xla)"]["ok"]


def test_one_shape_of_each_kernel_for_hopper_is_checked_first():
    def kernels(problems):
        return {problem.op for problem in problems if problem.refusal(MOSAIC, (9, 0)) is None}

    assert kernels(PROBLEMS[:FIRST]) == kernels(PROBLEMS)


def test_kernels_of_other_gpus_are_skipped_by_name(report, monkeypatch):
    monkeypatch.setattr(parity, "lowering_target", lambda: Target("gpu", (9, 0)))
    parity.check(report, [the_problem("paged_attention.ampere.decode")], ("mosaic",))
    (record,) = written(report).values()
    assert record["skipped"] == "the kernel is for GPUs of compute capability 8.0 to 8.9, this is one of 9.0"
    assert the_problem("paged_attention.decode").refusal("mosaic", (8, 0)) is not None
    assert the_problem("paged_attention.decode").refusal("xla", (8, 0)) is None


@pytest.fixture(scope="module")
def long_row():
    """Return operands of a decode step with 2,000 keys per row, and a kernel's result as float64 models it."""
    operands = the_problem("paged_attention.decode: page 64").build(False)
    return operands, operands.modelled[0]


@pytest.mark.parametrize("fault", ["none", "a key is lost", "a page is another", "a scale is wrong"])
def test_the_bound_of_attention_knows_faults_from_roundings(long_row, fault):
    operands, model = long_row
    arrays = {name: np.array(array) for name, array in operands.arrays.items()}
    pool, tables, lengths = arrays["pool"], arrays["tables"], arrays["lengths"]
    if fault == "a key is lost":
        pool[tables[0, 7], 0, :, 3] = -100 * np.sign(arrays["q"][0, 0, :])  # so that the key gets no attention
    if fault == "a page is another":
        tables[0, 7] = tables[0, 8]
    if fault == "a scale is wrong":
        pool[:, 1] = pool[:, 1] * 1.005
    with jax.enable_x64(True):
        found = reference.decode(
            *(jnp.asarray(each) for each in (arrays["q"], pool, tables, lengths)),
            **operands.options,
            dtype=jnp.float64,
            weights_dtype=jnp.bfloat16,
            score_grid=GRID,
        )
    got = np.asarray(found).astype(jnp.bfloat16)
    assert deviation(got, model, the_problem("paged_attention.decode: page 64").bound)["ok"] == (fault == "none")


def test_what_was_modelled_is_what_an_h100_gave():
    """Distances from exact results, measured on 2026-11-22, before scores were rounded: all digits match the model."""
    for name, measured in (("page 64", 0.00168), ("page 16, 8 heads of 64, every option", 0.00241)):
        operands = the_problem(f"paged_attention.decode: {name}").build(False)
        arrays = {key: jnp.asarray(array) for key, array in operands.arrays.items()}
        asked = dataclasses.replace(operands.options["options"], sinks=arrays.pop("sinks", None))
        with jax.enable_x64(True):
            then = reference.decode(**arrays, options=asked, dtype=jnp.float64, weights_dtype=jnp.bfloat16)
        assert deviation(np.asarray(then).astype(jnp.bfloat16), operands.exact[0], 1e-3)["relative_error"] == measured


def test_deviation_leaves_the_rounding_of_the_result_out():
    exact = np.random.default_rng(0).normal(size=1000)
    rounded = exact.astype(jnp.bfloat16)
    assert deviation(rounded, exact, 0.0)["ok"]
    assert not deviation((exact * 1.01).astype(jnp.bfloat16), exact, 1e-3)["ok"]
    assert not deviation(np.where(exact > 2, np.nan, exact), exact, 1.0)["ok"]


def test_deviation_is_that_of_the_worst_vector():
    exact = np.stack([np.full(64, 1000.0), np.full(64, 1.0), np.zeros(64)])
    got = exact.copy()
    got[1, 5] = 1.1
    assert deviation(got, exact, 1e-3)["worst_vector"] == pytest.approx(0.1 / 8, rel=1e-2)
    got = exact.copy()
    got[2, 5] = 1e-30
    assert not deviation(got, exact, 1.0)["ok"]


def test_every_shape_has_our_kernel_and_the_xla_path():
    for quick in (True, False):
        for shape in (*workloads.attention(quick=quick), *workloads.others(quick=quick)):
            names = {path.name for path in kernels.paths(shape)}
            long = isinstance(shape, Prefill) and shape.operations > kernels._XLA_OPERATIONS
            assert {kernels.MOSAIC, *(set() if long else {kernels.XLA})} <= names


def test_kernels_are_timed(report, monkeypatch):
    monkeypatch.setattr(workloads, "QUICK_DECODES", ())
    monkeypatch.setattr(workloads, "QUICK_PREFILLS", ())
    monkeypatch.setattr(workloads, "QUICK_OTHERS", workloads.QUICK_OTHERS[2:])
    kernels.run(report)
    assert len(written(report)) == 7
    assert all("share_of_copy" in record or "tflop_s" in record for record in written(report).values())
    assert all(record.get("share_of_copy", 1) > 0 for record in written(report).values())


def test_calls_inside_a_program_all_happen():
    """Changes accumulate; unchanged state is still processed as often as the time is divided by."""
    seen = []
    state = [(jnp.zeros(()), jnp.float32(2.0)), (jnp.ones(()), jnp.float32(3.0))]

    def add(total, step):
        jax.debug.callback(lambda x: seen.append(float(x)), total)
        return total + step

    calls = Inside(add, sets=2, repeats=3, changes=True)
    timing = calls.time(calls.lower(jax.eval_shape(lambda: state[0])).compile(), state)
    jax.effects_barrier()
    assert sorted(set(seen))[:4] == [0.0, 1.0, 2.0, 4.0]
    assert timing["best_ms"] > 0
    assert float(state[0][0]) == 0.0  # the caller's arrays are not donated


def test_bytes_and_operations_by_hand():
    attention = {"group": 2, "kv_heads": 2, "head_dim": 8}
    assert Decode(rows=1, context=2, **attention).bytes == 2 * (2 * 2 * 2 * 8) + 2 * (2 * 4 * 8)
    alone = {"group": 1, "kv_heads": 1, "head_dim": 8}
    assert Prefill(sequences=1, chunk=2, context=3, **alone).operations == 4 * 8 * (2 + 3)
    assert quant_matmul.Product(1, 2, 128).bytes == 128 + 4 + 2 * 130
    assert quant_matmul.StoredMixture(3, 4, 2, 32, 64).bytes == (4 * 64 * 32 // 2 + 4 * 2 * 32 + 2 * 6 * (64 + 32))
    assert (Mixture(3, 4, 2, 32, 64).rows, Mixture(3, 4, 2, 32, 64).operations) == (2, 12 * 64 * 32)
    assert matmul.Product(3, 128, 2).bytes == 2 * (256 + 3 * 130)
    assert matmul.Product(3, 128, 2, gated=1).operations == 2 * 3 * 128 * 4
    assert States(Layer("", 1, 2, 4, 8, True), 3, 2).bytes == 3 * (2 * 4 * 2 * 4 * 8 + 2 * (2 * (4 + 4 + 16) + 4 * 16))


def test_agreement_ends_at_the_first_difference():
    assert demo._common([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert demo._common([1, 2], [1, 2]) == 2


def test_without_a_gpu_only_quick_runs(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path), "--only", "copy"]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def sections(monkeypatch, section):
    monkeypatch.setattr(gpu_check, "BY_NAME", {section.name: section})
    monkeypatch.setattr(gpu_check, "QUICK_PATIENCE", 1)


def test_a_section_that_hangs_is_stopped(monkeypatch, tmp_path):
    sections(monkeypatch, Section("copy", "benchmarks.gpu.bandwidth", 0.3))
    start = time.monotonic()
    section = gpu_check.run_section("copy", True, {}, tmp_path / "part")
    assert section["status"] == "stopped after 0.3 s"
    assert time.monotonic() - start < 60


def test_a_section_that_crashes_is_told(monkeypatch, tmp_path):
    sections(monkeypatch, Section("nowhere", "nowhere", 60))
    section = gpu_check.run_section("nowhere", True, {}, tmp_path / "part")
    assert section["status"].startswith("failed")
    assert "Traceback" in section["stderr"]


def test_records_survive_a_torn_line_and_a_failed_item(report):
    report.put("a", value=1)
    with report.attempt("b"):
        raise RuntimeError("out of memory")
    report.put("a", value=2)
    with report.path.open("a") as file:
        file.write('{"key": "c", "val')
    assert written(report) == {"a": {"key": "a", "value": 2}, "b": {"key": "b", "error": "RuntimeError: out of memory"}}


def test_rates_and_their_shares(tmp_path):
    limits = {"gb_s": {"copy": 2000.0, "datasheet": 4000.0}, "tflop_s": {"gemm": 800.0}}
    report = Report(tmp_path / "records", seconds=0, quick=False, limits=limits)
    moved = {"bytes": 10**9, "gb_s": 1000.0, "share_of_copy": 0.5, "share_of_datasheet": 0.25}
    assert report.bandwidth(10**9, 1.0) == moved
    assert report.rate(4 * 10**11, 1.0) == {"operations": 4 * 10**11, "tflop_s": 400.0, "share_of_gemm": 0.5}
    assert not report.time_for("all that follows", 1.0)
    assert "no time" in written(report)["not run: all that follows"]["reason"]


def test_sections_fit_into_ten_minutes():
    assert sum(section.seconds for section in gpu_check.SECTIONS if section.asked) < 600


def results_of(folder):
    return gpu_check.Results(folder, H100, quick=False)


def test_later_runs_keep_the_sections_of_the_day(tmp_path):
    def section(**record):
        return {"status": "ok", "seconds": 1.0, "records": [{"key": "best", **record}]}

    results_of(tmp_path).put("gemm", section(tflop_s=700.0))
    again = results_of(tmp_path)
    again.put("copy", section(gb_s=3000.0))
    assert list(json.loads(again.path.read_text())["sections"]) == ["copy", "gemm"]
    assert again.path.name.startswith("nvidia-h100-80gb-hbm3-20")
    assert "note" not in again.content
    again.put("engine", {"status": "ok", "seconds": 1.0, "records": [{"key": "8 requests", "output_tokens_s": 90.0}]})
    measured = {
        "gb_s": {"copy": 3000.0, "datasheet": 3350.0},
        "tflop_s": {"gemm": 700.0, "datasheet": 989.0},
        "output_tokens_s": {"8 requests": 90.0},
    }
    assert again.limits() == measured
    assert "| best | 3000 |" in again.path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("kind", "gb_s"), [("NVIDIA H200", 4800.0), ("NVIDIA H100 80GB HBM3", 3350.0), ("NVIDIA GH200 480GB", None)]
)
def test_the_data_sheet_is_that_of_the_device(tmp_path, kind, gb_s):
    results = gpu_check.Results(tmp_path, {"kind": kind, "platform": "gpu"}, quick=False)
    assert results.limits()["gb_s"].get("datasheet") == gb_s


def test_what_a_run_that_was_cut_off_had_written_is_kept(tmp_path):
    part = results_of(tmp_path).part("kernels")
    Report(part, seconds=1, quick=False, limits={}).put("decode", best_ms=0.5)
    again = results_of(tmp_path)
    assert again.content["sections"]["kernels"]["status"] == "cut off"
    assert "| decode | 0.5 |" in again.path.with_suffix(".md").read_text()
    assert not part.exists()


def test_autotuned_results_are_a_gpus(tmp_path):
    assert results_of(tmp_path).autotuned("step").name == "step.txt"
    assert gpu_check.Results(tmp_path, {"kind": "cpu", "platform": "cpu"}, quick=True).autotuned("step") is None
    flags = gpu_check._environment("step", str(tmp_path), tmp_path / "step.txt")["XLA_FLAGS"]
    assert flags.endswith(f"--xla_gpu_dump_autotune_results_to={tmp_path / 'step.txt'}")


def test_kernels_and_peers_stand_side_by_side():
    def section(**times):
        records = [{"key": path, "shape": "decode", "path": path, "best_ms": ms} for path, ms in times.items()]
        return {"status": "ok", "seconds": 1.0, "records": records}

    sections = {"kernels": section(mosaic=0.25, xla=2.0), "peers": section(FlashInfer=0.5)}
    content = {"device": H100, "date": "2026-01-01", "quick": False, "git": {"commit": "abc"}, "sections": sections}
    table = "|  | mosaic | xla | FlashInfer |\n|---|---|---|---|\n| decode | 0.25 | 2 | 0.5 |"
    assert table in markdown(content, gpu_check.COLUMNS)
    assert "side by side" not in markdown({**content, "device": {"kind": "cpu", "platform": "cpu"}}, gpu_check.COLUMNS)


def test_the_table_tells_what_went_wrong():
    records = [
        {"key": "one", "ok": False, "worst_vector": 0.5},
        {"key": "two", "error": "RuntimeError: no | kernel\nand more"},
    ]
    section = {"status": "failed (exit 1)", "seconds": 3.0, "records": records}
    content = {"device": H100, "date": "2026-01-01", "quick": False, "git": {"commit": "abc"}}
    table = markdown({**content, "sections": {"parity": section}}, gpu_check.COLUMNS)
    assert "| one | **no** | 0.5 |" in table
    assert "- two: RuntimeError: no | kernel\n" in table
    assert "| parity | failed (exit 1) | 3.0 | 1 |" in table
