"""Pages that leave the device and come back: preempted sequences, and cached prefixes that were evicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Shaped, UInt8

from jaxinfer.kv.pool import LayerPool
from jaxinfer.parallel.processes import from_own_part, own_part, own_shape
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels import kv_copy

TRANSFER_PAGES = 4
"""Pages that one call of the export and restore programs moves: few, as a single page costs as much."""

COPIES = 8
"""Pages that one call of the copy program takes."""


_SCALE = np.dtype(np.float32)


def moved_pages(spec: CacheSpec, count: int, page_size: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Shape and dtype of ``count`` exported pages, ``[count, layers, *page]``, of a model in ``dtype``.

    Quantised pages are one array of bytes: the elements of a head of a token are followed by the bytes of its scale,
    the elements of a latent by the bytes of its two.

    Layers of unlike shapes are one layer that has as many heads as can be dealt out of all of them; what each head of
    a token has in the layers stands side by side.
    """
    kind = jnp.dtype(jnp.uint8) if spec.dtype else jnp.dtype(dtype)
    pages = [_packed_page(spec, page_size, layer) for layer in spec.attending or (LayerSpec(),)]
    if (heads := _common_heads(spec)) is None:
        return jax.ShapeDtypeStruct((count, len(spec.attending), *pages[0]), kind)
    wide = sum(math.prod(page) for page in pages) // (2 * heads * page_size)
    return jax.ShapeDtypeStruct((count, 1, 2, heads, page_size, wide), kind)


def _packed_page(spec: CacheSpec, page_size: int, layer: LayerSpec) -> tuple[int, ...]:
    *page, last = spec.pool_shape(1, page_size, layer=layer)[1:]
    scales = math.prod(spec.scales_shape(1, page_size, layer=layer)) // math.prod(page)
    return (*page, last + scales * _SCALE.itemsize)


def _common_heads(spec: CacheSpec) -> int | None:
    """The most heads of which each layer has a multiple; None: all layers are alike."""
    sizes = {spec.sizes(layer) for layer in spec.attending}
    return math.gcd(*(heads for heads, _ in sizes)) if len(sizes) > 1 else None


def export_pages(
    spec: CacheSpec, pools: list[LayerPool], source: Int[Array, "groups pages"]
) -> Shaped[Array, "pages layers *page"]:
    """Gather pages of all layers that attend, by each group's ids, page after page; see `moved_pages`."""
    layers = [_packed(pool, source[spec.group(layer)]) for pool, layer in zip(pools, spec.attending, strict=True)]
    if not layers:  # a stage whose layers have states alone
        none = moved_pages(spec, source.shape[1], spec.page_size, jnp.dtype(jnp.float32))
        return jnp.zeros(none.shape, none.dtype)
    if (heads := _common_heads(spec)) is None:
        return jnp.stack(layers, 1)
    return jnp.concatenate([_with_heads(layer, heads) for layer in layers], -1)[:, None]


def _with_heads(pages: Shaped[Array, "pages 2 kv_heads slots _"], heads: int) -> Shaped[Array, "pages 2 heads slots _"]:
    """Neighbouring heads beside each other in one."""
    count, parts, kv_heads, slots, wide = pages.shape
    apart = pages.reshape(count, parts, heads, kv_heads // heads, slots, wide)
    return jnp.moveaxis(apart, 3, 4).reshape(count, parts, heads, slots, -1)


def _packed(pool: LayerPool, ids: Int[Array, " pages"]) -> Shaped[Array, "pages *page"]:
    taken = kv_copy.gather_pages(pool, ids)
    if taken.scales is None:
        return taken.data
    parts, rows = (taken.data, taken.scales), taken.data.shape[:-1]
    return jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint8).reshape(*rows, -1) for x in parts], -1)


def import_pages(
    spec: CacheSpec,
    pools: list[LayerPool],
    pages: Shaped[Array, "pages layers *page"],
    target: Int[Array, "groups pages"],
) -> list[LayerPool]:
    """Write exported pages (`export_pages`) into other pages; a target beyond the pool is dropped."""

    packed = zip(pools, spec.attending, _by_layer(spec, pages), strict=True)
    return [
        kv_copy.scatter_pages(pool, target[spec.group(layer)], _unpacked(pool, each)) for pool, layer, each in packed
    ]


def _by_layer(spec: CacheSpec, pages: Shaped[Array, "pages layers *page"]) -> list[jax.Array]:
    """The pages of each layer as `_packed` made them."""
    if (heads := _common_heads(spec)) is None:
        return [pages[:, layer] for layer in range(len(spec.attending))]
    count, _, parts, _, slots, _ = pages.shape
    found, at = [], 0
    for layer in spec.attending:
        _, kv_heads, _, wide = _packed_page(spec, slots, layer)
        part = pages[:, 0, ..., at : (at := at + kv_heads // heads * wide)]
        apart = part.reshape(count, parts, heads, slots, kv_heads // heads, wide)
        found.append(jnp.moveaxis(apart, 4, 3).reshape(count, parts, kv_heads, slots, wide))
    return found


def _unpacked(pool: LayerPool, pages: Shaped[Array, "pages *page"]) -> LayerPool:
    if pool.scales is None:
        return LayerPool(pages)
    data, scales = jnp.split(pages, [pool.data.shape[-1]], -1)
    scales = scales.reshape(pages.shape[0], *pool.scales.shape[1:], _SCALE.itemsize)
    return LayerPool(
        lax.bitcast_convert_type(data, pool.data.dtype), lax.bitcast_convert_type(scales, pool.scales.dtype)
    )


def slot_bytes(pages: Shaped[np.ndarray, "pages layers *page"]) -> UInt8[np.ndarray, "pages slots bytes"]:
    """View exported pages (`export_pages`) by token: the bytes of each slot of a page in all layers."""
    by_slot = np.ascontiguousarray(np.moveaxis(pages, -2, 1))
    return by_slot.view(np.uint8).reshape(*by_slot.shape[:2], -1)


class _Arriving(NamedTuple):
    """A page in transfer: entry ``place`` of an array that the device fills."""

    array: jax.Array
    place: int


class HostPages:
    """Host memory for pages of all layers. Memory is taken page by page, when a page is first used, and kept.

    Pages from the device arrive later: `put` does not wait, `settle` and `take` do. Where several processes share
    the pools, each keeps its devices' shard of a page.

    Args:
        dtype: the model's.
        sharding: of the arrays passed to `put`; None: on one device.
    """

    def __init__(
        self,
        spec: CacheSpec,
        host_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        sharding: NamedSharding | None = None,
    ) -> None:
        whole = moved_pages(spec, 1, page_size, dtype)
        self._whole = whole.shape[1:]
        self._shape = self._whole if sharding is None else own_shape(sharding, (1, *self._whole))[1:]
        self._total, self._dtype, self._sharding = host_pages, np.dtype(whole.dtype), sharding
        self._pages: dict[int, np.ndarray] = {}
        self._arriving: dict[int, _Arriving] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return len(self._pages) * math.prod(self._shape) * self._dtype.itemsize

    def put(self, pages: Sequence[int], array: Shaped[Array, "pages layers *page"]) -> None:
        """Copy ``array[i]`` to host page ``pages[i]`` in the background; earlier bytes of that page are void.

        Raises:
            IndexError: a page is beyond ``host_pages``.
        """
        for place, page in enumerate(pages):
            if not 0 <= page < self._total:
                raise IndexError(f"host page {page} of {self._total}")
            self._arriving[page] = _Arriving(array, place)
        array.copy_to_host_async()

    def settle(self, pages: Sequence[int]) -> None:
        """Wait for these pages and release the device's copy."""
        parts: dict[int, np.ndarray] = {}  # of arrays, which several pages share
        for page in pages:
            if (arriving := self._arriving.pop(page, None)) is not None:
                if page not in self._pages:
                    self._pages[page] = np.empty(self._shape, self._dtype)
                array, place = arriving
                if id(array) not in parts:
                    parts[id(array)] = own_part(array)
                self._pages[page][...] = parts[id(array)][place]

    def take(self, pages: Sequence[int], room: int) -> Shaped[np.ndarray | Array, "room layers *page"]:
        """Copy these pages into an array of ``room`` entries; further entries are arbitrary. The array is on the host,
        or on the devices where several processes share the pools.

        Raises:
            KeyError: nothing was ever put into a page.
        """
        self.settle(pages)
        taken = np.empty((room, *self._shape), self._dtype)
        for index, page in enumerate(pages):
            taken[index] = self._pages[page]
        return taken if self._sharding is None else from_own_part(taken, self._sharding, (room, *self._whole))
