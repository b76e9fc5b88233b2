"""Dense weights that declare their layout and matmul backend."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution.prepare import prepare, resolve_for
from jaxinfer.quant import Unquantized, dense, laid_out, matmul, matmul_heads, matmul_transposed, swiglu, take
from jaxinfer.quant.layouts import Grouped
from jaxinfer.quant.unquantized import for_gemm, gemm_refusal, layout_for_cpu
from jaxinfer.types import ParamSpec
from pallas_kernels import one_row
from pallas_kernels.choice import HOPPER, Target
from tests.fakes import random_model
from tests.quant.examples import INPUTS
from tests.quant.models import stored_and_plain


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def assert_near(result: jax.Array, expected: jax.Array, off: float = 3e-6) -> None:
    np.testing.assert_allclose(result, expected, atol=off * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("product", [matmul, matmul_transposed])
@pytest.mark.parametrize("layout", ["in first", "in last"])
def test_a_product_is_that_of_the_array(product, layout):
    weight = numbers(3, 8, INPUTS)
    lies = jnp.moveaxis(weight, -1, 0) if layout == "in first" else weight
    plain = Unquantized(lies, layout, ("heads", None, None))
    assert plain.shape == (3, 8, INPUTS)
    assert plain.size == weight.size
    np.testing.assert_array_equal(dense(plain), weight)
    assert_near(product(numbers(2, 5, INPUTS), plain), jnp.einsum("rtk,hdk->rthd", numbers(2, 5, INPUTS), weight))


def test_rows_of_a_table():
    table = numbers(30, 8)
    ids = jnp.array([[3, 29]])
    np.testing.assert_array_equal(take(Unquantized(table, "in last", ("vocab", None)), ids), table[ids])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_gated_product(wrapped):
    weight, x = numbers(2, 16, INPUTS), numbers(4, INPUTS)
    gate, up = (x @ half.T for half in weight)
    found = swiglu(x, Unquantized(weight, "in last", (None, "mlp", None)) if wrapped else weight)
    assert_near(found, gate / (1 + jnp.exp(-gate)) * up)


def test_plain_weights_with_their_outputs_first():
    specs = {
        "qkv": ParamSpec((INPUTS, 3, 2, 4), (None, "kv", None, None), inputs=0, sources=()),
        "again": ParamSpec((INPUTS, 3, 2, 4), (None, "kv", None, None), inputs=0),
        "up": ParamSpec((8, INPUTS), ("mlp", None), inputs=-1),
        "scale": ParamSpec((INPUTS,), (None,), inputs=0),
    }
    shared = numbers(INPUTS, 3, 2, 4)
    params = {"qkv": shared, "again": shared, "up": numbers(8, INPUTS), "scale": numbers(INPUTS)}
    x, kept = numbers(5, INPUTS), np.asarray(shared)
    expected = matmul(x, params["qkv"])
    turned, found = laid_out(specs, params, "in last")
    assert found["qkv"].shape == turned["qkv"].shape == (3, 2, 4, INPUTS)
    np.testing.assert_array_equal(dense(found["qkv"]), np.moveaxis(kept, 0, -1))
    assert turned["qkv"].weight == ParamSpec((3, 2, 4, INPUTS), ("kv", None, None, None), inputs=-1)
    assert turned["qkv"].axes == ("kv", None, None, None)
    assert_near(matmul(x, found["qkv"]), expected)
    assert found["again"] is found["qkv"]
    assert shared.is_deleted()
    assert found["up"] is params["up"]
    assert found["scale"] is params["scale"]


def test_plain_weights_with_their_inputs_first():
    specs = {
        "gate_up": ParamSpec((2, 8, INPUTS), (None, "mlp", "embed"), inputs=-1, sources=()),
        "again": ParamSpec((2, 8, INPUTS), (None, "mlp", "embed"), inputs=-1),
        "down": ParamSpec((INPUTS, 8), ("mlp", None), inputs=0),
        "table": ParamSpec((8, INPUTS), ("vocab", "embed"), inputs=-1),
        "experts": ParamSpec((2, 8, INPUTS), ("expert", None, None), inputs=-1),
        "taps": ParamSpec((8, INPUTS), ("mlp", None)),
    }
    params = {name: numbers(*spec.shape) for name, spec in specs.items()} | {"again": None}
    params["again"] = shared = params["gate_up"]
    x, kept = numbers(5, INPUTS), np.asarray(shared)
    expected, gated = matmul_transposed(x, shared), swiglu(x, shared)
    turned, found = laid_out(specs, params, "in first")
    assert found["gate_up"].shape == turned["gate_up"].shape == (2, 8, INPUTS)
    np.testing.assert_array_equal(dense(found["gate_up"]), kept)
    assert turned["gate_up"].weight == ParamSpec((INPUTS, 2, 8), ("embed", None, "mlp"), inputs=0)
    assert turned["gate_up"].axes == (None, "mlp", "embed")
    assert_near(matmul_transposed(x, found["gate_up"]), expected)
    assert_near(swiglu(x, found["gate_up"]), gated)
    assert found["again"] is found["gate_up"]
    assert shared.is_deleted()
    assert all(found[name] is params[name] for name in ("down", "table", "experts", "taps"))


@pytest.mark.parametrize(
    ("layout", "inputs", "shape", "wanted"),
    [("in last", 0, (64, 48), (48, 64)), ("in first", -1, (2, 48, 64), (64, 2, 48))],
)
def test_abstract_weights_in_another_layout(layout, inputs, shape, wanted):
    spec = {"matrix": ParamSpec(shape, (None,) * len(shape), inputs=inputs)}
    _, found = laid_out(spec, {"matrix": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}, layout)
    assert found["matrix"].weight == jax.ShapeDtypeStruct(wanted, jnp.bfloat16)


@pytest.mark.parametrize("product", [matmul, matmul_transposed])
def test_one_row_of_16_bits_is_multiplied_by_slices(monkeypatch, product):
    """The result is close to that of the row in a batch; weights that cannot be sliced get a second row."""
    counts = []
    inner = one_row.dot
    monkeypatch.setattr(one_row, "dot", lambda *arguments: counts.append(arguments[3]) or inner(*arguments))
    for inputs in (256, 300):
        shape = (inputs, 2, 40) if product is matmul else (2, 40, inputs)
        x, weight = (numbers(*each).astype(jnp.bfloat16) for each in ((3, inputs), shape))
        found = product(x[:1, None], weight)
        assert found.shape == (1, 1, 2, 40)
        assert_near(found[0].astype(jnp.float32), product(x, weight)[:1].astype(jnp.float32), 5e-3)
    assert counts == [8 if product is matmul else 16]


def test_one_row_of_heads_has_a_second_one():
    x, weight = numbers(1, 3, 64).astype(jnp.bfloat16), numbers(3, 64, 16).astype(jnp.bfloat16)
    two = jnp.concatenate([x, jnp.zeros_like(x)])
    np.testing.assert_array_equal(jax.jit(matmul_heads)(x, weight), jax.jit(matmul_heads)(two, weight)[:1])
    assert "2x3x64" in jax.jit(matmul_heads).lower(x, weight).as_text()


def test_matrices_of_the_models_own_dtype_alone_are_for_the_kernel():
    specs = {
        "qkv": ParamSpec((64, 3, 8), ("embed", "heads", None), inputs=0),
        "gate_up": ParamSpec((2, 96, 64), (None, "mlp", "embed"), inputs=-1),
        "experts": ParamSpec((4, 96, 64), ("expert", "mlp", "embed"), inputs=-1),
        "router": ParamSpec((4, 64), (None, "embed"), inputs=-1, dtype="float32"),
        "taps": ParamSpec((4, 64), (None, "embed")),
        "scale": ParamSpec((64,), ("embed",)),
    }
    params = {name: numbers(*spec.shape) for name, spec in specs.items()}
    described, found = for_gemm(specs, params, "mosaic")
    assert {name for name, weight in found.items() if isinstance(weight, Unquantized)} == {"qkv", "gate_up"}
    assert found["qkv"].weight is params["qkv"]
    assert (found["qkv"].layout, found["qkv"].axes) == ("in first", ("heads", None, "embed"))
    assert (described["gate_up"].layout, described["gate_up"].axes) == ("in last", (None, "mlp", "embed"))
    assert jax.tree.structure(found) == jax.tree.structure(described)


@pytest.mark.parametrize(
    ("dtype", "platform", "why"),
    [
        ("bfloat16", "cpu", "for GPUs, and this is a CPU"),
        ("float32", "gpu", "float32 weights times float32: both must be bfloat16"),
        ("bfloat16", "gpu", None),
    ],
)
def test_where_the_kernel_can_be(dtype, platform, why):
    config = EngineConfig(gemm_backend="mosaic")
    found = gemm_refusal(jnp.dtype(dtype), platform)
    if why is None:
        assert found is None
        assert resolve_for(random_model(dtype), config, platform).gemm_backend == "mosaic"
        return
    assert why in str(found)
    with pytest.raises(EngineConfigError, match=f"gemm_backend = mosaic cannot be: .*{why}"):
        resolve_for(random_model(dtype), config, platform)


def test_a_gpu_for_which_it_is_not_written(monkeypatch):
    monkeypatch.setattr("jaxinfer.quant.unquantized.lowering_target", lambda: Target("cuda", (8, 0)))
    assert "compute capability is 8.0" in str(gemm_refusal(jnp.dtype("bfloat16"), "gpu"))


@pytest.mark.parametrize(
    ("backend", "exactness", "kernels"),
    [
        ("mosaic", "relaxed", True),
        ("auto", "exact", True),
        ("auto", "relaxed", False),
        ("xla", "exact", False),
    ],
)
def test_the_kernel_is_where_it_is_asked_for(monkeypatch, backend, exactness, kernels):
    """No tuned tiles exist here: "auto" selects XLA unless bitwise identity is required."""
    monkeypatch.setattr("pallas_kernels.matmul.api.lowering_target", lambda: Target("gpu", HOPPER, "NVIDIA H100"))
    model = random_model("bfloat16", hidden_size=64, intermediate_size=128)
    prepared = prepare(model, EngineConfig(gemm_backend=backend, exactness=exactness, max_model_len=64), "gpu")
    weight = prepared.model.params["layers_0"]["mlp"]["down"]
    assert isinstance(weight, Unquantized) == (backend != "xla")
    x = jax.ShapeDtypeStruct((3, weight.shape[-1] if backend != "xla" else weight.shape[0]), jnp.bfloat16)
    assert (backend != "xla" and weight.by_kernel(x)) == kernels
    assert not (backend != "xla" and weight.by_kernel(jax.ShapeDtypeStruct(x.shape, jnp.float32)))


@pytest.mark.parametrize(
    ("dtype", "weights", "settings", "rows"),
    [
        ("bfloat16", "plain", {}, 1),
        ("float16", "plain", {}, 1),
        ("bfloat16", "lies otherwise", {}, 1),
        ("float32", "plain", {}, 1),
        ("bfloat16", "stored", {}, 2),
        ("float32", "stored", {}, 1),
        ("bfloat16", "plain", {"enable_lora": True}, 2),
        ("float32", "plain", {"enable_lora": True}, 1),
        ("bfloat16", "on two devices", {}, 2),
    ],
)
def test_a_single_sequence_has_one_row_where_that_is_fast(dtype, weights, settings, rows, tmp_path):
    model = random_model(dtype)
    if weights == "lies otherwise":
        model = model.laid_out("in first")
    if weights == "stored":
        stored_as = Grouped("int4", 4)
        model = stored_and_plain(model, tmp_path, lambda name, inputs: stored_as)[0]
    config = EngineConfig(max_num_seqs=1, num_pages=64, max_model_len=64, **settings)
    mesh = Mesh(np.array(jax.devices()[:1] * (1 + (weights == "on two devices"))), ("data",))
    assert resolve_for(model, config, "cpu", mesh).rows == rows


AMX = "fpu avx512_bf16 amx_bf16 amx_tile"


@pytest.mark.parametrize(
    ("flags", "rows", "itemsize", "wanted"),
    [
        (AMX, 2, 2, "in last"),
        (AMX, 1, 4, "in last"),
        (AMX, 1, 2, "in first"),
        ("fpu avx512_bf16", 1, 2, "in first"),
        ("fpu avx512_bf16", 1, 4, None),
        ("fpu avx512_bf16", 8, 2, None),
        ("amx_bf16x", 2, 2, None),
    ],
)
def test_weights_lie_as_the_processor_likes_them(
    tmp_path: pathlib.Path, flags: str, rows: int, itemsize: int, wanted: str | None
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nbugs\t\t: amx_bf16\nflags\t\t: {flags}\n")
    assert layout_for_cpu(rows, itemsize, file) == wanted


def test_a_processor_that_says_nothing_of_itself(tmp_path: pathlib.Path) -> None:
    assert layout_for_cpu(2, 2, tmp_path / "absent") is None
