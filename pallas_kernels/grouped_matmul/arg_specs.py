"""Shapes of grouped products: experts of Mixtral, DeepSeek, Qwen3 and gpt-oss."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import mosaic
from pallas_kernels.grouped_matmul.groups import Groups, group
from pallas_kernels.grouped_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.operands import Case, Draw, operand_sets, sets_beyond_cache
from pallas_kernels.specs import SHORT, Problem, Spec, Tunable, ints, shaped

TRIED_EXPERTS = 4  # experts of a trial


def product(
    x: Float[Array, "tiles rows k"],
    weights: Float[Array, "experts n k"],
    experts: Int[Array, " tiles"],
    occupied: Int[Array, ""],
    *,
    tiles: mosaic.Tiles | None = None,
) -> Float[Array, "tiles rows n"]:
    """Run the kernel on the operands that it reads."""
    return mosaic.matmul(x, weights, unfilled(x, experts, occupied), tiles=tiles)


def unfilled(x: Any, experts: Any, occupied: Any) -> Groups:
    """Return groups without entries, which a product does not read."""
    nothing = jnp.zeros(x.shape[:2], jnp.int32)
    return Groups(nothing, nothing.reshape(-1), experts, occupied)


@dataclasses.dataclass(frozen=True)
class Product(Spec):
    """A product of ``tiles`` of ``rows`` rows with an expert each."""

    tiles: int
    rows: int
    experts: int
    channels: int
    inputs: int
    dtype: str = "bfloat16"

    op = "grouped_matmul"
    kernel = staticmethod(product)

    @property
    def name(self) -> str:
        sizes = f"{self.experts}x{self.channels}x{self.inputs}-{self.tiles}x{self.rows}rows"
        return f"{sizes}-{SHORT[self.dtype]}"

    def arguments(self) -> tuple[Any, ...]:
        return (
            shaped(self.tiles, self.rows, self.inputs, dtype=self.dtype),
            shaped(self.experts, self.channels, self.inputs, dtype=self.dtype),
            ints(self.tiles),
            ints(),
        )


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A product of a layer of ``experts``, with ``top_k`` experts for each of ``tokens`` tokens."""

    tokens: int = 64
    experts: int = 8
    top_k: int = 2
    channels: int = 28672
    inputs: int = 4096
    dtype: str = "bfloat16"

    stored = ""

    def __str__(self) -> str:
        chosen = f"{self.top_k} of {self.experts} experts{self.stored}"
        return f"grouped matmul, {self.tokens} tokens with {chosen}, {self.inputs} x {self.channels}"

    @property
    def entries(self) -> int:
        return self.tokens * self.top_k

    @property
    def rows(self) -> int:
        """Rows of each active expert."""
        return -(-self.entries // self.experts)

    @property
    def operations(self) -> int:
        return 2 * self.entries * self.inputs * self.channels

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of active experts, of 16 bits."""
        return 2 * min(self.experts, self.entries) * self.inputs * self.channels

    @property
    def bytes(self) -> int:
        """Bytes of the weights of active experts (read once), and of each entry's row and result."""
        return self.weight_bytes + 2 * self.entries * (self.inputs + self.channels)

    def owners(self) -> Int[Array, " entries"]:
        """Route the entries evenly to all experts."""
        return jnp.arange(self.entries, dtype=jnp.int32) % self.experts

    def groups(self) -> Groups:
        return group(self.owners(), self.experts, self.tokens, path="mosaic")

    def product(self) -> Product:
        tiles, rows = jax.eval_shape(self.groups).entries.shape
        return Product(tiles, rows, self.experts, self.channels, self.inputs, self.dtype)

    def problem(self, multiprocessors: int) -> Problem:
        x, weights, *_ = self.product().arguments()
        return Problem(
            key=matmul_key(x, weights),
            heuristic=mosaic.heuristic_tiles(x, weights, multiprocessors=multiprocessors),
            grid={
                "consumers": mosaic.CONSUMERS,
                "depth": (64, 128),
                "stages": (2, 3, 4, 6, 8),
                "blocks": (multiprocessors, 2 * multiprocessors),
            },
            refusal=lambda tiles: mosaic.refusal(x, weights, tiles=tiles),
            launch=product,
            operands=functools.partial(operand_sets, self._tiled, 1, sets_beyond_cache(2 * weights.size)),
        )

    def _tiled(self, draw: Draw) -> tuple[Any, ...]:
        x, weights, *_ = self.product().arguments()
        groups = self.groups()
        return draw.normal(x), draw.normal(weights), groups.experts, groups.occupied

    def operands(self, draw: Draw) -> tuple[Any, ...]:
        """Draw the row of each entry, the weights, and the expert of each entry."""
        x = shaped(self.entries, self.inputs, dtype=self.dtype)
        weights = shaped(self.experts, self.channels, self.inputs, dtype=self.dtype)
        return draw.normal(x), draw.normal(weights), self.owners()


SHIPPED = (
    # Mixtral-8x7B: gate with up, and down; decode of 1 and 64 tokens, prefill of 512.
    Product(2, 8, 8, 28672, 4096),
    Product(2, 8, 8, 4096, 14336),
    Product(11, 32, 8, 28672, 4096),
    Product(11, 32, 8, 4096, 14336),
    Product(15, 128, 8, 28672, 4096),
    Product(15, 128, 8, 4096, 14336),
    Product(15, 128, 8, 28672, 4096, dtype="float16"),
    # DeepSeek-V2 and a shard of it, Qwen3-30B-A3B, gpt-oss-20b.
    Product(205, 64, 160, 3072, 5120),
    Product(43, 128, 20, 5120, 1536),
    Product(152, 16, 128, 1536, 2048),
    Product(152, 16, 128, 2048, 768),
    Product(44, 32, 32, 5760, 2880),
    Product(44, 32, 32, 2880, 2880),
)
TUNED = (
    Tunable(
        kernel=MATMUL,
        bits=frozenset(),
        shapes=(
            # Mixtral-8x7B: gate with up, down; decode of 64 tokens, prefill of 512, decode of one.
            *(
                Mixture(tokens=tokens, channels=channels, inputs=inputs)
                for tokens in (64, 512, 1)
                for channels, inputs in ((28672, 4096), (4096, 14336))
            ),
            # Qwen3-30B-A3B.
            Mixture(experts=128, top_k=8, channels=1536, inputs=2048),
            Mixture(experts=128, top_k=8, channels=2048, inputs=768),
        ),
        problem=Mixture.problem,
    ),
)


def trial_case(draw: Draw, x: Any, weights: Any, groups: Any) -> Case:
    experts = min(TRIED_EXPERTS, weights.shape[0])
    return Case(
        (draw.normal(x), draw.normal(weights, weights.shape[-1] ** -0.5, experts), trial_groups(draw, groups, experts))
    )


def trial_groups(draw: Draw, groups: Groups, experts: int) -> Groups:
    """Order entries, one per row; about half of the tiles are empty if there are more than entries fill."""
    tiles, rows = groups.entries.shape
    entries = groups.places.shape[0]
    places = np.arange(tiles * rows, dtype=np.int32)
    occupied = min(tiles, -(-entries // rows))
    owners = None if groups.experts is None else jnp.sort(draw.integers(groups.experts, 0, experts))
    return Groups(
        entries=jnp.asarray(np.minimum(places, entries).reshape(tiles, rows)),
        places=jnp.asarray(np.minimum(np.arange(entries, dtype=np.int32), tiles * rows)),
        experts=owners,
        occupied=jnp.asarray(occupied, jnp.int32).reshape(groups.occupied.shape),
    )
