"""Shapes of paged attention: layers of Llama-3.1-8B, Gemma, gpt-oss and others."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.operands import MOST_SETS, Case, Draw, filled, operand_sets
from pallas_kernels.paged_attention.ampere import launch as ampere
from pallas_kernels.paged_attention.hopper.decode import launch as decoding
from pallas_kernels.paged_attention.hopper.prefill import launch as prefilling
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import KEYS_PER_SPLIT
from pallas_kernels.paged_attention.tile_keys import DECODE, PREFILL, decode_key, prefill_key
from pallas_kernels.specs import ADA, AMPERE, SHORT, Problem, Spec, Tunable, ints, shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attention(Spec):
    """Llama-3.1-8B's heads; the queries are the last tokens of their contexts.

    Attributes:
        scales: "head" or "token" of an 8-bit pool, or "".
        options: fields of `AttentionOptions` that are numbers, and their values.
        pages: pages of the pool; 0: as many as the sequences need.
    """

    context: int = 4096
    chunk: int = 1
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page: int = 64
    dtype: str = "bfloat16"
    pool: str = ""
    scales: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    sinks: int = 0
    tree: int = 0
    pages: int = 0

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """Number of sequences."""

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def name(self) -> str:
        chunk = f"chunk{self.chunk}" if self.chunk > 1 and self.op != PREFILL else ""
        asked = ("tree" * self.tree, *dict(self.options), "sinks" * self.sinks)
        after = "-".join(filter(None, (SHORT[self.pool or self.dtype], self.scales, chunk, *asked)))
        return f"page{self.page}-dim{self.head_dim}-group{self.group}-{after}"

    def arguments(self) -> tuple[Any, ...]:
        count, width = self.count, self.context // self.page
        pool = (self.pages or count * width, 2, self.kv_heads, self.page, self.head_dim)
        rank = {"": 0, "head": 3, "token": 4}[self.scales]
        options = AttentionOptions(
            self.head_dim**-0.5,
            sinks=shaped(self.heads, dtype="float32") if self.sinks else None,
            scales=shaped(*pool[:rank], dtype="float32") if rank else None,
            tree=shaped(count, self.chunk, self.chunk, dtype="bool") if self.tree else None,
            **dict(self.options),
        )
        return (
            shaped(count, self.chunk, self.heads, self.head_dim, dtype=self.dtype),
            shaped(*pool, dtype=self.pool or self.dtype),
            ints(count, width),
            ints(count),
            ints(count),
            options,
        )

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        q, pool, tables, *_, options = self.arguments()
        begun, ends = (filled(self.count, keys) for keys in (self.context - self.chunk, self.context))
        factors = jax.tree.map(lambda each: jnp.full(each.shape, 0.01, each.dtype), options)
        return draw.normal(q), draw.normal(pool), draw.distinct(tables, pool.shape[0]), begun, ends, factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(_Attention):
    """Decode of ``chunk`` tokens in each of ``rows`` sequences."""

    rows: int = 64

    op = DECODE

    @property
    def count(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"decode, {self.rows} rows, {self.context} keys, page {self.page}"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values (read once), queries and results, of 16 bits."""
        return 4 * self.rows * self.head_dim * (self.context * self.kv_heads + self.heads)

    @property
    def kernel(self) -> Callable[..., Any]:
        return decoding.extend

    def problem(self, multiprocessors: int) -> Problem:
        q, pool, tables, starts, lengths, options = self.arguments()
        queries = self.chunk * self.group
        return Problem(
            key=decode_key(q, pool, tables, options),
            heuristic=decoding.heuristic_tiles(self.head_dim, self.page, q.dtype, pool.dtype, queries=queries),
            grid={
                "block_keys": (64, 128),
                "stages": (2, 3, 4, 6, 8),
                "keys_per_split": (KEYS_PER_SPLIT,),
                "blocks": tuple(multiprocessors * waves for waves in (1, 2, 3, 4)),
            },
            refusal=functools.partial(decoding.refusal, (q, pool, tables, starts, lengths), options),
            launch=decoding.extend,
            operands=functools.partial(operand_sets, self.operands, varied=0, count=MOST_SETS),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(_Attention):
    """Prefill of the last ``chunk`` tokens in each of ``sequences`` prompts."""

    context: int = 8192
    chunk: int = 8192
    sequences: int = 1

    op = PREFILL

    @property
    def count(self) -> int:
        return self.sequences

    def __str__(self) -> str:
        return f"prefill, {self.sequences} x {self.chunk} of {self.context} tokens, page {self.page}"

    @property
    def operations(self) -> int:
        """Floating-point operations of both products; masked positions do not count."""
        seen = self.chunk * (self.context - self.chunk) + self.chunk * (self.chunk + 1) // 2
        return 4 * self.sequences * self.heads * self.head_dim * seen

    @property
    def kernel(self) -> Callable[..., Any]:
        return prefilling.prefill

    def problem(self, _: int) -> Problem:
        """Return the problem for any number of multiprocessors: a CTA has one tile."""
        q, pool, tables, starts, lengths, options = self.arguments()
        return Problem(
            key=prefill_key(q, pool, tables, options),
            heuristic=prefilling.heuristic_tiles(
                group=self.group, head_dim=self.head_dim, tree=bool(self.tree), quantized=bool(self.scales)
            ),
            grid={
                "block_keys": (64, 128),
                "stages": (2, 3, 4, 5, 6),
                "heads": (1, 2, 4, 8, 16),
                "keys_per_split": (KEYS_PER_SPLIT,),
            },
            refusal=functools.partial(prefilling.refusal, (q, pool, tables, starts, lengths), options),
            launch=prefilling.prefill,
            operands=functools.partial(operand_sets, self.operands, varied=0, count=2),  # a launch is long enough
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ampere(Decode):
    """Decode and prefill below Hopper."""

    op = "paged_attention.ampere"
    targets = (AMPERE, ADA)

    @property
    def kernel(self) -> Callable[..., Any]:
        return self._attend

    def _attend(self, q: Any, pool: Any, tables: Any, starts: Any, lengths: Any, options: AttentionOptions) -> Any:
        if self.chunk == 1:
            return ampere.decode(q[:, 0], pool, tables, lengths, options)
        return ampere.extend(q, pool, tables, starts, lengths, options)


_CAPPED: dict[str, Any] = {"options": (("window", 1024), ("softcap", 30.0))}
_CAPPED_LONG: dict[str, Any] = {"options": (("window", 4096), ("softcap", 50.0))}
_EVERY: dict[str, Any] = {**_CAPPED, "sinks": 1}
_GEMMA: dict[str, Any] = {"head_dim": 256, "group": 2, **_CAPPED}
_GPT_OSS: dict[str, Any] = {"head_dim": 64, "group": 8, "options": (("window", 128),), "sinks": 1}
_INT8: dict[str, Any] = {"pool": "int8"}
_FP8: dict[str, Any] = {"pool": "float8_e4m3fn"}
_HEAD: dict[str, Any] = {"scales": "head"}
_TOKEN: dict[str, Any] = {"scales": "token"}
_SMALL: dict[str, Any] = {"head_dim": 64, "group": 8}
_CHUNKS: dict[str, Any] = {"rows": 2, "chunk": 512}

# With JAX 0.11.2 these head_dims take the XLA path (`decode.refusal`).
_CLIPPED: tuple[dict[str, Any], ...] = (
    {"page": 16, "head_dim": 80, "group": 1},
    {"page": 64, "head_dim": 96, "group": 1},
    {"page": 64, "head_dim": 80, "group": 1, **_INT8, **_HEAD},
    {"page": 32, "head_dim": 96, "group": 1, **_FP8, **_TOKEN},
)
_DECODE: tuple[dict[str, Any], ...] = (
    {"page": 16},
    {},
    {"group": 7},
    {"page": 128, "group": 8},
    {"page": 32, "group": 16},
    {**_SMALL, "dtype": "float16"},
    {"head_dim": 256, "group": 2, **_CAPPED_LONG},
    _GPT_OSS,
    {**_INT8, **_HEAD},
    {"page": 16, **_FP8, **_HEAD},
    {**_FP8, **_TOKEN},
    {"page": 16, **_INT8, **_TOKEN},
    {"chunk": 4},
    {"chunk": 16},
    {"chunk": 8, "tree": 1},
    *(_CLIPPED if compat.CLIPPED_STORES else ()),
)
_PREFILL: tuple[dict[str, Any], ...] = (
    {"page": 16},
    {},
    {"group": 7},
    {"page": 128, "group": 8},
    {**_SMALL, "dtype": "float16"},
    {"page": 16, "head_dim": 80, "group": 1},
    {"page": 32, "head_dim": 96, "group": 1},
    {"head_dim": 256, "group": 2},
    _EVERY,
    _GEMMA,
    {"chunk": 128, "tree": 1, "options": (("window", 1024),)},
    {**_INT8, **_HEAD},
    {"page": 16, **_INT8, **_TOKEN, **_EVERY},
    {"group": 8, **_FP8, **_HEAD},
    {**_INT8, **_TOKEN, **_GEMMA},
    {"page": 16, "head_dim": 256, "group": 8, **_FP8, **_TOKEN},
    {**_SMALL, "chunk": 64, **_FP8, **_TOKEN, "tree": 1},
)
_BELOW_HOPPER: tuple[dict[str, Any], ...] = (
    {},
    {"page": 16},
    {"page": 128, "group": 8},
    {"group": 7},
    {"group": 16},
    {"page": 32, "group": 32},
    {**_SMALL, "dtype": "float16"},
    {"page": 32, "head_dim": 64, "group": 1},
    _GPT_OSS,
    {"group": 2, **_CAPPED_LONG},
    {"chunk": 4},
    {"chunk": 8, "tree": 1},
    _CHUNKS,
    {"page": 16, "group": 7, "dtype": "float16", **_CHUNKS},
    {"page": 32, **_SMALL, **_CHUNKS},
    {"group": 1, **_CHUNKS, **_EVERY},
)
SHIPPED = (
    *(Ampere(pages=256, **shape) for shape in _BELOW_HOPPER),
    *(Decode(pages=256, **shape) for shape in _DECODE),
    *(Prefill(**{"pages": 256, "sequences": 4, "chunk": 2048, **shape}) for shape in _PREFILL),
)
_WIDE: dict[str, Any] = {"head_dim": 256, "kv_heads": 4, "group": 2}
_CONTINUED: dict[str, Any] = {"sequences": 4, "chunk": 512, "context": 4096}
TUNED = (
    Tunable(
        kernel=DECODE,
        bits=frozenset({"block_keys"}),  # of 8-bit pools; the keys of a split are fixed, as prefill shares them
        shapes=(
            Decode(),
            Decode(rows=8),
            Decode(rows=1),
            Decode(rows=256, context=2048),
            Decode(page=16),
            Decode(page=16, rows=8),
            Decode(page=16, rows=256, context=2048),
            Decode(head_dim=64),
            Decode(**_WIDE),
            Decode(**_INT8, **_TOKEN),
            Decode(**_FP8, **_HEAD),
        ),
        problem=Decode.problem,
    ),
    Tunable(
        kernel=PREFILL,
        bits=frozenset({"block_keys"}),
        shapes=(
            Prefill(),
            Prefill(**_CONTINUED),
            Prefill(chunk=2048, context=2048),
            Prefill(page=16),
            Prefill(page=16, **_CONTINUED),
            Prefill(head_dim=64),
            Prefill(**_WIDE),
            Prefill(**_INT8, **_TOKEN),
            Prefill(**_WIDE, **_FP8, **_TOKEN),
            Prefill(**_FP8, **_HEAD),
        ),
        problem=Prefill.problem,
    ),
)


# Operands of a trial. Where the XLA path would need much memory (256 rows of 131,072 keys), it gets a subset. Pools of
# latents are those of `mla_attention`, whose options have some of the fields of `AttentionOptions`.
_TRIED_KEYS = 2048  # keys of the longest row, and before a chunk
_COMPARED_QUERIES = 64  # at a chunk's beginning and end
_COMPARED_ROWS = 4
_TRIED_PAGES = 256  # pages that rows read: they may share them


def trial_case(draw: Draw, *operands: Any) -> Case:
    return (_trial_decode if len(operands) == 5 else _trial_prefill)(draw, *operands)


def _trial_decode(draw: Draw, q: Any, pool: Any, tables: Any, lengths: Any, options: Any) -> Case:
    page, pages = _page_of(pool), min(_TRIED_PAGES, pool.shape[0])
    width = max(1, min(tables.shape[1], _TRIED_KEYS // page))
    rows, count = min(_COMPARED_ROWS, q.shape[0]), lengths.shape[0]
    arrays = draw.normal(q), draw.normal(pool, first=pages), draw.integers(tables, 0, pages)
    filled = draw.integers(lengths, 1, width * page + 1).at[0].set(width * page)
    given = _options(draw, options, pool, pages)
    if getattr(options, "chosen", None) is not None:
        first = jnp.arange(options.chosen.shape[1], dtype=jnp.int32)
        given = _replaced(given, chosen=jnp.broadcast_to(first, (count, first.size)))
    part = _replaced(given, chosen=given.chosen[:rows]) if getattr(given, "chosen", None) is not None else given
    plain = arrays[0][:rows], arrays[1], arrays[2][:rows, :width], filled[:rows], part
    return Case((*arrays, filled, given), {}, plain, lambda out: out[:rows])


def _trial_prefill(draw: Draw, q: Any, pool: Any, tables: Any, starts: Any, lengths: Any, options: Any) -> Case:
    """Make full chunks, of which the first and the last queries of the first sequence are compared."""
    (sequences, chunk), page, pages = q.shape[:2], _page_of(pool), min(_TRIED_PAGES, pool.shape[0])
    room = tables.shape[1] * page
    begun, count = min(_TRIED_KEYS, max(0, room - chunk)), min(chunk, room)
    some, width = min(_COMPARED_QUERIES, count), -(-(begun + count) // page)
    arrays = draw.normal(q), draw.normal(pool, first=pages), draw.integers(tables, 0, pages)
    first, ends = jnp.full((sequences,), begun, jnp.int32), jnp.full((sequences,), begun + count, jnp.int32)
    given = _options(draw, options, pool, pages)
    whole, part = given, given
    if getattr(options, "tree", None) is not None:  # a chain: each token sees all before it
        whole = _replaced(given, tree=jnp.broadcast_to(jnp.tril(jnp.ones((chunk, chunk), bool)), options.tree.shape))
        part = _replaced(given, tree=None)
    if getattr(options, "chosen", None) is not None:
        whole = _replaced(given, chosen=jnp.ones(options.chosen.shape, bool))
        part = _replaced(given, chosen=None)
    at = jnp.array([begun, begun + count - some], jnp.int32)
    table = jnp.broadcast_to(arrays[2][:1, :width], (2, width))
    plain = jnp.stack([arrays[0][0, :some], arrays[0][0, count - some : count]]), arrays[1], table, at, at + some, part

    def select(out: Any) -> Any:
        return jnp.stack([out[0, :some], out[0, count - some : count]])

    return Case((*arrays, first, ends, whole), {}, plain, select)


def _page_of(pool: Any) -> int:
    """Return the tokens of a page, in a pool of keys and values or of latents."""
    return int(pool.shape[3] if len(pool.shape) == 5 else pool.shape[1])


def _options(draw: Draw, options: Any, pool: Any, pages: int) -> Any:
    scales = draw.pool_scales(options.scales, pool, pages)
    sinks = draw.normal(getattr(options, "sinks", None))
    return _replaced(options, scales=scales, **({} if sinks is None else {"sinks": sinks}))


def _replaced(options: Any, **changes: Any) -> Any:
    return type(options)(**{**{name: getattr(options, name) for name in options.__dataclass_fields__}, **changes})
