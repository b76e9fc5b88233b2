"""Shapes of linear attention: layers of Qwen3-Next, Mamba-2 and Falcon-H1."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.linear_attention.mosaic import decode, prefill
from pallas_kernels.operands import Case, Draw
from pallas_kernels.specs import EVERYWHERE, SHORT, Spec, ints, shaped

CHUNK = 64  # tokens between two stored states


class Layer(NamedTuple):
    """Heads and sizes of a model's layers. ``delta``: the delta rule, which has beta."""

    name: str
    k_heads: int
    heads: int
    key: int
    value: int
    delta: bool


QWEN, MAMBA = Layer("qwen3-next", 16, 32, 128, 128, True), Layer("mamba-2", 8, 128, 128, 64, False)
SMALL, FALCON = Layer("small", 2, 6, 48, 80, True), Layer("falcon-h1", 1, 24, 256, 64, False)


@dataclasses.dataclass(frozen=True)
class States(Spec):
    """``rows`` sequences that continue from states in a pool; ``tokens`` 0: a decode step. ``values``: dtype of v."""

    layer: Layer
    rows: int
    tokens: int = 0
    dtype: str = "bfloat16"
    values: str = ""

    donated = (5,)
    targets = EVERYWHERE

    def __str__(self) -> str:
        return f"linear attention, {self.rows} x {self.tokens or 1} tokens"

    @property
    def bytes(self) -> int:
        """Bytes of states (read and written once), of 16-bit inputs and of 32-bit results."""
        layer, tokens = self.layer, self.tokens or 1
        token = 2 * (2 * layer.k_heads * layer.key + layer.heads * layer.value) + 4 * layer.heads * layer.value
        return self.rows * (8 * layer.heads * layer.key * layer.value + tokens * token)

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        return trial_case(draw, *self.arguments()).operands

    @property
    def op(self) -> str:
        return f"linear_attention.{self.kernel.__name__}"

    @property
    def name(self) -> str:
        size = f"{self.rows}x{self.tokens}" if self.tokens else f"{self.rows}"
        return f"{self.layer.name}-{size}-{SHORT[self.dtype]}" + (f"-{SHORT[self.values]}" if self.values else "")

    @property
    def kernel(self) -> Callable[..., Any]:
        return prefill.prefill if self.tokens else decode.decode

    def arguments(self) -> tuple[Any, ...]:
        lead, layer = (self.rows, self.tokens) if self.tokens else (self.rows,), self.layer
        queries = shaped(*lead, layer.k_heads, layer.key, dtype=self.dtype)
        values = shaped(*lead, layer.heads, layer.value, dtype=self.values or self.dtype)
        gate = shaped(*lead, layer.heads, dtype="float32")
        pool = shaped(256, layer.heads, layer.key, layer.value, dtype="float32")
        read = ints(self.rows)
        write = ints(self.rows, self.tokens // CHUNK) if self.tokens else read
        return queries, queries, values, gate, gate if layer.delta else None, pool, read, write


SHIPPED = (
    States(QWEN, 64),
    States(QWEN, 64, dtype="float32"),
    States(MAMBA, 64, values="float32"),
    States(FALCON, 1, dtype="float32"),
    States(SMALL, 1, dtype="float16"),
    States(QWEN, 1, 1024),
    States(QWEN, 1, 1024, dtype="float32"),
    States(QWEN, 8, 256),
    States(QWEN, 8, 256, dtype="float32"),
    States(MAMBA, 1, 512, values="float32"),
    States(MAMBA, 4, 512, values="float32"),
    States(FALCON, 4, 512),
)


def trial_case(draw: Draw, q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, read: Any, write: Any) -> Case:
    """Give each sequence its own state; of a chunked prompt the last chunk's is kept."""
    count = read.shape[0] + 1
    own = draw.distinct(read, count)
    kept = own if len(write.shape) == 1 else jnp.full(write.shape, count, jnp.int32).at[:, -1].set(own)
    rows = draw.normal(q), draw.normal(k, k.shape[-1] ** -0.5), draw.normal(v)
    gates = draw.uniform(decay, -1.0, -0.01), draw.uniform(beta, 0.1, 0.9)
    return Case((*rows, *gates, draw.normal(pool, first=count), own, kept))
