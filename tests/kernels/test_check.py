"""The harness that compiles kernels: report parsing, its processes, and shipped kernels compiled for H100."""

import dataclasses
import importlib.metadata
import json
import sys
import types

import pytest

from pallas_kernels import specs
from pallas_kernels.check import __main__ as door
from pallas_kernels.check import ops, plugins
from pallas_kernels.check.launch import Launcher
from pallas_kernels.check.plugins import PluginsMissing, require_plugins
from pallas_kernels.check.report import (
    Kernel,
    Outcome,
    as_markdown,
    as_table,
    count_instructions,
    read_ptx,
    read_ptxas,
    read_resources,
)
from pallas_kernels.check.target import TARGETS
from pallas_kernels.specs import AMPERE, HOPPER, Spec
from tests.gpu_plugins import needs_plugins

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_decode_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 205 registers, used 16 barriers, 1 bytes smem
"""
RESOURCES = (
    "Resources(smem_scratch_bytes=118784, tmem_scratch_cols=0, barrier_counts=Counter({"
    "Barrier(arrival_count=1, num_barriers=2, orders_tensor_core=False): 3, "
    "Barrier(arrival_count=1, num_barriers=1, orders_tensor_core=False): 1}), scoped_gmem_semaphores={})"
)
# PTX of a kernel with four consumers that requested more registers than its block had, and hung on an H100.
HANGING_PTX = """\
.visible .entry quant_matmul_mosaic_gpu_kernel(
	.param .align 64 .b8 quant_matmul_mosaic_gpu_kernel_param_0[512]
)
.maxntid 640, 1, 1
.minnctapersm 1
{
	setmaxnreg.inc.sync.aligned.u32 120;
	setmaxnreg.dec.sync.aligned.u32 24;
"""
SASS = """\
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:-:Y:01        /*1080*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT
   -:-:-:Y:01        /*10c0*/              @!UP0 UTMALDG.5D [UR8], [UR4]
   -:-:-:Y:01        /*10d0*/               @P0 BAR.SYNC.DEFER_BLOCKING 0x1
.L_x_26:
        /*10e0*/                   STL [R1], R2 ;   /* 0x0000000201007387 */
"""
KERNEL = Kernel("decode", registers=100, spill_stores=0, spill_loads=0, stack=0, static_smem=1, dynamic_smem=1024)


def test_reads_the_compilers_report():
    assert read_ptxas(PTXAS) == {
        "name": "paged_decode",
        "registers": 205,
        "stack": 16,
        "spill_stores": 8,
        "spill_loads": 12,
        "static_smem": 1,
        "named_barriers": 16,
    }
    assert read_resources(RESOURCES) == {"dynamic_smem": 118784 + 8 * (2 * 3 + 1), "arrivals": 1}
    assert read_ptx(HANGING_PTX) == {"threads": 640, "cluster": 1, "decrease": 24, "increase": 120}
    clustered = HANGING_PTX.replace("{", ".explicitcluster\n.reqnctapercluster 2, 1, 1\n{")
    assert read_ptx(clustered)["cluster"] == 2


def test_a_report_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no report of ptxas"):
        read_ptxas("ptxas fatal : out of memory")
    with pytest.raises(ValueError, match="setmaxnreg"):
        read_ptxas(f"{PTXAS}ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored")
    with pytest.raises(ValueError, match="resources"):
        read_resources("")
    with pytest.raises(ValueError, match="thread block"):
        read_ptx(".visible .entry kernel()")


def _faults(**fields):
    return [*dataclasses.replace(KERNEL, **fields).faults(TARGETS[HOPPER].shared_memory)]


def test_a_kernel_that_asks_for_what_the_hardware_has_is_well():
    assert not _faults()
    assert not _faults(threads=640, registers=96, decrease=24, increase=112)
    assert not _faults(threads=384, registers=168, decrease=24, increase=240)


@pytest.mark.parametrize(
    "planted",
    [
        {**read_ptx(HANGING_PTX), "registers": 96},
        {"threads": 384, "registers": 160, "decrease": 24, "increase": 240},
        {"threads": 384, "registers": 176},
        {"threads": 1152, "registers": 32},
        {"dynamic_smem": 232_448},
        {"cluster": 16},
        {"named_barriers": 17},
        {"arrivals": 2**20},
        {"spill_loads": 4},
    ],
)
def test_a_kernel_that_asks_for_more_fails(planted):
    (fault,) = _faults(**planted)
    assert ("hang" in fault) == ("increase" in planted)


def test_counts_instructions_whatever_their_modifiers_and_predicates():
    assert count_instructions(SASS) == {"HGMMA": 1, "UTMALDG": 1, "BAR": 1, "STL": 1, "total": 5}


def test_tables_show_every_kernel_and_every_failure():
    spilling = dataclasses.replace(KERNEL, spill_stores=8, instructions={"HGMMA": 2, "total": 9})
    outcomes = [Outcome("op", "a", HOPPER, (KERNEL, spilling)), Outcome("op", "b", HOPPER, failure="died")]
    for shown in (as_table(outcomes), as_markdown(outcomes)):
        assert "8/0" in shown
        assert "HGMMA 2 total 9" in shown
        assert "1024 + 1" in shown
        assert "none" in shown
    assert [Outcome.from_json(json.loads(json.dumps(one.as_json()))) for one in outcomes] == outcomes


@dataclasses.dataclass(frozen=True)
class Named(Spec):
    """A spec that is not compiled."""

    op: str = "op"
    name: str = "a"
    kernel = staticmethod(tuple)

    def arguments(self):
        return ()


# A fake compiling process: the prefix of a configuration name selects its behaviour.
CHILD = """
import json, os, pathlib, sys
target, results = sys.argv[2], pathlib.Path(sys.argv[4])
for index, (op, name) in enumerate(json.load(sys.stdin)):
    if name.startswith("abort"):
        print("LLVM ERROR: cannot select", file=sys.stderr, flush=True)
        os.abort()
    if name.startswith("again") and index:
        sys.exit(0)
    with results.open("a") as file:
        file.write(json.dumps({"op": op, "name": name, "target": target, "kernels": [], "failure": ""}) + "\\n")
"""


def _launched(names, jobs=1):
    work = [(Named("op", name), target) for target in (HOPPER, AMPERE) for name in names]
    outcomes = Launcher((sys.executable, "-c", CHILD), {}, jobs).run(work)
    assert [(one.name, one.target) for one in outcomes] == [(one.name, target) for one, target in work]
    return outcomes


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_process_that_aborts_hides_no_other_result(jobs):
    outcomes = _launched(["a", "abort1", "b", "abort2", "abort3", "c"], jobs)
    assert {one.name for one in outcomes if one.failure} == {"abort1", "abort2", "abort3"}
    assert all("SIGABRT" in one.failure and "LLVM ERROR" in one.failure for one in outcomes if one.failure)


def test_a_process_may_leave_the_rest_to_another():
    assert not any(one.failure for one in _launched(["a", "again1", "again2", "b"]))


def test_a_process_that_does_nothing_is_a_failure():
    (outcome,) = Launcher((sys.executable, "-c", ""), {}).run([(Named("op", "a"), HOPPER)])
    assert "exit 0" in outcome.failure


def test_what_ships_is_of_every_op_and_for_known_targets():
    shipped = ops.shipped()
    assert {one.op.split(".")[0] for one in shipped} == {folder.name for folder in specs.op_folders()}
    assert {target for one in shipped for target in one.targets} <= set(TARGETS)


def test_an_op_without_specs_is_a_failure(capsys, monkeypatch):
    done = types.SimpleNamespace(run=lambda work: [Outcome(one.op, one.name, target) for one, target in work])
    monkeypatch.setattr(door, "compiling", lambda *_: done)
    monkeypatch.setattr(door, "require_plugins", lambda folder: None)
    assert door.main(["--op", "token_quant"]) == 0
    monkeypatch.setattr(door, "forgotten", lambda: ["token_quant"])
    assert door.main(["--op", "token_quant"]) == 1
    assert "token_quant/arg_specs.py" in capsys.readouterr().err


def test_names_are_an_ops_own():
    with pytest.raises(ValueError, match="same name"):
        ops._check_names("op", [("op.a", "x"), ("op.a", "x")])
    with pytest.raises(ValueError, match="must begin"):
        ops._check_names("op", [("other.a", "x")])


def test_says_how_to_install_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plugins, "_places", lambda folder: [str(folder)])
    assert door.main(["--plugins", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    version = importlib.metadata.version("jaxlib")
    for package in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        assert f"pip install --no-deps --target {tmp_path} {package}=={version}" in said


def test_another_version_than_jaxs_is_refused(tmp_path):
    for package in ("jax_cuda13_plugin", "jax_cuda13_pjrt"):
        info = tmp_path / f"{package}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    with pytest.raises(PluginsMissing, match=r"jax-cuda13-plugin is 0\.1"):
        require_plugins(tmp_path)


@needs_plugins
def test_compiles_what_ships_and_says_what_it_needs(tmp_path, capsys):
    """Compile one shipped configuration; `make check-kernels` compiles all of them."""
    one, result = ops.shipped(["paged_attention.decode"])[0], tmp_path / "result.json"
    assert door.main(["--op", one.op, "--name", one.name, "--target", HOPPER, "--json", str(result)]) == 0
    outcomes = [Outcome.from_json(fields) for fields in json.loads(result.read_text())]
    assert (one.op, one.name) in {(outcome.op, outcome.name) for outcome in outcomes}
    assert all(kernel.registers and not kernel.spills for outcome in outcomes for kernel in outcome.kernels)
    assert one.name in capsys.readouterr().out


@needs_plugins
def test_a_sample_is_some_of_each(monkeypatch):
    """``--every 4``, as in `.ci/run`, compiles a fraction that still covers every op and target."""
    compiled = []
    monkeypatch.setattr(
        door, "compiling", lambda *_: types.SimpleNamespace(run=lambda work: compiled.extend(work) or [])
    )
    door.main([])
    whole = list(compiled)
    compiled.clear()
    door.main(["--every", "4"])
    assert len(compiled) < 0.4 * len(whole)
    assert [each for each in whole if each in compiled] == compiled
    assert {(one.op, target) for one, target in compiled} == {(one.op, target) for one, target in whole}


@pytest.mark.parametrize("wrong", ["0", "-1", "x"])
def test_a_sample_of_none_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        door.parse(["--every", wrong])
    assert stop.value.code == 2
    assert wrong in capsys.readouterr().err


@needs_plugins
def test_nothing_to_compile_is_a_failure(capsys):
    assert door.main(["--op", "no_such_op"]) == 1
    assert "no configuration" in capsys.readouterr().err


@needs_plugins
def test_a_target_that_nothing_ships_for_is_said_to_have_none(capsys):
    none = Named("op", "a")
    assert door._matching([none], [AMPERE, HOPPER], named=True) == [(none, HOPPER)]
    assert f"{AMPERE}: no configuration" in capsys.readouterr().err
