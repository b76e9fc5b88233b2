"""Problems of section parity for each op.

A new op, or a new shape of one, is one entry of `PROBLEMS`. Results are pairs: the array with an axis of rows, and the
arrays that all rows share (a pool); either may be None.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check import dense, states
from jaxinfer.gpu_check.attention import (
    DECODE_LENGTHS,
    EVERY,
    EXTEND_LENGTHS,
    PREFILL_LENGTHS,
    PREFILL_TREE,
    TREE_LENGTHS,
    attention_problem,
    mla_problem,
)
from jaxinfer.gpu_check.problem import BF16, FP8, FP16, INT8, MOSAIC, UP_TO_HOPPER, XLA, Operands, Problem, host, named
from pallas_kernels.choice import ADA, AMPERE, HOPPER
from pallas_kernels.token_quant import Rule
from pallas_kernels.token_quant import reference as token_quant


def _write(
    quick: bool, *, chunk: int, pool_dtype: Any, scales: str | None, rotary: int, interleaved: bool = False
) -> Operands:
    """Build chunks: one mid-page, one with its second page out of range, one of padding. Other slots: NaN or 127."""
    page, kv_heads, heads, head_dim = (16, 2, 4, 64) if quick else (64, 8, 32, 128)
    rng, pages = np.random.default_rng(0), 6
    shape = (pages, 2, kv_heads, page, head_dim)
    where = np.array([[4, 1], [2, pages], [-1, pages]], np.int32)[:, : 1 + (chunk > 1)]
    offsets = np.array([page - 2, page - 3, 0], np.int32)
    k, v = (rng.normal(size=(3, chunk, kv_heads, head_dim)) * 3 for _ in range(2))
    for x in (k, v):
        x[2], x[1, 3:] = np.nan, np.nan
    angles = rng.uniform(-3, 3, (3, chunk, rotary // 2)).astype(np.float32)
    arrays: dict[str, Any] = {"pool": np.full(shape, 127 if pool_dtype == INT8 else np.nan).astype(pool_dtype)}
    arrays |= {"k": k.astype(BF16), "v": v.astype(BF16), "pages": where, "offsets": offsets}
    arrays |= {"rope": (np.cos(angles), np.sin(angles)), "q": rng.normal(size=(3, chunk, heads, head_dim)).astype(BF16)}
    if scales is not None:
        factors = np.full(shape[: 3 + (scales == "token")], np.nan, np.float32)
        if scales == "head":
            factors[[4, 1, 2]] = rng.uniform(0.02, 0.08, (3, *shape[1:3]))
        arrays["scales"] = factors
    options = {"interleaved": interleaved}
    with jax.enable_x64(True):
        exact = named("pallas_kernels.kv_write.reference:write")
        written = exact(**jax.tree.map(jnp.asarray, arrays), **options, dtype=jnp.float64)
        return Operands(arrays, options, host(_written(written)))


def _written(out: Any) -> tuple[Any, Any]:
    return out.q, (out.pool,) if out.scales is None else (out.pool, out.scales)


def _write_problem(name: str, bound: float, **shape: Any) -> Problem:
    module = "pallas_kernels.kv_write"
    return Problem(
        "kv_write",
        name,
        {MOSAIC: f"{module}.mosaic:write", XLA: f"{module}.xla:write"},
        functools.partial(_write, **shape),
        ("k", "v", "pages", "offsets", "rope", "q"),
        bound,
        result=_written,
        built_for=(ADA if shape["pool_dtype"] == FP8 else AMPERE, HOPPER),
    )


def _copy(quick: bool, *, rows: bool, dtype: Any) -> Operands:
    """Build page ids with a cycle (a page that is both source and target), and targets that are out of range."""
    shape = (9, 2, 2, 16, 64) if quick else (9, 2, 8, 64, 128)
    rng = np.random.default_rng(0)
    numbers = rng.integers(-100, 100, shape).astype(dtype)
    pool = (numbers, rng.normal(size=shape[:4]).astype(np.float32)) if dtype == INT8 else (numbers,)
    if rows:
        sources = {"source_pages": [1, 1, 2, 3], "source_slots": [3, 4, 5, 0]}
        ids = {**sources, "target_pages": [1, 1, shape[0], 2], "target_slots": [4, 3, 0, shape[3]]}
    else:
        ids = {"source": [2, 8, 7, 7], "target": [8, 2, shape[0], -1]}
    arrays = {"pool": pool, **{name: np.asarray(x, np.int32) for name, x in ids.items()}}
    op = named(f"pallas_kernels.kv_copy.reference:{'move_rows' if rows else 'copy_pages'}")
    return Operands(arrays, {}, (None, host(op(**jax.tree.map(jnp.asarray, arrays)))))


def _copy_problem(function: str, dtype: Any) -> Problem:
    module, rows = "pallas_kernels.kv_copy", function == "move_rows"
    return Problem(
        f"kv_copy.{function}",
        jnp.dtype(dtype).name,
        {MOSAIC: f"{module}.mosaic:{function}", XLA: f"{module}.xla:{function}"},
        functools.partial(_copy, rows=rows, dtype=dtype),
        ("source_pages", "source_slots", "target_pages", "target_slots", "source", "target"),
        0.0,
        result=lambda out: (None, out),
        built_for=UP_TO_HOPPER,
    )


def _product(quick: bool, *, rows: int, dtype: Any, group: int | None, zeros: bool) -> Operands:
    inputs, channels = (256, 128) if quick else (4096, 1024)
    rng = np.random.default_rng(0)
    factors = (channels,) if group is None else (inputs // group, channels)
    numbers = rng.normal(size=(inputs, channels)) if dtype == FP8 else rng.integers(-8, 8, (inputs, channels))
    counted = rng.integers(-8, 8, factors) if zeros else None
    scales = jnp.asarray(rng.uniform(0.5, 1.5, factors), jnp.float32 if group is None else BF16)
    stored = named("pallas_kernels.quant_matmul.reference:pack")(
        jnp.asarray(numbers, jnp.float32).astype(dtype), scales, counted, dtype=dtype
    )
    arrays = {"x": rng.normal(size=(rows, inputs)).astype(BF16), "weights": stored.weights, "scales": stored.scales}
    arrays = host(arrays | ({"zeros": stored.zeros} if zeros else {}))
    with jax.enable_x64(True):
        exact = named("pallas_kernels.quant_matmul.reference:matmul")
        return Operands(arrays, {}, (host(exact(**jax.tree.map(jnp.asarray, arrays), dtype=jnp.float64)), None))


def _product_problem(rows: int, dtype: Any, group: int | None, *, zeros: bool = False) -> Problem:
    module = "pallas_kernels.quant_matmul"
    kind = f"groups of {group}" if group else "a scale a channel"
    return Problem(
        "quant_matmul",
        f"{rows} rows, {jnp.dtype(dtype).name}, {kind}{', zeros' * zeros}",
        {MOSAIC: f"{module}.mosaic.launch:matmul", XLA: f"{module}.xla:matmul"},
        functools.partial(_product, rows=rows, dtype=dtype, group=group, zeros=zeros),
        ("x",),
        1e-3,
        {"consumers": 2, "depth": 128, "stages": 2},
    )


def _experts(quick: bool, *, rows: int, dtype: Any) -> Operands:
    """Build rows of which most have one expert and some have none. One expert has no row: its weights are NaN."""
    count, channels, inputs = (4, 128, 128) if quick else (8, 2048, 1024)
    rows = min(rows, 64) if quick else rows
    rng = np.random.default_rng(0)
    owners = rng.choice(np.arange(1, count + 1), rows, p=[0.6, *[0.4 / (count - 1)] * (count - 1)])
    weights = rng.normal(size=(count, channels, inputs)).astype(dtype)
    weights[0] = np.nan
    x = rng.normal(size=(rows, inputs)).astype(dtype)
    arrays = {"x": x, "weights": weights, "experts": owners.astype(np.int32)}
    exact = np.zeros((rows, channels))
    for expert in range(1, count):
        routed = owners == expert
        exact[routed] = x[routed].astype(np.float64) @ weights[expert].astype(np.float64).T
    return Operands(arrays, {}, (exact, None))


def _experts_problem(rows: int, dtype: Any) -> Problem:
    module = "jaxinfer.gpu_check.experts"
    return Problem(
        "grouped_matmul",
        f"{rows} rows, {jnp.dtype(dtype).name}",
        {MOSAIC: f"{module}:mosaic", XLA: f"{module}:xla"},
        functools.partial(_experts, rows=rows, dtype=dtype),
        ("x", "experts"),
        1e-3 if dtype == BF16 else 2.5e-4,
        {"consumers": 2, "depth": 64, "stages": 2, "blocks": 3},
    )


def _stored_experts(quick: bool, *, rows: int, inputs: int) -> Operands:
    """Build rows with MXFP4 experts; an expert without a row has NaN scales."""
    count, channels, inputs = (4, 64, 160) if quick else (8, 2880, inputs)
    rows, rng = min(rows, 64) if quick else rows, np.random.default_rng(0)
    owners = rng.integers(1, count, rows)
    places = rng.integers(-7, 8, (count, channels, inputs))
    exponents = rng.integers(120, 132, (inputs // 32, count, channels))
    exponents[:, 0] = 255
    x = rng.normal(size=(rows, inputs)).astype(BF16)
    sizes = np.asarray(named("pallas_kernels.quant_matmul.reference:E2M1"))[np.abs(places)] * np.sign(places)
    weights = sizes * np.repeat(np.moveaxis(np.exp2(exponents - 127.0), 0, -1), 32, axis=-1)
    exact = np.zeros((rows, channels))
    for expert in range(1, count):
        exact[owners == expert] = x[owners == expert].astype(np.float64) @ weights[expert].T
    arrays = {"x": x, "weights": host(jnp.asarray(places, jnp.int4)), "experts": owners.astype(np.int32)}
    return Operands({**arrays, "scales": exponents.astype(np.uint8)}, {}, (exact, None))


def _stored_experts_problem(rows: int, inputs: int) -> Problem:
    module = "jaxinfer.gpu_check.experts"
    return Problem(
        "quant_matmul",
        f"{rows} rows, MXFP4 of experts, {inputs} inputs",
        {MOSAIC: f"{module}:mosaic", XLA: f"{module}:xla"},
        functools.partial(_stored_experts, rows=rows, inputs=inputs),
        ("x", "experts"),
        1e-3,
    )


def _adapters(quick: bool, *, rows: int, rank: int, dtype: Any) -> Operands:
    """Build rows of which some have no adapter. One adapter has no row: its matrices are NaN."""
    count, channels, inputs = (4, 64, 128) if quick else (8, 4096, 4096)
    rows = min(rows, 40) if quick else rows
    rng = np.random.default_rng(0)
    slots = rng.choice([-1, *range(1, count)], rows).astype(np.int32)
    x, a, b = (
        (rng.normal(size=dims) / dims[-1] ** 0.5).astype(dtype)
        for dims in ((rows, inputs), (count, rank, inputs), (count, channels, rank))
    )
    a[0], b[0] = np.nan, np.nan
    exact = np.zeros((rows, channels))
    for slot in range(1, count):
        own = slots == slot
        exact[own] = x[own].astype(np.float64) @ a[slot].astype(np.float64).T @ b[slot].astype(np.float64).T
    return Operands({"x": x, "a": a, "b": b, "slots": slots}, {}, (exact, None))


def _tokens(quick: bool, *, rule: Rule) -> Operands:
    """Build tokens of very different magnitudes, and the dequantized result."""
    rng, (rows, inputs) = np.random.default_rng(0), (5, 256) if quick else (70, 14336)
    x = (rng.normal(size=(rows, inputs)) * np.exp2(np.arange(rows) % 9 - 4)[:, None]).astype(BF16)
    return Operands({"x": x}, {"rule": rule}, host(_stood_for(token_quant.quantize(x, rule))))


def _stood_for(out: Any) -> tuple[Any, Any]:
    codes, scales = out
    return codes.astype(np.float32) * scales[:, None], None


def _tokens_problem(dtype: str, most: float, bound: float) -> Problem:
    """Return the problem. ``bound``: a division may be off by one ulp, which changes the code of a tie."""
    module = "pallas_kernels.token_quant"
    return Problem(
        "token_quant",
        f"70 tokens of 14336 to {dtype}",
        {MOSAIC: f"{module}.mosaic:quantize", XLA: f"{module}.xla:quantize"},
        functools.partial(_tokens, rule=Rule(dtype, most)),
        ("x",),
        bound,
        result=_stood_for,
        built_for=(AMPERE if dtype == "int8" else ADA, HOPPER),
    )


def _adapters_problem(rows: int, rank: int, dtype: Any) -> Problem:
    module = "jaxinfer.gpu_check.adapters"
    return Problem(
        "lora",
        f"{rows} rows, rank {rank}, {jnp.dtype(dtype).name}",
        {MOSAIC: f"{module}:mosaic", XLA: f"{module}:xla"},
        functools.partial(_adapters, rows=rows, rank=rank, dtype=dtype),
        ("x", "slots"),
        {BF16: 4e-3, FP16: 5e-4}.get(dtype, 1e-6),
        built_for=UP_TO_HOPPER,
    )


def _states(quick: bool, *, size: int | None, **shape: Any) -> Operands:
    arrays = states.operands(quick, size=size if size is None or not quick else 16, **shape)
    return Operands(arrays, {} if "beta" in arrays else {"beta": None}, states.exact(arrays))


def _states_problem(name: str, size: int | None, dtype: Any, *, delta: bool) -> Problem:
    module, kind = "pallas_kernels.linear_attention", "decode" if size is None else "prefill"
    return Problem(
        f"linear_attention.{kind}",
        f"{name}, {jnp.dtype(dtype).name}",
        {MOSAIC: f"{module}.mosaic.{kind}:{kind}", XLA: f"{module}.xla:{kind}"},
        functools.partial(_states, size=size, dtype=dtype, delta=delta),
        ("q", "k", "v", "decay", "beta", "read", "write"),
        1e-5,
        result=lambda out: out,
        built_for=UP_TO_HOPPER,
    )


# The most informative shapes first: those that the time does not suffice for are skipped at the end. Section parity has
# the first `FIRST` problems, with at least one of each kernel for Hopper GPUs.
FIRST = 20
PROBLEMS: tuple[Problem, ...] = (
    attention_problem(
        "decode", "page 64, 4 heads to a KV head of 128, bfloat16", DECODE_LENGTHS, page=64, head_dim=128
    ),
    attention_problem("prefill", "page 64, 4 heads of 128, bfloat16", PREFILL_LENGTHS, page=64, head_dim=128),
    _write_problem("1 token, rotated", 1e-4, chunk=1, pool_dtype=BF16, scales=None, rotary=64),
    _copy_problem("copy_pages", BF16),
    _copy_problem("move_rows", INT8),
    _product_problem(16, jnp.int4, 128),
    _product_problem(300, jnp.int4, 128, zeros=True),
    _stored_experts_problem(64, 2880),
    dense.problem(70, added=True),
    _experts_problem(64, BF16),
    _tokens_problem("int8", 127.0, 1e-3),
    _adapters_problem(32, 16, BF16),
    mla_problem("decode", 64, 16, 1, BF16),
    _states_problem("delta rule", None, BF16, delta=True),
    _states_problem("delta rule", 64, BF16, delta=True),
    attention_problem("extend", "4 tokens, page 64, 4 heads of 128, bfloat16", EXTEND_LENGTHS, page=64, head_dim=128),
    mla_problem("prefill", 64, 16, 70, BF16),
    mla_problem("extend", 64, 16, 4, BF16),
    attention_problem("decode", "page 16, 8 heads of 64, every option", DECODE_LENGTHS, group=8, **EVERY),
    attention_problem("prefill", "page 16, 4 heads of 64, every option", PREFILL_LENGTHS, **EVERY),
    attention_problem("decode", "int8 per head", DECODE_LENGTHS, page=64, head_dim=128, pool_dtype=INT8, scales="head"),
    attention_problem(
        "decode", "float8 per token", DECODE_LENGTHS, page=64, head_dim=128, pool_dtype=FP8, scales="token"
    ),
    attention_problem(
        "prefill", "float8 per head", PREFILL_LENGTHS, page=64, head_dim=128, pool_dtype=FP8, scales="head"
    ),
    attention_problem(
        "prefill", "int8 per token", PREFILL_LENGTHS, page=64, head_dim=128, pool_dtype=INT8, scales="token"
    ),
    attention_problem("decode", "page 16, float16, head by head", DECODE_LENGTHS, group=1, dtype=FP16),
    attention_problem("extend", "a tree", TREE_LENGTHS, tree=True),
    attention_problem("prefill", "a tree", PREFILL_TREE, tree=True),
    _write_problem("8 tokens, int8 per token", 1e-2, chunk=8, pool_dtype=INT8, scales="token", rotary=32),
    _write_problem("float8 per head, pairs", 5e-2, chunk=1, pool_dtype=FP8, scales="head", rotary=64, interleaved=True),
    _product_problem(64, jnp.int4, 128, zeros=True),
    _product_problem(16, jnp.int8, 128),
    _stored_experts_problem(600, 1440),
    _product_problem(16, FP8, None),
    attention_problem("ampere.decode", "page 64, 4 heads of 128, bfloat16", DECODE_LENGTHS, page=64, head_dim=128),
    attention_problem("ampere.extend", "chunks, 4 heads of 64, every option", PREFILL_LENGTHS, page=32, **EVERY),
    attention_problem("ampere.extend", "a tree", TREE_LENGTHS, page=32, tree=True),
    _experts_problem(1, FP16),
    _experts_problem(600, BF16),
    _adapters_problem(512, 64, BF16),
    _adapters_problem(32, 8, FP16),
    _adapters_problem(32, 24, jnp.float32),
    _states_problem("Mamba-2", None, jnp.float32, delta=False),
    _states_problem("Mamba-2", 32, jnp.float32, delta=False),
    dense.problem(3, layout="in last", gated=True),
    dense.problem(300, FP16, gated=True, added=True),
    dense.problem(20, FP8, layout="in last"),
    dense.problem(200, INT8, layout="in last", gated=True, added=True),
    _tokens_problem("float8_e4m3fn", 448.0, 1e-2),
)
