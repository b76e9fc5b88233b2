"""Weight loading: every value in its position, an error for every mismatch, memory within one tensor."""

import json
import pathlib
import subprocess
import sys
import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.types import ParamSpec, Source, walk_specs
from jaxinfer.weights import checkpoint_dtype, load_params
from jaxinfer.weights.tree import TARGETS, Fill, Path, overlap
from tests.weights.files import EVERYTHING, refused, tiny_specs, tiny_tensors, write_index, write_sharded, write_tensors


def keep(path: Path, spec: ParamSpec, fill: Fill) -> np.ndarray:
    del path, spec
    return fill(())


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    write_tensors(tmp_path / "model.safetensors", tiny_tensors())
    return tmp_path


def assert_in_place(params: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Check the fused layout by its equations, written as loops."""
    params = jax.tree.map(np.float32, params)  # exact; numpy compares NaN in its own dtypes only
    tensors = {name: np.float32(value) for name, value in tensors.items()}
    block, attention = params["block"], "layers.0.attn"
    np.testing.assert_array_equal(params["embed"], tensors["embed.weight"])
    np.testing.assert_array_equal(block["norm"], tensors["norm.weight"])
    np.testing.assert_array_equal(block["gate_up"][:, 0], tensors["mlp.gate.weight"].T)
    np.testing.assert_array_equal(block["gate_up"][:, 1], tensors["mlp.up.weight"].T)
    q, k, v = (tensors[f"{attention}.{n}.weight"] for n in "qkv")
    qb, kb, vb = (tensors[f"{attention}.{n}.bias"] for n in "qkv")
    for head in range(2):
        for dim in range(3):
            for member in range(2):
                row = (head * 2 + member) * 3 + dim
                np.testing.assert_array_equal(block["qkv"][:, head, member, dim], q[row])
                assert block["qkv_bias"][head, member, dim] == qb[row]
            np.testing.assert_array_equal(block["qkv"][:, head, 2, dim], k[head * 3 + dim])
            np.testing.assert_array_equal(block["qkv"][:, head, 3, dim], v[head * 3 + dim])
            assert block["qkv_bias"][head, 2, dim] == kb[head * 3 + dim]
            assert block["qkv_bias"][head, 3, dim] == vb[head * 3 + dim]


def test_every_value_lands_in_its_place(folder: pathlib.Path) -> None:
    params = load_params(folder, tiny_specs(), "float32", keep)
    assert [path for path, _ in walk_specs(tiny_specs())] == [path for path, _ in _leaves(params)]
    assert_in_place(params, tiny_tensors())


def _leaves(tree: dict[str, Any], path: Path = ()) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for key, node in tree.items():
        found += _leaves(node, (*path, key)) if isinstance(node, dict) else [((*path, key), node)]
    return found


def test_shards_give_the_same_parameters(tmp_path: pathlib.Path) -> None:
    tensors = tiny_tensors()
    write_sharded(
        tmp_path,
        {"a.safetensors": dict(list(tensors.items())[::2]), "b.safetensors": dict(list(tensors.items())[1::2])},
    )
    assert_in_place(load_params(tmp_path, tiny_specs(), "float32", keep), tensors)


def test_by_default_on_jax_s_default_device(folder: pathlib.Path) -> None:
    params = load_params(folder, tiny_specs(), "bfloat16")
    leaf = params["block"]["qkv"]
    assert isinstance(leaf, jax.Array)
    assert leaf.dtype == ml_dtypes.bfloat16
    assert leaf.device == jax.devices()[0]


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("asked", ["float16", "bfloat16", "float32"])
def test_conversions_round_once(tmp_path: pathlib.Path, stored: Any, asked: str) -> None:
    tensors = tiny_tensors(stored)
    write_tensors(tmp_path / "model.safetensors", tensors)
    params = load_params(tmp_path, tiny_specs(), asked, keep)
    assert {leaf.dtype.name for _, leaf in _leaves(params)} == {asked}
    assert_in_place(params, {name: value.astype(TARGETS[asked]) for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, np.float32, "bfloat16"),
        ({"dtype": "float16"}, np.float32, "float16"),
        ({"dtype": "torch.bfloat16", "torch_dtype": "float32"}, np.float32, "bfloat16"),
        ({"torch_dtype": "float64"}, np.float64, "float32"),
        ({"torch_dtype": None}, np.float16, "float16"),
        ({"torch_dtype": "auto"}, ml_dtypes.bfloat16, "bfloat16"),
        ({"torch_dtype": ["odd"]}, np.float64, "float32"),
        (None, np.float32, "float32"),
    ],
)
def test_auto_is_the_checkpoints_own(tmp_path: pathlib.Path, config: Any, stored: Any, expected: str) -> None:
    write_tensors(tmp_path / "model.safetensors", tiny_tensors(stored))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(tmp_path) == expected
    assert load_params(tmp_path, tiny_specs(), "auto", keep)["embed"].dtype.name == expected


def test_auto_without_any_float(tmp_path: pathlib.Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"x": np.ones(3, np.int8)})
    with refused("no floating-point tensor"):
        checkpoint_dtype(tmp_path)


def test_an_unknown_dtype_is_a_value_error(folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="must be one of float32, bfloat16, float16, got 'int8'"):
        load_params(folder, tiny_specs(), "int8", keep)


def test_missing_tensors_are_listed(tmp_path: pathlib.Path) -> None:
    tensors = tiny_tensors()
    for name in ("norm.weight", "mlp.up.weight"):
        del tensors[name]
    write_tensors(tmp_path / "model.safetensors", tensors)
    with refused("lacks 2 tensors that config.json asks for: 'norm.weight', 'mlp.up.weight'"):
        load_params(tmp_path, tiny_specs(), "float32", keep)


def test_unused_tensors_are_listed(tmp_path: pathlib.Path) -> None:
    extra = {"lm_head.weight": np.ones((7, 4), np.float32)}
    write_tensors(tmp_path / "model.safetensors", {**tiny_tensors(), **extra})
    with refused("holds a tensor that the model in config.json has no place for: 'lm_head.weight'"):
        load_params(tmp_path, tiny_specs(), "float32", keep)
    load_params(tmp_path, tiny_specs(), "float32", keep, ignore=("lm_head.*",))


def test_many_unused_tensors_are_counted(tmp_path: pathlib.Path) -> None:
    extra = {f"vision.{i}": np.ones(1, np.float32) for i in range(9)}
    write_tensors(tmp_path / "model.safetensors", {**tiny_tensors(), **extra})
    with refused(r"holds 9 tensors .*'vision.4' and 4 more"):
        load_params(tmp_path, tiny_specs(), "float32", keep)


def test_computed_tensors_of_old_exporters_are_harmless(tmp_path: pathlib.Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    write_tensors(tmp_path / "model.safetensors", {**tiny_tensors(), **extra})
    load_params(tmp_path, tiny_specs(), "float32", keep)


@pytest.mark.parametrize("shape", [(4, 7), (28,), (7, 4, 1), (8, 4), (7, 2)])
def test_a_wrong_shape(tmp_path: pathlib.Path, shape: tuple[int, ...]) -> None:
    write_tensors(tmp_path / "model.safetensors", {**tiny_tensors(), "embed.weight": np.ones(shape, np.float32)})
    found = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    with refused(rf"tensor 'embed.weight' .* has shape {found} where config.json asks \[7, 4\]"):
        load_params(tmp_path, tiny_specs(), "float32", keep)


def test_integer_weights_are_refused(tmp_path: pathlib.Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {**tiny_tensors(), "norm.weight": np.ones(4, np.int8)})
    with refused("tensor 'norm.weight' .* is stored as I8: only F16, BF16, F32 and F64"):
        load_params(tmp_path, tiny_specs(), "float32", keep)


def test_nothing_is_placed_before_all_headers_are_checked(tmp_path: pathlib.Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {**tiny_tensors(), "mlp.up.weight": np.ones(3, np.float32)})
    placed: list[Path] = []
    with refused("mlp.up.weight"):
        load_params(tmp_path, tiny_specs(), "float32", lambda path, *_: placed.append(path))
    assert placed == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_non_finite_weights(tmp_path: pathlib.Path, bad: float, stored: Any) -> None:
    tensors = tiny_tensors(stored)
    tensors["layers.0.attn.k.weight"][5, 3] = bad
    write_tensors(tmp_path / "model.safetensors", tensors)
    for asked in TARGETS:
        with refused(f"'layers.0.attn.k.weight' .* holds NaN or infinite values as {asked}"):
            load_params(tmp_path, tiny_specs(), asked, keep, check_finite=True)
        assert_in_place(
            load_params(tmp_path, tiny_specs(), asked, keep), {n: t.astype(TARGETS[asked]) for n, t in tensors.items()}
        )


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_values_too_large_for_the_asked_dtype(tmp_path: pathlib.Path, value: float) -> None:
    tensors = tiny_tensors()
    tensors["mlp.gate.weight"][2, 2] = value
    write_tensors(tmp_path / "model.safetensors", tensors)
    with refused("'mlp.gate.weight' .* holds values too large for float16"):
        load_params(tmp_path, tiny_specs(), "float16", keep)
    load_params(tmp_path, tiny_specs(), "bfloat16", keep)


@pytest.mark.filterwarnings("error")
def test_signalling_nans_are_weights_like_any_other(tmp_path: pathlib.Path) -> None:
    tensors = tiny_tensors()
    tensors["norm.weight"] = np.full(4, 0x7FA00000, np.uint32).view(np.float32)
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert np.isnan(load_params(tmp_path, tiny_specs(), "bfloat16", keep)["block"]["norm"]).all()


def test_finite_check_looks_everywhere(tmp_path: pathlib.Path) -> None:
    values = np.zeros((3, 1_000_000), np.float32)
    values[2, -1] = np.nan
    write_tensors(tmp_path / "model.safetensors", {"x": values})
    specs = {"x": ParamSpec(values.shape, (None, None), sources=(Source("x", values.shape),))}
    with refused("'x' .* holds NaN"):
        load_params(tmp_path, specs, "float32", keep, check_finite=True)


def test_progress_counts_checkpoint_bytes(folder: pathlib.Path) -> None:
    calls: list[tuple[int, int, str]] = []
    load_params(folder, tiny_specs(), "float16", keep, progress=lambda *call: calls.append(call))
    tensors = tiny_tensors()
    total = sum(value.nbytes for value in tensors.values())
    assert [name for *_, name in calls] == [s.name for _, spec in walk_specs(tiny_specs()) for s in spec.sources]
    assert {call[1] for call in calls} == {total}
    assert np.diff([0, *(call[0] for call in calls)]).tolist() == [tensors[name].nbytes for *_, name in calls]


@pytest.mark.parametrize(
    ("sources", "pattern"),
    [
        ((Source("x", (4, 2)),), r"x: source 'x' has the form \(4, 2\) where there is room for \(2, 4\)"),
        ((Source("x", (2, 2), where=(EVERYTHING, slice(0, 2))),), "x: its sources hold 4 values of 8"),
        ((), "x: its sources hold 0 values of 8"),
    ],
)
def test_specs_that_contradict_themselves(folder: pathlib.Path, sources: tuple[Source, ...], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        load_params(folder, {"x": ParamSpec((2, 4), (None, None), sources=sources)}, "float32", keep)


def big_specs(tensors: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        f"p{i}": ParamSpec((columns, rows), (None, None), sources=(Source(f"t{i}", (rows, columns), transpose=True),))
        for i in range(tensors)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_python_holds_one_buffer_at_a_time(tmp_path: pathlib.Path, dtype: str) -> None:
    rows, columns = 512, 1024
    tensors = {f"t{i}": np.full((rows, columns), i, np.float32) for i in range(6)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    del tensors
    one = rows * columns * TARGETS[dtype].itemsize
    tracemalloc.start()
    load_params(
        tmp_path, big_specs(6, rows, columns), dtype, lambda path, spec, fill: float(fill(())[0, 0]), check_finite=True
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert one < peak < 1.6 * one  # includes the booleans of the finite check


PEAK = """
import pathlib, re, sys, jax, numpy as np
from jaxinfer.weights import load_params
from tests.weights.test_load import big_specs

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text()).group(1)) / 1024

jax.device_put(np.zeros(1)).block_until_ready()
before = peak()
params = load_params(sys.argv[1], big_specs(10, 2560, 2048), sys.argv[2])
print(peak() - before, sum(leaf.nbytes for leaf in params.values()) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resident_memory_is_the_model_and_one_tensor(tmp_path: pathlib.Path, repo: pathlib.Path, dtype: str) -> None:
    """200 MiB of float32 in ten tensors: the process grows by the model, one buffer and one mapped tensor."""
    write_tensors(tmp_path / "model.safetensors", {f"t{i}": np.full((2560, 2048), i, np.float32) for i in range(10)})
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype]
    grown, model = map(
        float, subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout.split()
    )
    assert model == (200 if dtype == "float32" else 100)
    assert model < grown < model + model / 10 + 20 + 10


@pytest.mark.parametrize(
    ("index", "where"),
    [
        ((slice(0, 3), slice(2, 5)), (slice(1, 4), 3)),
        ((slice(2, 6), slice(0, 5)), (slice(1, None, 2),)),
        ((slice(3, 4),), (slice(0, None, 3), slice(1, 4))),
        ((), (slice(2, 5),)),
        ((slice(4, 6), slice(1, 2)), (5, slice(None, None, 2))),
        ((slice(0, 2),), (slice(3, 5),)),
        ((slice(0, 6), slice(0, 2)), (slice(0, 6), 4)),
    ],
)
def test_where_a_part_meets_a_source(index: tuple[slice, ...], where: tuple[slice | int, ...]) -> None:
    shape = (6, 5)
    whole, placed = np.full(shape, -1), np.arange(30).reshape(shape)[where]
    whole[where] = placed
    part, met = np.full(shape, -1)[index], overlap(shape, index, where)
    if met is not None:
        part[met[0]] = placed[met[1]]
    np.testing.assert_array_equal(part, whole[index])
    assert (met is None) == (whole[index] == -1).all()


def test_parts_of_parameters_are_those_of_the_whole(folder: pathlib.Path) -> None:
    """No more is read: only a shard-sized buffer is held, and bytes read are counted."""
    calls: list[tuple[int, int, str]] = []

    def halves(path: Path, spec: ParamSpec, fill: Fill) -> np.ndarray:
        del path
        size = spec.shape[-1]
        lead = (slice(None),) * (len(spec.shape) - 1)
        parts = [fill((*lead, slice(low, high))) for low, high in ((0, size // 2), (size // 2, size))]
        return np.concatenate(parts, axis=-1)

    params = load_params(folder, tiny_specs(), "float32", halves, progress=lambda *call: calls.append(call))
    assert_in_place(params, tiny_tensors())
    assert calls[-1][0] == calls[-1][1]


def test_a_tensor_that_the_index_does_not_list_needs_no_place(tmp_path: pathlib.Path) -> None:
    shards = {"a.safetensors": tiny_tensors(), "b.safetensors": {"stray": np.ones(3, np.float32)}}
    write_sharded(tmp_path, shards)
    with refused("no place for: 'stray'"):
        load_params(tmp_path, tiny_specs(), "float32", keep)
    write_index(
        tmp_path, {**dict.fromkeys(list(tiny_tensors())[1:], "a.safetensors"), "mtp.fc.weight": "b.safetensors"}
    )
    assert_in_place(load_params(tmp_path, tiny_specs(), "float32", keep), tiny_tensors())
