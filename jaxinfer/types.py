"""Host-side records that cross room borders: what a request is, what a step does, what a parameter is. No jax."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxinfer.brief import Brief
from jaxinfer.sampling_params import SamplingParams

# ---- requests


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to the engine: token ids only, text is the front end's business.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: at least one id, each within the vocabulary.
        params: validated sampling parameters; ``seed`` is resolved (never None) at admission.
        stop_token_ids: ids that end a sequence (EOS and the request's own), empty under ``ignore_eos`` without own ids.
        bad_words_ids: token sequences that must not appear in the output.
        priority: lower is served earlier, under the priority policy.
        tenant: whose request it is, under the fair policy.
        weight: the tenant's, which decides its share.
        cache_scope: who may share cached pages with it, in the front end's words; see `jaxinfer.kv.identity`.
        cache_salt: within a scope, requests of different salts never share cached pages.
        deadline: in seconds of ``time.monotonic``; a request that is not done by then ends.
        thinking: how a thought is told, which its grammar does not hold and ``thinking_token_budget`` bounds; None:
            there is none.
        lora: the adapter that it is computed with; None: the model alone.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    cache_scope: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    thinking: Thinking | None = None
    lora: LoRARef | None = None


class LoRARef(NamedTuple):
    """An adapter as a request refers to it.

    Attributes:
        name: what the client calls it; another one may have it later.
        identity: hash of its content (`jaxinfer.lora.adapter.Adapter`), by which everything is kept that was computed
            with it.
    """

    name: str
    identity: str


EMBEDDING = ("embed", "table")
"""Path of the table that a decoder reads by tokens."""
HEAD = ("head", "table")
"""Path of the table that gives logits; where a model has none, it is the other one: they are tied."""


class LoRATarget(NamedTuple):
    """The shapes that an adapter's arrays have for one parameter, as `jaxinfer.lora.adapter.Delta` has them.

    Attributes:
        a: [rank, in]; of experts [experts, rank, in]; of a table [rank, table's rows].
        b: [*out, rank]; of experts [experts, *out, rank].
        axes: logical axes of the outputs and, at last, of the inputs.
        table: a row of the parameter is looked up for each token: rows are its inputs.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    axes: tuple[str | None, ...]
    table: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays, by name."""
        return {"a": self.a, "b": self.b, "magnitude": self.b[:-1], "bias": self.b[:-1]}


class Thinking(NamedTuple):
    """The tokens around a thought in front of an answer.

    Attributes:
        begin: None: only a prompt begins one.
        is_open: the prompt has begun it.
    """

    begin: int | None
    end: int
    is_open: bool


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"
    """Its grammar failed; ``SequenceDelta.stop_reason`` says why."""
    UNAVAILABLE = "unavailable"
    """An adapter or a process for its grammar could not be had; ``SequenceDelta.stop_reason`` says why."""
    NOT_FINITE = "not_finite"
    """The model's logits were NaN or infinite."""


class TokenLogprob(NamedTuple):
    """One candidate at one position: natural log of its probability under the raw logits, and its rank from 1."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(NamedTuple):
    """The chosen token at one position and the ``N`` most likely ones, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclasses.dataclass(slots=True)
class SequenceDelta:
    """Tokens that one step added to one sequence. ``index`` counts the ``n`` samples of a request.

    There is one of each running sequence a step: ``logprobs`` is no list of its own where none were asked for.
    ``cached_tokens`` and ``prompt_logprobs`` are in the first delta that has a token: prompt tokens that were found in
    the prefix cache when the sequence was first admitted, and what was asked of the prompt. ``draft_tokens`` were
    verified in this step, of which ``draft_accepted`` were confirmed.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    cached_tokens: int | None = None
    draft_tokens: int = 0
    draft_accepted: int = 0


# ---- parameters of a model, declared once: shape, sharding, initialisation and checkpoint mapping derive from these


@dataclasses.dataclass(frozen=True)
class Source:
    """One checkpoint tensor, or a part of one, and the place of it in a (possibly fused) parameter.

    The tensor named ``name`` has ``shape`` in the checkpoint. Of it ``part`` is taken (an index of its leading
    dimensions; default: all), transposed (2-D) if ``transpose``, then reshaped to ``reshape`` (if given); it lands
    in ``parameter[where]``.
    """

    name: str
    shape: tuple[int, ...]
    transpose: bool = False
    reshape: tuple[int, ...] | None = None
    where: tuple[slice | int, ...] = ()
    part: tuple[slice | int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """An abstract parameter.

    Attributes:
        shape: as the forward pass uses it; matrices are [in, ..., out].
        axes: a logical axis name per dimension (None: never sharded); ``parallel`` maps them to mesh axes.
        init: "normal" (scaled by ``scale``), "ones" or "zeros": for random weights.
        sources: the checkpoint tensors that fill it.
        dtype: that it keeps whatever the model's (None: the model's).
        inputs: the dimension over which a product with it sums, the first or the last (-1): a checkpoint's quantised
            weight may stand in its place. None: it is always an array.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    scale: float = 0.02
    sources: tuple[Source, ...] = ()
    dtype: str | None = None
    inputs: int | None = None


@runtime_checkable
class ParamGroup(Protocol):
    """One parameter of several arrays: a quantised weight, with a `ParamSpec` for each."""

    def items(self) -> ItemsView[str, Any]:
        """The arrays by name."""

    def rebuilt(self, arrays: Mapping[str, Any]) -> ParamGroup:
        """The same of other arrays."""


ParamTree = Mapping[str, "ParamSpec | ParamGroup | ParamTree"]


def map_specs(function: Callable[[tuple[str, ...], ParamSpec], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """A tree of the same form whose leaves are ``function(path, spec)``, in the order of the tree."""
    made = {
        key: function((*path, key), node) if isinstance(node, ParamSpec) else map_specs(function, node, (*path, key))
        for key, node in tree.items()
    }
    return made if isinstance(tree, Mapping) else tree.rebuilt(made)


def walk_specs(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ParamSpec]]:
    """Every parameter with its path, in the order of the tree."""
    for key, node in tree.items():
        here = (*path, key)
        yield from [(here, node)] if isinstance(node, ParamSpec) else walk_specs(node, here)


@dataclasses.dataclass(frozen=True, repr=False)
class StateSpec(Brief):
    """One array of a layer's state: of fixed size, however long a sequence is.

    Attributes:
        shape: the first dimension is spread over devices as heads are.
        exact: float32 whatever the model's dtype, in which it is otherwise.
        whole: it is not spread: each device has all of it.
    """

    shape: tuple[int, ...]
    exact: bool = False
    whole: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class LayerSpec(Brief):
    """Differences between one layer's attention and another's.

    Attributes:
        attends: whether it has keys and values (or latents) of each token.
        states: arrays of fixed size that it has of each sequence, instead of them or beside them (docs/states.md).
        window: the sliding window in tokens (None: full).
        softcap: scores become ``softcap * tanh(score / softcap)`` (None: they stay).
        latent_rank: a key is a latent of the token, whose first ``latent_rank`` numbers are its value (None: keys and
            values are two things).
        index_topk: a query attends to so many tokens, those whose index keys it scores highest (None: to all).
        index_dim: numbers of an index key, which lie behind a token's latent.
        kv_heads, head_dim: its own, where they are not those of the cache (None: they are).
        source: the layer whose keys and values it reads, and keeps none (None: its own). Such layers are the last ones.
    """

    window: int | None = None
    softcap: float | None = None
    latent_rank: int | None = None
    index_topk: int | None = None
    index_dim: int = 0
    attends: bool = True
    states: tuple[StateSpec, ...] = ()
    kv_heads: int | None = None
    head_dim: int | None = None
    source: int | None = None


# What a user may say of a cache's elements, and their dtype; None: the model's.
KV_CACHE_DTYPES: Mapping[str, str | None] = {
    "auto": None,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}
_FLOAT32_BYTES = 4

STATE = 0
"""The window of the group of states, in which a page has room for the states of one sequence behind its last token in
that page: all that is before is in it."""
NO_STATE = 2**30
"""The place of a state that is not kept, in tables of that group: beyond every pool."""


@dataclasses.dataclass(frozen=True, repr=False)
class CacheSpec(Brief):
    """The KV cache that a model needs. The only place that knows how many bytes a page has.

    A layer's pool is ``[pages, 2, kv_heads, page_size, head_dim]``: keys at index 0, values at 1. Where the layers
    have a ``latent_rank`` it is ``[pages, page_size, head_dim]``: a latent serves all heads as key and value, and the
    last ``index_dim`` numbers are the token's index key.

    ``layers`` are those that keep keys and values: without the last ones where these have a ``source``.

    ``groups`` are the windows of the whole model's layers, where these are but some of them (`part`).

    Layers with states have pools ``[states, *shape]`` besides, whose pages are those of a group of their own (`STATE`).
    ``page_size`` is the number of tokens behind which a state may be kept; an engine sets it.

    ``dtype`` is that of 8-bit elements, "int8" or "float8_e4m3fn": then each head of each token has a float32 scale, in
    ``[pages, 2, kv_heads, page_size]``. Of a latent the first ``latent_rank`` numbers have one and the rotated key
    behind them another, in ``[pages, page_size, 2]``, and an index key a third. None: elements are of the model's
    dtype, and have no scales.
    """

    layers: tuple[LayerSpec, ...]
    kv_heads: int
    head_dim: int
    groups: tuple[int | None, ...] | None = None
    dtype: str | None = None
    page_size: int = 0

    @property
    def attending(self) -> tuple[LayerSpec, ...]:
        """The layers that have keys and values."""
        return tuple(layer for layer in self.layers if layer.attends)

    @property
    def latent(self) -> bool:
        return any(layer.latent_rank is not None for layer in self.layers)

    @property
    def stateful(self) -> bool:
        """Whether layers have states, of this part of a model or of another one."""
        return STATE in self.windows

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each cache group. Layers of one window share block tables."""
        if self.groups is not None:
            return self.groups
        found = tuple(dict.fromkeys(layer.window for layer in self.layers if layer.attends)) or (None,)
        return (*found, STATE) if any(layer.states for layer in self.layers) else found

    def group(self, layer: LayerSpec) -> int:
        return self.windows.index(layer.window)

    def part(self, layers: slice) -> CacheSpec:
        """The cache of some of the layers, under the block tables of all of them."""
        return dataclasses.replace(self, layers=self.layers[layers], groups=self.windows)

    def sizes(self, layer: LayerSpec) -> tuple[int, int]:
        """KV heads of a layer, and their size."""
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    def on_each(self, devices: int) -> CacheSpec:
        """The cache that each of as many devices has: of its part of the heads, or of all latents."""
        if self.latent:
            return self
        layers = tuple(
            dataclasses.replace(layer, kv_heads=layer.kv_heads and layer.kv_heads // devices) for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers, kv_heads=self.kv_heads // devices)

    def pool_shape(
        self, pages: int, page_size: int, devices: int = 1, layer: LayerSpec = LayerSpec()
    ) -> tuple[int, ...]:
        """Shape of a layer's pool, or of its part on each of the devices over which its heads are spread."""
        kv_heads, head_dim = self.sizes(layer)
        return (pages, page_size, head_dim) if self.latent else (pages, 2, kv_heads // devices, page_size, head_dim)

    def scales_shape(
        self, pages: int, page_size: int, devices: int = 1, layer: LayerSpec = LayerSpec()
    ) -> tuple[int, ...]:
        """Shape of the scales beside `pool_shape`: 0 pages where elements are of the model's dtype and need none."""
        parts = (3 if any(layer.index_dim for layer in self.layers) else 2,) if self.latent else ()
        return (pages if self.dtype else 0, *self.pool_shape(1, page_size, devices, layer)[1:-1], *parts)

    def stored_as(self, kv_cache_dtype: str) -> CacheSpec:
        """The same cache with elements of one of `KV_CACHE_DTYPES`."""
        return dataclasses.replace(self, dtype=KV_CACHE_DTYPES[kv_cache_dtype])

    def bytes_per_page(self, page_size: int, itemsize: int, devices: int = 1, stages: int = 1) -> int:
        """Bytes of one page over all layers, its scales included, on each of as many devices.

        Args:
            itemsize: bytes of an element of the model's dtype, which the cache has unless ``dtype`` says another.
            stages: to which layers are dealt out: these are the bytes of the one that has most.
        """
        each = [self._bytes(page_size, itemsize, devices, layer) for layer in self.layers]
        # Without a layer that attends a page is an entry of tables alone.
        return max(1, _most_in_stage(each, stages))

    def _bytes(self, page_size: int, itemsize: int, devices: int, layer: LayerSpec) -> int:
        if not layer.attends:
            return 0
        elements = math.prod(self.pool_shape(1, page_size, devices, layer))
        scales = math.prod(self.scales_shape(1, page_size, devices, layer))
        return elements * (1 if self.dtype else itemsize) + scales * _FLOAT32_BYTES

    def bytes_per_state(self, itemsize: int, devices: int = 1, stages: int = 1) -> int:
        """Bytes of the states of one sequence in all layers, as `bytes_per_page`."""
        return _most_in_stage([_state_bytes(layer, itemsize, devices) for layer in self.layers], stages)

    @property
    def exact_per_token(self) -> int:
        """Numbers that a token leaves in all layers and in which a change of the model's last bits shows: elements of
        its dtype, or the scales of those that are rounded to 8 bits."""
        shape = self.scales_shape if self.dtype else self.pool_shape
        return sum(math.prod(shape(1, 1, layer=layer)) for layer in self.attending)


def _state_bytes(layer: LayerSpec, itemsize: int, devices: int) -> int:
    def held(state: StateSpec) -> int:
        size = _FLOAT32_BYTES if state.exact else itemsize
        return math.prod(state.shape) // (1 if state.whole else devices) * size

    return sum(map(held, layer.states))


def _most_in_stage(layers: list[int], stages: int) -> int:
    """The most that a stage has of what ``layers`` have, which are dealt out evenly, one more to the first stages."""
    small, more = divmod(len(layers), stages)
    firsts = [stage * small + min(stage, more) for stage in range(stages + 1)]
    return max(sum(layers[first:end]) for first, end in itertools.pairwise(firsts))
