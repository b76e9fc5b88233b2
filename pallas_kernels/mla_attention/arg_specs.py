"""Shapes of MLA: layers of DeepSeek-V2 and V3."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.mla_attention.mosaic import attention
from pallas_kernels.mla_attention.options import RANK, LatentOptions
from pallas_kernels.mla_attention.tile_keys import DECODE, decode_key
from pallas_kernels.operands import MOST_SETS, Case, Draw, filled, operand_sets
from pallas_kernels.paged_attention.arg_specs import trial_case as paged_case
from pallas_kernels.specs import SHORT, Problem, Spec, Tunable, ints, shaped

_LATENT = RANK + 64  # with its rotated numbers
_OPTIONS = LatentOptions(192**-0.5)


@dataclasses.dataclass(frozen=True)
class Latents(Spec):
    """DeepSeek-V3's heads on one device; every sequence has ``context`` keys.

    Attributes:
        entry: name of the kernel's function.
        pages: pages of the pool; 0: as many as the sequences need.
    """

    sequences: int = 64
    context: int = 4096
    chunk: int = 1
    heads: int = 128
    page: int = 64
    dtype: str = "bfloat16"
    entry: str = "extend"
    pages: int = 0

    def __str__(self) -> str:
        return f"MLA decode, {self.sequences} rows, {self.context} keys, {self.heads} heads, page {self.page}"

    @property
    def bytes(self) -> int:
        """Bytes of latents (read once), queries and results, of 16 bits."""
        return 2 * self.sequences * (self.context * _LATENT + self.heads * (_LATENT + RANK))

    @property
    def op(self) -> str:
        return f"mla_attention.{self.entry}"

    @property
    def name(self) -> str:
        sizes = f"page{self.page}-heads{self.heads}-chunk{self.chunk}-context{self.context}"
        return f"{sizes}-{SHORT[self.dtype]}"

    @property
    def kernel(self) -> Callable[..., Any]:
        return functools.partial(getattr(attention, self.entry), options=_OPTIONS)

    def arguments(self) -> tuple[Any, ...]:
        decodes, width, each = self.entry == "decode", self.context // self.page, ints(self.sequences)
        queries = (self.sequences, self.heads) if decodes else (self.sequences, self.chunk, self.heads)
        return (
            shaped(*queries, _LATENT, dtype=self.dtype),
            shaped(self.pages or self.sequences * width, self.page, _LATENT, dtype=self.dtype),
            ints(self.sequences, width),
            *([each] if decodes else [each, each]),
        )

    def problem(self, multiprocessors: int) -> Problem:
        arguments = self.arguments()
        return Problem(
            key=decode_key(*arguments[:3]),
            heuristic=attention.heuristic_tiles(self.heads),
            grid={
                "keys_per_split": (256, 512, 1024, 2048, 4096, 8192),
                "blocks": (multiprocessors, 2 * multiprocessors),
            },
            refusal=lambda _: attention.refusal(arguments, _OPTIONS),
            launch=self.kernel,
            operands=functools.partial(operand_sets, self.operands, varied=0, count=MOST_SETS),
        )

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        q, pool, tables, *_ = self.arguments()
        begun, ends = (filled(self.sequences, count) for count in (self.context - self.chunk, self.context))
        return draw.normal(q), draw.normal(pool), draw.distinct(tables, pool.shape[0]), begun, ends


_checked = functools.partial(Latents, pages=256)
SHIPPED = (
    *(_checked(page=page, heads=heads, entry="decode") for page in (16, 64) for heads in (16, 128)),
    _checked(page=32, heads=8, entry="decode"),
    _checked(page=128, heads=32, dtype="float16", entry="decode"),
    _checked(heads=16, context=512, entry="decode"),  # one split: no merge
    _checked(heads=16, chunk=4),
    _checked(chunk=2),
    _checked(heads=16, chunk=1024, sequences=2, entry="prefill"),
    _checked(chunk=1024, sequences=2, entry="prefill"),
    _checked(page=16, heads=24, chunk=256, sequences=2, entry="prefill"),
)
TUNED = (
    Tunable(
        kernel=DECODE,
        bits=frozenset({"keys_per_split"}),
        shapes=(
            Latents(),
            Latents(sequences=1),
            Latents(sequences=128),
            Latents(heads=16),
            Latents(heads=16, sequences=1),
            Latents(heads=32),
            Latents(heads=16, page=16),
        ),
        problem=Latents.problem,
    ),
)


def trial_case(draw: Draw, *operands: Any) -> Case:
    return paged_case(draw, *operands)
