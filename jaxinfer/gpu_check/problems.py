"""Problems of section parity for each op: operands with poison, the exact result, the paths that must give it.

A further op, or a further shape of one, is one entry of `PROBLEMS`. Results are pairs: what belongs to the rows of a
batch, one after the other, and what belongs to all of them (a pool); either may be None.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check import states
from pallas_kernels.check.cases import attention_case
from pallas_kernels.mla_attention import LatentOptions
from pallas_kernels.paged_attention import AttentionOptions

BF16, FP16, INT8, FP8 = jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn
MOSAIC, XLA = "mosaic", "xla"


class Operands(NamedTuple):
    """Operands of one call, on the host, by the names of the op's arguments.

    Attributes:
        arrays: arrays, and trees of them.
        options: what is no array.
        exact: the result in float64.
        counts: which numbers of the rows' result mean something; None: all.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]
    exact: tuple[Any, Any]
    counts: np.ndarray | None = None


class Problem(NamedTuple):
    """An op at one shape.

    Attributes:
        paths: module and function of each path, imported when it runs: one that is not there is reported.
        build: the operands; ``quick``: tiny ones.
        by_row: the arguments with an axis of rows, the first.
        bound: of the relative error beyond rounding, see `measure.deviation`.
        tiles: what an interpreted kernel is given, so that it has little to do; None: what the kernel takes by itself.
        result: makes the pair out of what the op returns.
        call: makes a function of `Operands` out of a path.
    """

    op: str
    name: str
    paths: Mapping[str, str]
    build: Callable[[bool], Operands]
    by_row: tuple[str, ...]
    bound: float
    tiles: dict[str, int] | None = None
    result: Callable[[Any], tuple[Any, Any]] = lambda out: (out, None)
    call: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"

    def function(self, path: str) -> Callable[..., Any]:
        """Raises ImportError or AttributeError where it is not there."""
        return self.call(_named(self.paths[path]))

    def interpreted_tiles(self) -> dict[str, Any]:
        """Arguments of the kernel beside its operands where it is interpreted."""
        if self.tiles is None:
            return {}
        return {"tiles": _named(self.paths[MOSAIC].split(":")[0] + ":Tiles")(**self.tiles)}


def _named(name: str) -> Any:
    """Import "module:attribute" when it is needed: an op that is broken does not stop the others."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _attention(quick: bool, *, small: Mapping[str, Any], large: Mapping[str, Any], **shape: Any) -> Operands:
    case = attention_case(**(small if quick else large), **shape)
    names = ("q", "pool", "tables") + (("starts",) if case.starts is not None else ()) + ("lengths",)
    arrays = dict(zip(names, host(case.arrays), strict=True))
    asked = case.options
    given = {"sinks": asked.sinks, "scales": asked.scales, "tree": asked.tree}
    arrays |= {name: host(array) for name, array in given.items() if array is not None}
    options = {"options": dataclasses.replace(asked, sinks=None, scales=None, tree=None)}
    counts = None
    if case.starts is not None:
        counts = case.starts[:, None] + np.arange(case.q.shape[1]) < case.lengths[:, None]
    return Operands(arrays, options, (case.expected(), None), counts)


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the arrays of its `AttentionOptions` beside them, by name, as `Operands` has them."""

    def call(*, options: AttentionOptions, sinks: Any = None, scales: Any = None, tree: Any = None, **rest: Any) -> Any:
        return function(**rest, options=dataclasses.replace(options, sinks=sinks, scales=scales, tree=tree))

    return call


_DECODE_LENGTHS = {"small": {"lengths": (37, 0, 20)}, "large": {"lengths": (2000, 0, 1, 64, 1025, 777)}}
_EXTEND_LENGTHS = {
    "small": {"lengths": (37, 4), "counts": (3, 2), "chunk": 4},
    "large": {"lengths": (2000, 4, 65, 1025), "counts": (4, 4, 1, 3), "chunk": 4},
}
_PREFILL_LENGTHS = {
    "small": {"lengths": (70, 0), "counts": (20, 0), "chunk": 32},
    "large": {"lengths": (1500, 0, 1, 700, 513), "counts": (500, 0, 1, 512, 513), "chunk": 513},
}
_TREE_LENGTHS = {**_EXTEND_LENGTHS, "large": {"lengths": (900, 30, 70), "counts": (16, 16, 9), "chunk": 16}}
_PREFILL_TREE = {
    "small": _PREFILL_LENGTHS["small"],
    "large": {"lengths": (900, 64), "counts": (64, 64), "chunk": 64},
}
_ATTENTION = "pallas_kernels.paged_attention"
_KERNELS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "decode": (
        {MOSAIC: f"{_ATTENTION}.hopper.decode.launch:decode", XLA: f"{_ATTENTION}.xla:decode"},
        {"stages": 2, "keys_per_split": 64, "blocks": 3},
    ),
    "extend": (
        {MOSAIC: f"{_ATTENTION}.hopper.decode.launch:extend", XLA: f"{_ATTENTION}.xla:prefill"},
        {"stages": 2, "keys_per_split": 64, "blocks": 3},
    ),
    "prefill": (
        {MOSAIC: f"{_ATTENTION}.hopper.prefill.launch:prefill", XLA: f"{_ATTENTION}.xla:prefill"},
        {"block_keys": 64, "stages": 2, "heads": 4},
    ),
    # For GPUs below Hopper, which has their instructions, too.
    "ampere.decode": (
        {MOSAIC: f"{_ATTENTION}.ampere.launch:decode", XLA: f"{_ATTENTION}.xla:decode"},
        {"stages": 2, "keys_per_split": 64},
    ),
    "ampere.extend": (
        {MOSAIC: f"{_ATTENTION}.ampere.launch:extend", XLA: f"{_ATTENTION}.xla:prefill"},
        {"stages": 2, "keys_per_split": 64},
    ),
}
_EVERY: dict[str, Any] = {"window": 300, "softcap": 20.0, "sinks": True}


def _attention_problem(kind: str, name: str, lengths: Mapping[str, Any], **shape: Any) -> Problem:
    paths, tiles = _KERNELS[kind]
    small = shape.get("pool_dtype") is not None
    return Problem(
        f"paged_attention.{kind}",
        name,
        paths,
        functools.partial(_attention, **lengths, **shape),
        ("q", "tables", "starts", "lengths", "tree"),
        2e-2 if small else 2.5e-4 if shape.get("dtype") == FP16 else 1e-3,
        tiles,
        call=_with_options,
    )


def _mla(quick: bool, *, page: int, heads: int, chunk: int, dtype: Any) -> Operands:
    """Latents behind a row's last token are NaN, and so are pages that nobody has; table entries there are wild."""
    lengths = np.asarray((37, 0) if quick else (2000, 0, 1, 64, 1025), np.int32)
    rng, rank, rope = np.random.default_rng(0), 128 if quick else 512, 64
    width = -(-int(lengths.max()) // page)
    tables = rng.permutation(len(lengths) * width).astype(np.int32).reshape(len(lengths), width)
    pool = np.full((tables.size, page, rank + rope), np.nan, np.float32)
    for table, length in zip(tables, lengths, strict=True):
        latents = rng.normal(size=(width * page, rank + rope))
        latents[length:] = np.nan
        pool[table] = latents.reshape(width, page, -1)
        table[-(-int(length) // page) :] = rng.choice([-7, 10**6])
    counts = np.minimum(lengths, chunk)
    queries = (len(lengths), heads) if chunk == 1 else (len(lengths), chunk, heads)
    arrays = {"q": rng.normal(size=(*queries, rank + rope)).astype(dtype), "pool": pool.astype(dtype), "tables": tables}
    arrays |= {"lengths": lengths} if chunk == 1 else {"starts": lengths - counts, "lengths": lengths}
    options = {"options": LatentOptions(192**-0.5, rank)}
    with jax.enable_x64(True):
        path = _named(f"pallas_kernels.mla_attention.reference:{'decode' if chunk == 1 else 'prefill'}")
        exact = jax.jit(functools.partial(path, **options, dtype=jnp.float64))(**jax.tree.map(jnp.asarray, arrays))
        return Operands(
            arrays, options, (np.asarray(exact), None), None if chunk == 1 else np.arange(chunk) < counts[:, None]
        )


def _mla_problem(kind: str, page: int, heads: int, chunk: int, dtype: Any) -> Problem:
    module = "pallas_kernels.mla_attention"
    return Problem(
        f"mla_attention.{kind}",
        f"page {page}, {heads} heads, {chunk} queries, {jnp.dtype(dtype).name}",
        {
            MOSAIC: f"{module}.mosaic.attention:{kind}",
            XLA: f"{module}.xla:{'decode' if kind == 'decode' else 'prefill'}",
        },
        functools.partial(_mla, page=page, heads=heads, chunk=chunk, dtype=dtype),
        ("q", "tables", "starts", "lengths"),
        1e-3 if dtype == BF16 else 2.5e-4,
        {"keys_per_split": 128, "blocks": 3},
    )


def _write(
    quick: bool, *, chunk: int, pool_dtype: Any, scales: str | None, rotary: int, interleaved: bool = False
) -> Operands:
    """Chunks: one in mid-page, one whose second page is out of range, one of padding. What stays is NaN or 127."""
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
        exact = _named("pallas_kernels.kv_write.reference:write")
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
    )


def _copy(quick: bool, *, rows: bool, dtype: Any) -> Operands:
    """A cycle (what is both source and target), and targets that are out of range."""
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
    op = _named(f"pallas_kernels.kv_copy.reference:{'move_rows' if rows else 'copy_pages'}")
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
    )


def _product(quick: bool, *, rows: int, dtype: Any, group: int | None, zeros: bool) -> Operands:
    inputs, channels = (256, 128) if quick else (4096, 1024)
    rng = np.random.default_rng(0)
    factors = (channels,) if group is None else (inputs // group, channels)
    numbers = rng.normal(size=(inputs, channels)) if dtype == FP8 else rng.integers(-8, 8, (inputs, channels))
    counted = rng.integers(-8, 8, factors) if zeros else None
    scales = jnp.asarray(rng.uniform(0.5, 1.5, factors), jnp.float32 if group is None else BF16)
    stored = _named("pallas_kernels.quant_matmul.reference:pack")(
        jnp.asarray(numbers, jnp.float32).astype(dtype), scales, counted, dtype=dtype
    )
    arrays = {"x": rng.normal(size=(rows, inputs)).astype(BF16), "weights": stored.weights, "scales": stored.scales}
    arrays = host(arrays | ({"zeros": stored.zeros} if zeros else {}))
    with jax.enable_x64(True):
        exact = _named("pallas_kernels.quant_matmul.reference:matmul")
        return Operands(arrays, {}, (host(exact(**jax.tree.map(jnp.asarray, arrays), dtype=jnp.float64)), None))


def _product_problem(rows: int, dtype: Any, group: int | None, *, zeros: bool = False) -> Problem:
    module = "pallas_kernels.quant_matmul"
    kind = f"groups of {group}" if group else "a scale a channel"
    return Problem(
        "quant_matmul",
        f"{rows} rows, {jnp.dtype(dtype).name}, {kind}{', zeros' * zeros}",
        {MOSAIC: f"{module}.mosaic:matmul", XLA: f"{module}.xla:matmul"},
        functools.partial(_product, rows=rows, dtype=dtype, group=group, zeros=zeros),
        ("x",),
        1e-3,
        {"consumers": 2, "depth": 128, "stages": 2},
    )


def _experts(quick: bool, *, rows: int, dtype: Any) -> Operands:
    """Most rows have one expert, some have none, and one expert has no row: its weights are NaN."""
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


def _adapters(quick: bool, *, rows: int, rank: int, dtype: Any) -> Operands:
    """Some rows have no adapter, and one adapter has no row: its matrices are NaN."""
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


def _adapters_problem(rows: int, rank: int, dtype: Any) -> Problem:
    module = "jaxinfer.gpu_check.adapters"
    return Problem(
        "lora",
        f"{rows} rows, rank {rank}, {jnp.dtype(dtype).name}",
        {MOSAIC: f"{module}:mosaic", XLA: f"{module}:xla"},
        functools.partial(_adapters, rows=rows, rank=rank, dtype=dtype),
        ("x", "slots"),
        {BF16: 4e-3, FP16: 5e-4}.get(dtype, 1e-6),
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
    )


# The most telling shape of each op first, then the others: what the time does not suffice for is left out at the end.
PROBLEMS: tuple[Problem, ...] = (
    _attention_problem(
        "decode", "page 64, 4 heads to a KV head of 128, bfloat16", _DECODE_LENGTHS, page=64, head_dim=128
    ),
    _attention_problem("prefill", "page 64, 4 heads of 128, bfloat16", _PREFILL_LENGTHS, page=64, head_dim=128),
    _write_problem("1 token, rotated", 1e-4, chunk=1, pool_dtype=BF16, scales=None, rotary=64),
    _copy_problem("copy_pages", BF16),
    _copy_problem("move_rows", INT8),
    _product_problem(16, jnp.int4, 128),
    _experts_problem(64, BF16),
    _adapters_problem(32, 16, BF16),
    _mla_problem("decode", 64, 16, 1, BF16),
    _states_problem("delta rule", None, BF16, delta=True),
    _states_problem("delta rule", 64, BF16, delta=True),
    _attention_problem("extend", "4 tokens, page 64, 4 heads of 128, bfloat16", _EXTEND_LENGTHS, page=64, head_dim=128),
    _mla_problem("prefill", 64, 16, 70, BF16),
    _mla_problem("extend", 64, 16, 4, BF16),
    _attention_problem("decode", "page 16, 8 heads of 64, every option", _DECODE_LENGTHS, group=8, **_EVERY),
    _attention_problem("prefill", "page 16, 4 heads of 64, every option", _PREFILL_LENGTHS, **_EVERY),
    _attention_problem(
        "decode", "int8 per head", _DECODE_LENGTHS, page=64, head_dim=128, pool_dtype=INT8, scales="head"
    ),
    _attention_problem(
        "decode", "float8 per token", _DECODE_LENGTHS, page=64, head_dim=128, pool_dtype=FP8, scales="token"
    ),
    _attention_problem(
        "prefill", "float8 per head", _PREFILL_LENGTHS, page=64, head_dim=128, pool_dtype=FP8, scales="head"
    ),
    _attention_problem(
        "prefill", "int8 per token", _PREFILL_LENGTHS, page=64, head_dim=128, pool_dtype=INT8, scales="token"
    ),
    _attention_problem("decode", "page 16, float16, head by head", _DECODE_LENGTHS, group=1, dtype=FP16),
    _attention_problem("extend", "a tree", _TREE_LENGTHS, tree=True),
    _attention_problem("prefill", "a tree", _PREFILL_TREE, tree=True),
    _write_problem("8 tokens, int8 per token", 1e-2, chunk=8, pool_dtype=INT8, scales="token", rotary=32),
    _write_problem("float8 per head, pairs", 1e-2, chunk=1, pool_dtype=FP8, scales="head", rotary=64, interleaved=True),
    _product_problem(64, jnp.int4, 128, zeros=True),
    _product_problem(16, jnp.int8, 128),
    _product_problem(16, FP8, None),
    _attention_problem("ampere.decode", "page 64, 4 heads of 128, bfloat16", _DECODE_LENGTHS, page=64, head_dim=128),
    _attention_problem("ampere.extend", "chunks, 4 heads of 64, every option", _PREFILL_LENGTHS, page=32, **_EVERY),
    _attention_problem("ampere.extend", "a tree", _TREE_LENGTHS, page=32, tree=True),
    _experts_problem(1, FP16),
    _experts_problem(600, BF16),
    _adapters_problem(512, 64, BF16),
    _adapters_problem(32, 8, FP16),
    _adapters_problem(32, 24, jnp.float32),
    _states_problem("Mamba-2", None, jnp.float32, delta=False),
    _states_problem("Mamba-2", 32, jnp.float32, delta=False),
)
