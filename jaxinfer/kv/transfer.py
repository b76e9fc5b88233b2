"""Transfer of pages between device and host: preempted sequences, and evicted pages of cached prefixes.

A host page is an array in page-locked host memory. Copies to and from it are operations of a compiled program: they run
in the order of the calls and do not block the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt8

from jaxinfer.kv.pool import LayerPool
from jaxinfer.parallel.arrays import array_bytes
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels import kv_copy

TRANSFERS = (4, 1)
"""Pages moved by one call of an export or restore program: one program per size. The larger size shares the launches of
a call; size 1, used by most evictions, moves no surplus bytes."""

COPIES = 8
"""Pages that one call of the copy program takes."""


_SCALE = np.dtype(np.float32)


def moved_pages(spec: CacheSpec, count: int, page_size: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of ``count`` exported pages, ``[count, layers, *page]``, of a model in ``dtype``.

    Quantised pages are one array of bytes: the elements of a head of a token are followed by the bytes of its scale,
    the elements of a latent by the bytes of its two scales.

    Layers of different shapes are packed as one layer whose number of heads divides that of each layer; the data of all
    layers are concatenated within each head of a token.
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
    """Return the greatest number of heads that divides that of each layer; None: all layers have the same shape."""
    sizes = {spec.sizes(layer) for layer in spec.attending}
    return math.gcd(*(heads for heads, _ in sizes)) if len(sizes) > 1 else None


def export_pages(
    spec: CacheSpec, pools: list[LayerPool], source: Int[Array, "groups pages"]
) -> tuple[Shaped[Array, "1 layers *page"], ...]:
    """Gather pages of all layers that attend, by the ids of each group, one array per page; see `moved_pages`."""
    pages = _gathered(spec, pools, source)
    return tuple(pages[at : at + 1] for at in range(source.shape[1]))


def _gathered(
    spec: CacheSpec, pools: list[LayerPool], source: Int[Array, "groups pages"]
) -> Shaped[Array, "pages layers *page"]:
    layers = [_packed(pool, source[spec.group(layer)]) for pool, layer in zip(pools, spec.attending, strict=True)]
    if not layers:  # a pipeline stage whose layers only have states
        none = moved_pages(spec, source.shape[1], spec.page_size, jnp.dtype(jnp.float32))
        return jnp.zeros(none.shape, none.dtype)
    if (heads := _common_heads(spec)) is None:
        return jnp.stack(layers, 1)
    return jnp.concatenate([_with_heads(layer, heads) for layer in layers], -1)[:, None]


def _with_heads(pages: Shaped[Array, "pages 2 kv_heads slots _"], heads: int) -> Shaped[Array, "pages 2 heads slots _"]:
    """Concatenate neighbouring heads so that ``heads`` remain."""
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
    pages: Sequence[Shaped[Array, "1 layers *page"]],
    target: Int[Array, "groups pages"],
) -> list[LayerPool]:
    """Write exported pages (`export_pages`), in any memory, to other pages; a target beyond the pool is dropped."""
    arrived = jnp.concatenate([jax.device_put(page, jax.memory.Space.Device) for page in pages])
    packed = zip(pools, spec.attending, _by_layer(spec, arrived), strict=True)
    return [
        kv_copy.scatter_pages(pool, target[spec.group(layer)], _unpacked(pool, each)) for pool, layer, each in packed
    ]


def _by_layer(spec: CacheSpec, pages: Shaped[Array, "pages layers *page"]) -> list[jax.Array]:
    """Split exported pages into the pages of each layer, as `_packed` made them."""
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


def transfers[Move](moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Split moves into batches of the sizes in `TRANSFERS`, one batch per call."""
    at = 0
    for size in TRANSFERS:
        while at + size <= len(moves):
            yield moves[at : (at := at + size)]


class HostPages:
    """Contents of the host pages: at most one array of `export_pages` per page.

    The array of a page is kept until the next one replaces it. Its memory is free again when no launched operation
    reads it any more: the runtime's allocator reuses it for the next page.
    """

    def __init__(self, host_pages: int) -> None:
        self._total = host_pages
        self._pages: dict[int, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all contents, as far as this process has them. From any thread."""
        pages = list(self._pages.values())
        shards = ((page.sharding.shard_shape(page.shape), page) for page in pages)
        return sum(array_bytes(shape, page.dtype) * len(page.sharding.addressable_devices) for shape, page in shards)

    def release(self, pages: Sequence[int]) -> None:
        """Drop the contents of these pages before they are replaced, so that the new bytes may reuse their memory.

        Raises:
            IndexError: a page is beyond ``host_pages``.
        """
        for page in pages:
            if not 0 <= page < self._total:
                raise IndexError(f"host page {page} of {self._total}")
            self._pages.pop(page, None)

    def put(self, pages: Sequence[int], arrays: Sequence[Shaped[Array, "1 layers *page"]]) -> None:
        """Keep ``arrays[i]`` as host page ``pages[i]``. Does not block: the arrays may still be in transfer.

        Raises:
            IndexError: see `release`.
        """
        self.release(pages)
        self._pages.update(zip(pages, arrays, strict=True))

    def take(self, pages: Sequence[int]) -> tuple[Shaped[Array, "1 layers *page"], ...]:
        """Return the arrays of these pages.

        Raises:
            KeyError: nothing was ever put into a page.
        """
        return tuple(self._pages[page] for page in pages)
