"""Device side of the KV cache: one array per layer, donated to every step, and its reads and writes in a step.

Where heads are sharded over devices, attention and page copies run in `jax.shard_map`, over the mesh that the program
is traced for: each device works on its own heads, in its own pool. XLA's partitioner cannot partition kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from jaxinfer.kv.states import Pieces, Recurrence, StateRows, keep_accepted, run_pieces, run_rows
from jaxinfer.parallel.mesh import RULES, pool_spec, traced_size
from jaxinfer.types import NO_STATE, STATE, CacheSpec, LayerSpec, StateSpec
from pallas_kernels import bits, kv_copy, kv_write, mla_attention, paged_attention, token_index
from pallas_kernels.choice import HOPPER, Target, Wish
from pallas_kernels.mla_attention import LatentOptions
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.token_index import Index

Options = AttentionOptions | LatentOptions
Rope = tuple[jax.Array, jax.Array]

_AXES = RULES["kv_heads"]
_REPLICATED, _HEADS = PartitionSpec(), PartitionSpec(None, _AXES)
_SPAN = 64
"""Maximum tokens per chunk of a recurrence: a chunk is computed as one matrix."""


class LayerPool(NamedTuple):
    """Keys and values of one layer, or its latents with their index keys; see `stored` for their dtype.

    ``scales`` are the factors of 8-bit elements, applied when they are read. Pools of other dtypes have None rather
    than an empty array: the host pays for every array that a program takes. Each scale belongs to one head of one
    token, or to one segment of its latent row, and is computed from it alone (`pallas_kernels.kv_write.reference`). So
    the stored numbers of a token do not depend on its chunk, on earlier contents of its page, or on whether it is
    recomputed.
    """

    data: Num[Array, "pages *page"]
    scales: Float[Array, "pages *slots"] | None = None


class StatePool(NamedTuple):
    """States of a layer: one array ``[states, *shape]`` for each of `LayerSpec.states`; and its keys and values (None:
    the layer has none)."""

    states: tuple[Num[Array, "states *shape"], ...]
    pages: LayerPool | None = None


Pool = LayerPool | StatePool


def new_pools(
    spec: CacheSpec,
    pages: int,
    page_size: int,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
    platform: str | None = None,
) -> list[LayerPool]:
    """Make zeroed pools, one per layer that attends: unwritten keys must be finite, since masked keys are multiplied by
    zero.

    Args:
        dtype: the model's dtype.
        sharding: sharding of both elements and scales.
        platform: platform of the devices; None: JAX's default platform.
    """
    kind = stored(spec, dtype, platform or jax.default_backend())

    def zeroed(layer: LayerSpec) -> LayerPool:
        data = jnp.zeros(spec.pool_shape(pages, page_size, layer=layer), kind, device=sharding)
        scales = spec.scales_shape(pages, page_size, layer=layer)
        return LayerPool(data, jnp.zeros(scales, jnp.float32, device=sharding) if spec.dtype else None)

    return [zeroed(layer) for layer in spec.layers if layer.attends]


def with_states(spec: CacheSpec, pools: list[LayerPool], room: Callable[[StateSpec], Any]) -> list[Pool]:
    """Add states to the `new_pools` of a model: returns the caches of all its layers.

    Args:
        room: makes the array ``[states, *shape]`` of one kind.
    """
    pages = iter(pools)

    def made(layer: LayerSpec) -> Pool:
        own = next(pages) if layer.attends else None
        arrays = tuple(map(room, layer.states))
        return own if own is not None and not arrays else StatePool(arrays, own)

    return [made(layer) for layer in spec.layers]


def pages_of(pools: Sequence[Pool]) -> list[LayerPool]:
    """Return the keys and values of the layers that have any."""
    found = (pool if isinstance(pool, LayerPool) else pool.pages for pool in pools)
    return [pages for pages in found if pages is not None]


def with_pages(pools: Sequence[Pool], pages: Sequence[LayerPool]) -> list[Pool]:
    """Replace the keys and values of the pools, in the order of `pages_of`."""
    new = iter(pages)

    def replaced(pool: Pool) -> Pool:
        if isinstance(pool, LayerPool):
            return next(new)
        return pool if pool.pages is None else pool._replace(pages=next(new))

    return [replaced(pool) for pool in pools]


def stored(spec: CacheSpec, dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Return the dtype of a pool's array for a model in ``dtype``: on a CPU, float8 is stored as uint8, see `bits`."""
    wanted = jnp.dtype(spec.dtype or dtype)
    return jnp.dtype(jnp.uint8) if platform == "cpu" and bits.meant(jnp.uint8) == wanted else wanted


def no_kernel(spec: CacheSpec, page_size: int, dtype: jnp.dtype, target: Target | None = None) -> str | None:
    """Return why the attention kernels do not support such a cache with queries of the same dtype; None: they do.

    Args:
        target: default: a Hopper GPU.
    """
    kinds = dict.fromkeys(dataclasses.replace(layer, window=None, softcap=None, states=()) for layer in spec.attending)
    refusals = [_no_kernel(spec, page_size, dtype, target or Target("gpu", HOPPER), layer) for layer in kinds]
    return next((why for why in refusals if why is not None), None)


def _no_kernel(spec: CacheSpec, page_size: int, dtype: jnp.dtype, target: Target, layer: LayerSpec) -> str | None:
    pool = jax.ShapeDtypeStruct(spec.pool_shape(1, page_size, layer=layer), stored(spec, dtype, "gpu"))
    shape = spec.scales_shape(1, page_size, layer=layer)
    scales = jax.ShapeDtypeStruct(shape, jnp.float32) if spec.dtype else None
    heads, row = spec.sizes(layer)
    q = jax.ShapeDtypeStruct((1, heads, row - layer.index_dim), dtype)
    operands = (q, pool, jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
    if layer.latent_rank is None:
        chosen = paged_attention.explain_decode(*operands, AttentionOptions(1.0, scales=scales), target=target)
    else:
        chosen = mla_attention.explain(*operands, LatentOptions(1.0, layer.latent_rank, scales), target=target)
    return None if chosen.path == "mosaic" else chosen.why


def fuses(cache: LayerPool, qkv: jax.Array, rope: Rope, interleaved: bool, backend: Wish) -> bool:
    """Return whether one kernel rotates and writes the heads of a fused projection of rows.

    Where XLA writes, rotating first is faster, fused with what precedes it. An explicitly requested kernel that cannot
    rotate such heads is not an error: it writes heads that are already rotated.
    """
    one_chunk = jax.ShapeDtypeStruct((1, *qkv.shape), qkv.dtype)
    options: dict[str, Any] = {"rope": rope, "scales": cache.scales, "interleaved": interleaved}
    wish: Wish = "xla" if backend == "xla" else "auto"
    return kv_write.explain_projected(cache.data, one_chunk, **options, path=wish).path == "mosaic"


def _on_shards(function: Callable[..., Any], operands: tuple[Any, ...], results: Any) -> Callable[..., Any]:
    """Map a function over devices by heads: ``operands`` and ``results`` are partition specs. Without a mesh, or with
    one device along the axis, nothing is mapped."""
    if traced_size("kv_heads") == 1:
        return function
    return jax.shard_map(function, in_specs=operands, out_specs=results, check_vma=False)


def _pool(latent: bool) -> Any:
    """Return the partition specs of a layer's pool; latents serve all heads and are replicated."""
    heads: Any = pool_spec(latent)  # elements and scales have the same leading dimensions
    return LayerPool(heads, heads)


class _PagedAttend:
    """Base class of `DecodeAttend` and `PrefillAttend`: write new keys and values, then attend."""

    spec: CacheSpec
    tables: jax.Array
    backend: Wish

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: LayerPool,
        layer: LayerSpec,
        scale: float,
        sinks: jax.Array | None = None,
        chosen: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerPool]:
        """See `Attend`."""

        def run(own: Any, *operands: Any) -> tuple[jax.Array, LayerPool]:
            q, k, v, chosen, cache, sinks = operands
            table = own.tables[own.spec.group(layer)]
            cache = cache if k is None else own._written(own._by_chunk(k), v, cache, table, layer)
            options = _options(cache, layer, scale, sinks, chosen)
            return own._attended(own._by_chunk(q), cache, table, options), cache

        latent = layer.latent_rank is not None
        keys, pool = _REPLICATED if latent else _HEADS, _pool(latent)
        specs = (_REPLICATED, _HEADS, keys, keys, _REPLICATED, pool, PartitionSpec(_AXES))
        attended: tuple[jax.Array, LayerPool] = _on_shards(run, specs, (_HEADS, pool))(
            self, q, k, v, chosen, cache, sinks
        )
        return attended

    def _written(
        self, k: jax.Array, v: jax.Array | None, cache: LayerPool, table: jax.Array, layer: LayerSpec
    ) -> LayerPool:
        places = self._places(table, k.shape[1], cache)
        if v is None:
            return _with_latents(cache, k[:, :, 0], *places, layer)
        written = kv_write.write(cache.data, k, self._by_chunk(v), *places, scales=cache.scales, path=self.backend)
        return LayerPool(written.pool, written.scales)

    def choosing(
        self, q: jax.Array, k: jax.Array, index: Index, cache: LayerPool, layer: LayerSpec, scale: float
    ) -> tuple[jax.Array, jax.Array | None, LayerPool]:
        """See `ChoosingAttend`. Where no sequence exceeds ``index_topk``, index keys are written but never read. Each
        device chooses the keys redundantly, from identical numbers."""

        def run(own: Any, *operands: Any) -> tuple[jax.Array, jax.Array | None, LayerPool]:
            q, k, index, cache = operands
            table, index = own.tables[own.spec.group(layer)], Index(*map(own._by_chunk, index))
            # Written together: XLA would copy a pool that is written, read and written again.
            rows = jnp.concatenate([own._by_chunk(k)[:, :, 0], index.k.astype(k.dtype)], axis=-1)
            pages, offsets = own._places(table, rows.shape[1], cache)
            cache = _with_latents(cache, rows, pages, offsets, layer)
            longest, most = table.shape[1] * cache.data.shape[-2], layer.index_topk
            chosen = None if most is None or longest <= most else own._chosen(index, cache, table, most)
            mixed = own._attended(own._by_chunk(q), cache, table, _options(cache, layer, scale, None, chosen))
            return mixed, chosen, cache

        specs, results = (_REPLICATED, _HEADS, *[_REPLICATED] * 3), (_HEADS, _REPLICATED, _REPLICATED)
        chosen: tuple[jax.Array, jax.Array | None, LayerPool] = _on_shards(run, specs, results)(
            self, q, k, index, cache
        )
        return chosen

    def fused(
        self,
        qkv: jax.Array,
        rope: Rope,
        interleaved: bool,
        cache: LayerPool,
        layer: LayerSpec,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerPool] | None:
        """See `FusedAttend`."""
        if not fuses(cache, qkv, rope, interleaved, self.backend):
            return None

        def run(own: Any, *operands: Any) -> tuple[jax.Array, LayerPool]:
            qkv, rope, cache, sinks = operands
            qkv, angles, table = own._by_chunk(qkv), tuple(map(own._by_chunk, rope)), own.tables[own.spec.group(layer)]
            pages, offsets = own._places(table, qkv.shape[1], cache)
            options: dict[str, Any] = {"rope": angles, "scales": cache.scales, "interleaved": interleaved}
            written = kv_write.write_projected(cache.data, qkv, pages, offsets, **options, path=own.backend)
            assert written.q is not None
            cache = LayerPool(written.pool, written.scales)
            return own._attended(written.q, cache, table, _options(cache, layer, scale, sinks)), cache

        pool = _pool(latent=False)
        specs = (_REPLICATED, _HEADS, _REPLICATED, pool, PartitionSpec(_AXES))
        attended: tuple[jax.Array, LayerPool] = _on_shards(run, specs, (_HEADS, pool))(self, qkv, rope, cache, sinks)
        return attended

    def recur(self, function: Recurrence, inputs: Any, state: jax.Array) -> tuple[Any, jax.Array]:
        """See `jaxinfer.layers.recurrent.Recur`; ``state`` is a pool ``[states, *shape]``, sharded with its heads."""
        page, (starts, lengths) = self.spec.page_size, self._pieces()
        cut = jax.tree.map(self._by_chunk, inputs)
        time = jax.tree.leaves(cut)[0].shape[1]
        size = min(page, _SPAN, time)
        padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, -time % size), *[(0, 0)] * (x.ndim - 2)]), cut)
        places, borders = self._borders(starts, lengths, time)
        last = np.minimum(borders // size, -(-time // size)) - 1
        pieces = Pieces(lengths, size, self._before(starts), places, last)
        outputs, pool = run_pieces(function, padded, state, pieces, self._recurrent)
        return jax.tree.map(lambda x: x[:, :time].reshape(-1, *x.shape[2:]), outputs), pool

    @property
    def _recurrent(self) -> Wish:
        """Backend of recurrences: kernels run on one device only."""
        return self.backend if traced_size("kv_heads") == 1 else "xla"

    @property
    def _states(self) -> Int[Array, "batch width"]:
        """Page tables of the group of states."""
        return self.tables[self.spec.windows.index(STATE)]

    def _before(self, starts: jax.Array) -> Int[Array, " batch"]:
        """Return the pool indices of the states before the positions ``starts``; `NO_STATE` at position 0."""
        page = jnp.maximum(starts - 1, 0)[:, None] // self.spec.page_size
        return jnp.where(starts > 0, jnp.take_along_axis(self._states, page, axis=1)[:, 0], NO_STATE)

    def _borders(
        self, starts: jax.Array, lengths: jax.Array, time: int
    ) -> tuple[Int[Array, "batch pages"], Int[np.ndarray, " pages"]]:
        """Return the pool indices of the states at the page ends of each chunk, out of range where none is stored, and
        the number of chunk tokens up to each page end. A chunk of several tokens begins at a page boundary."""
        page, width = self.spec.page_size, self._states.shape[1]
        index = np.arange(-(-time // page))
        at = starts[:, None] // page + index
        ids = jnp.take_along_axis(self._states, jnp.minimum(at, width - 1), axis=1)
        return jnp.where(index * page < lengths[:, None], ids, NO_STATE), (index + 1) * page

    def _pieces(self) -> tuple[Int[Array, " batch"], Int[Array, " batch"]]:
        """Return the start position and the number of tokens of each chunk."""
        raise NotImplementedError

    def _by_chunk(self, x: jax.Array) -> jax.Array:
        """Reshape rows to ``[batch, chunk, ...]``."""
        raise NotImplementedError

    def _places(self, table: jax.Array, chunk: int, cache: LayerPool) -> tuple[jax.Array, jax.Array]:
        """Return the pages of each chunk's tokens, out of range where there is none, and the first token's slot."""
        raise NotImplementedError

    def _attended(self, q: jax.Array, cache: LayerPool, table: jax.Array, options: Options) -> jax.Array:
        """Attend with queries by chunk; the results are by row."""
        raise NotImplementedError

    def _chosen(self, index: Index, cache: LayerPool, table: jax.Array, k: int) -> jax.Array:
        """Choose ``k`` keys per query, given the index by chunk, in the format of `LatentOptions.chosen`."""
        raise NotImplementedError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "positions", "owners"],
    meta_fields=["spec", "backend", "turns"],
)
@dataclasses.dataclass(frozen=True)
class DecodeAttend(_PagedAttend):
    """`Attend` for rows of one token each: row r is at ``positions[r]`` of the sequence with ``tables[:, r]``.

    A row at position -1 is padding: it writes nothing and attends to nothing. Rows may be consecutive positions of one
    sequence: all write before any attends.

    ``tables`` has one page table per group of the cache. ``backend`` is `EngineConfig.attention_backend`. ``owners``:
    the slot of each row, where there are states and rows may be fed drafts; ``turns``: see `StateRows`.
    """

    spec: CacheSpec
    tables: Int[Array, "groups rows width"]
    positions: Int[Array, " rows"]
    backend: Wish = "auto"
    owners: Int[Array, " rows"] | None = None
    turns: int | None = None

    def recur(self, function: Recurrence, inputs: Any, state: jax.Array) -> tuple[Any, jax.Array]:
        """See `jaxinfer.layers.recurrent.Recur`; states after drafts are not in their pages until `accept`."""
        if self.owners is None:
            return super().recur(function, inputs, state)
        by_row = jax.tree.map(self._by_chunk, inputs)
        outputs, pool = run_rows(function, by_row, state, self._state_rows(self.owners), self._recurrent)
        return jax.tree.map(lambda x: x[:, 0], outputs), pool

    def accept(self, pools: list[Pool], accepted: Bool[Array, " rows"]) -> list[Pool]:
        """Keep the states after accepted rows, once all layers are computed."""
        if self.owners is None:
            return pools
        states = [pool.states if isinstance(pool, StatePool) else () for pool in pools]
        kept = keep_accepted(states, self._state_rows(self.owners), accepted)
        changed = zip(pools, kept, strict=True)
        return [pool._replace(states=own) if isinstance(pool, StatePool) else pool for pool, own in changed]

    def _state_rows(self, owners: Int[Array, " rows"]) -> StateRows:
        home, _ = self._borders(self.positions, (self.positions >= 0).astype(jnp.int32), 1)
        return StateRows(
            owners, self.positions, self._before(self.positions), home[:, 0], self.spec.page_size, self.turns
        )

    def _by_chunk(self, x: jax.Array) -> jax.Array:
        return x[:, None]

    def _pieces(self) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
        return self.positions, (self.positions >= 0).astype(jnp.int32)

    def _places(self, table: jax.Array, chunk: int, cache: LayerPool) -> tuple[jax.Array, jax.Array]:
        pages, page = cache.data.shape[0], cache.data.shape[-2]
        at = jnp.maximum(self.positions, 0)
        ids = jnp.take_along_axis(table, (at // page)[:, None], axis=1)[:, 0]
        return jnp.where(self.positions >= 0, ids, pages)[:, None], at % page

    def _attended(self, q: jax.Array, cache: LayerPool, table: jax.Array, options: Options) -> jax.Array:
        op = paged_attention if isinstance(options, AttentionOptions) else mla_attention
        return op.decode(q[:, 0], cache.data, table, self.positions + 1, options, path=self.backend)

    def _chosen(self, index: Index, cache: LayerPool, table: jax.Array, k: int) -> jax.Array:
        return token_index.decode(index.q[:, 0], index.weights[:, 0], *cache, table, self.positions + 1, k)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "starts", "lengths", "ends"],
    meta_fields=["spec", "backend"],
)
@dataclasses.dataclass(frozen=True)
class PrefillAttend(_PagedAttend):
    """`Attend` for prompt chunks: ``lengths`` tokens from position ``starts``, which may be inside a page.

    The rows are the chunks' tokens one chunk after another, all padded to one size. A chunk of length 0 writes nothing.
    Chunks may be consecutive chunks of one sequence that share no page: all write before any attends.

    ``ends``: last position that each token sees, where the tokens of an image attend in both directions; no chunk
    splits such an image. None: its own.
    """

    spec: CacheSpec
    tables: Int[Array, "groups batch width"]
    starts: Int[Array, " batch"]
    lengths: Int[Array, " batch"]
    backend: Wish = "auto"
    ends: Int[Array, "batch chunk"] | None = None

    def _by_chunk(self, x: jax.Array) -> jax.Array:
        batch = self.tables.shape[1]
        return x.reshape(batch, x.shape[0] // batch, *x.shape[1:])

    def _pieces(self) -> tuple[Int[Array, " batch"], Int[Array, " batch"]]:
        return self.starts, self.lengths

    def _places(self, table: jax.Array, chunk: int, cache: LayerPool) -> tuple[jax.Array, jax.Array]:
        pages, page, width = cache.data.shape[0], cache.data.shape[-2], table.shape[1]
        index, offsets = jnp.arange(-(-chunk // page) + 1), self.starts % page
        at = self.starts[:, None] // page + index
        ids = jnp.take_along_axis(table, jnp.minimum(at, width - 1), axis=1)
        used = (self.lengths > 0)[:, None] & (at * page < (self.starts + self.lengths)[:, None])
        return jnp.where(used, ids, pages), offsets

    def _attended(self, q: jax.Array, cache: LayerPool, table: jax.Array, options: Options) -> jax.Array:
        op = paged_attention if isinstance(options, AttentionOptions) else mla_attention
        if self.ends is not None:
            assert isinstance(options, AttentionOptions), "latents with attention in both directions"
            options = dataclasses.replace(options, ends=self.ends)
        mixed = op.prefill(q, cache.data, table, self.starts, self._ends(), options, path=self.backend)
        return mixed.reshape(-1, *mixed.shape[2:])

    def _chosen(self, index: Index, cache: LayerPool, table: jax.Array, k: int) -> jax.Array:
        return token_index.prefill(index.q, index.weights, *cache, table, self.starts, self._ends(), k)

    def _ends(self) -> jax.Array:
        return jnp.where(self.lengths > 0, self.starts + self.lengths, 0)


def _with_latents(
    cache: LayerPool, latents: jax.Array, pages: jax.Array, offsets: jax.Array, layer: LayerSpec
) -> LayerPool:
    """Write latents ``[batch, chunk, latent]``, quantised where the pool has scales; index keys may follow them."""
    if cache.scales is None or layer.latent_rank is None:
        return cache._replace(data=kv_write.write_latents(cache.data, latents, pages, offsets))
    key, row = cache.data.shape[-1] - layer.index_dim, cache.data.shape[-1]
    borders = (layer.latent_rank, key) if key < latents.shape[-1] == row else (layer.latent_rank,)
    scaled = kv_write.write_scaled_latents
    return LayerPool(*scaled(cache.data, cache.scales, latents, pages, offsets, borders=borders))


def _options(
    cache: LayerPool, layer: LayerSpec, scale: float, sinks: jax.Array | None, chosen: jax.Array | None = None
) -> Options:
    """Return the attention options of a layer.

    Raises:
        ValueError: latents together with a window, a soft-cap or sinks.
    """
    if layer.latent_rank is None:
        return AttentionOptions(scale, layer.window, layer.softcap, sinks, cache.scales)
    if layer.window is not None or layer.softcap is not None or sinks is not None:
        raise ValueError(f"attention to latents has no window, soft-cap or sinks: {layer}")
    return LatentOptions(scale, layer.latent_rank, cache.scales, chosen)


def copy_pages(
    spec: CacheSpec,
    pools: list[LayerPool],
    source: Int[Array, "groups copies"],
    target: Int[Array, "groups copies"],
    backend: Wish = "auto",
) -> list[LayerPool]:
    """Copy pages to other pages in every layer, by the ids of each group; a target beyond the pool is dropped."""

    def run(pools: list[LayerPool], source: jax.Array, target: jax.Array) -> list[LayerPool]:
        groups = [spec.group(layer) for layer in spec.attending]
        pairs = zip(pools, groups, strict=True)
        return [kv_copy.copy_pages(pool, source[group], target[group], path=backend) for pool, group in pairs]

    own = [_pool(spec.latent)] * len(pools)
    copied: list[LayerPool] = _on_shards(run, (own, _REPLICATED, _REPLICATED), own)(pools, source, target)
    return copied
