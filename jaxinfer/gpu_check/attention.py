"""Parity problems of paged attention and of MLA.

Kernels round probabilities to 16 bits before they multiply values by them. Probabilities are relative to an integer
power of two: the float64 reference can round likewise (`pallas_kernels.paged_attention.reference.attend`). Only the
order of float32 sums still differs. On an H100 (2026-11-22) the error of decode and extend against exact results
equalled that of this model in all recorded digits; since then Hopper kernels also round scores (`hopper.softmax`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check.problem import BELOW_HOPPER, BF16, FP16, MOSAIC, XLA, Operands, Problem, host, named
from pallas_kernels.check.cases import attention_case
from pallas_kernels.choice import HOPPER
from pallas_kernels.mla_attention import LatentOptions
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.hopper.softmax import GRID


def _attention(
    quick: bool,
    *,
    modelled: bool,
    grid: float | None,
    small: Mapping[str, Any],
    large: Mapping[str, Any],
    **shape: Any,
) -> Operands:
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
    own = (case.expected(case.q.dtype, grid), None) if modelled else None
    return Operands(arrays, options, (case.expected(), None), counts, own)


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it takes the arrays of its `AttentionOptions` by keyword, as `Operands` stores them."""

    def call(*, options: AttentionOptions, sinks: Any = None, scales: Any = None, tree: Any = None, **rest: Any) -> Any:
        return function(**rest, options=dataclasses.replace(options, sinks=sinks, scales=scales, tree=tree))

    return call


DECODE_LENGTHS = {"small": {"lengths": (37, 0, 20)}, "large": {"lengths": (2000, 0, 1, 64, 1025, 777)}}
EXTEND_LENGTHS = {
    "small": {"lengths": (37, 4), "counts": (3, 2), "chunk": 4},
    "large": {"lengths": (2000, 4, 65, 1025), "counts": (4, 4, 1, 3), "chunk": 4},
}
PREFILL_LENGTHS = {
    "small": {"lengths": (70, 0), "counts": (20, 0), "chunk": 32},
    "large": {"lengths": (1500, 0, 1, 700, 513), "counts": (500, 0, 1, 512, 513), "chunk": 513},
}
TREE_LENGTHS = {**EXTEND_LENGTHS, "large": {"lengths": (900, 30, 70), "counts": (16, 16, 9), "chunk": 16}}
PREFILL_TREE = {
    "small": PREFILL_LENGTHS["small"],
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
    # For GPUs below Hopper; Hopper also has the instructions of these kernels.
    "ampere.decode": (
        {MOSAIC: f"{_ATTENTION}.ampere.launch:decode", XLA: f"{_ATTENTION}.xla:decode"},
        {"stages": 2, "keys_per_split": 64},
    ),
    "ampere.extend": (
        {MOSAIC: f"{_ATTENTION}.ampere.launch:extend", XLA: f"{_ATTENTION}.xla:prefill"},
        {"stages": 2, "keys_per_split": 64},
    ),
}
EVERY: dict[str, Any] = {"window": 300, "softcap": 20.0, "sinks": True}


def attention_problem(kind: str, name: str, lengths: Mapping[str, Any], **shape: Any) -> Problem:
    paths, tiles = _KERNELS[kind]
    # Prefill of wide heads sums probabilities before rounding them (`hopper.prefill.types.Shape.like_decode`).
    modelled = shape.get("pool_dtype") is None and (kind != "prefill" or shape.get("head_dim", 64) <= 128)
    below_hopper = kind.startswith("ampere")
    return Problem(
        f"paged_attention.{kind}",
        name,
        paths,
        functools.partial(_attention, modelled=modelled, grid=None if below_hopper else GRID, **lengths, **shape),
        ("q", "tables", "starts", "lengths", "tree"),
        _attention_bound(shape, modelled),
        tiles,
        call=_with_options,
        built_for=BELOW_HOPPER if below_hopper else (HOPPER, HOPPER),
    )


def _attention_bound(shape: Mapping[str, Any], modelled: bool) -> float:
    """Return the error bound of a head's result. A missing key of 2,000 costs 2e-2, a wrong scale or page more."""
    if shape.get("pool_dtype") is not None:
        return 6e-3
    return (2.5e-4 if shape.get("dtype") == FP16 else 1e-3) * (0.5 if modelled else 2.5)


def _mla(quick: bool, *, page: int, heads: int, chunk: int, dtype: Any) -> Operands:
    """Build operands with NaN latents after a row's last token and in unowned pages, and invalid table entries."""
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
    path = named(f"pallas_kernels.mla_attention.reference:{'decode' if chunk == 1 else 'prefill'}")
    with jax.enable_x64(True):
        exact, modelled = (
            np.asarray(
                jax.jit(functools.partial(path, **options, dtype=jnp.float64, weights_dtype=rounded))(
                    **jax.tree.map(jnp.asarray, arrays)
                )
            )
            for rounded in (None, dtype)
        )
    padding = None if chunk == 1 else np.arange(chunk) < counts[:, None]
    return Operands(arrays, options, (exact, None), padding, (modelled, None))


def mla_problem(kind: str, page: int, heads: int, chunk: int, dtype: Any) -> Problem:
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
        5e-4 if dtype == BF16 else 1.25e-4,
        {"keys_per_split": 128, "blocks": 3},
    )
