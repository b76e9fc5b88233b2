"""A consumer's share of a tile of `prefill`, and numbers in the layout of its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.hopper.prefill.types import WARPGROUP_ROWS, Gmem, Shape, Tile


@dataclasses.dataclass(frozen=True)
class Rows:
    """The share of one consumer in a tile."""

    shape: Shape
    tile: Tile
    warpgroup: Any
    gmem: Gmem

    @property
    def token(self) -> Any:
        """The first row's token within the chunk."""
        apart = self.shape.tokens > WARPGROUP_ROWS
        return self.tile.token + (self.warpgroup * WARPGROUP_ROWS if apart else 0)

    @property
    def head(self) -> Any:
        """The first row's head."""
        apart = self.shape.tokens > WARPGROUP_ROWS
        return self.tile.head + (0 if apart else self.warpgroup * self.shape.part_heads)

    @property
    def zero(self) -> Any:
        """Zero, unknown to the compiler: addresses that contain it are not computed at the kernel's beginning, and do
        not occupy registers until they are needed."""
        return jnp.minimum(self.gmem.lengths[self.tile.sequence], 0)

    def tokens(self) -> Any:
        """Return each row's token within the chunk."""
        return (row_index() & (self.shape.part_tokens - 1)) + self.token


def zeros(columns: int) -> Any:
    return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


def row_index() -> Any:
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def per_row(value: float) -> Any:
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def spread(row_values: Any, columns: int) -> Any:
    return lax.broadcast_in_dim(row_values, (WARPGROUP_ROWS, columns), [0])
