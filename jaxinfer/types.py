"""Host-side records shared by several packages: requests, step results and parameter specs. No jax."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxinfer.brief import ShortRepr
from jaxinfer.sampling_params import SamplingParams

# ---- requests


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to the engine: token ids only, text is handled by the front end.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: at least one id, each within the vocabulary.
        params: validated sampling parameters; ``seed`` is resolved (never None) at admission.
        stop_token_ids: ids that end a sequence: the request's own and, unless ``ignore_eos``, EOS.
        bad_words_ids: token sequences that must not appear in the output.
        priority: lower is served earlier, under the priority policy.
        tenant: tenant of the request, under the fair policy.
        weight: weight of the tenant, which decides its share.
        cache_scope: principals that may share its cached pages, encoded by the front end; see `jaxinfer.kv.cache_key`.
        cache_salt: within a scope, requests of different salts never share cached pages.
        deadline: in seconds of ``time.monotonic``; a request that is not done by then ends.
        thinking: tokens that delimit reasoning, which the grammar does not constrain and ``thinking_token_budget``
            bounds; None: the model has none.
        lora: LoRA adapter of the request; None: the base model.
        images: images of the prompt, in its order; their ranges do not overlap.
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
    images: tuple[PlacedImage, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class ImageInput:
    """An image or a video as a vision tower reads it.

    Attributes:
        patches: [rows, values], a row for each patch in the order of the tower: resized pixels (uint8), or normalised
            ones (floating point), with respect to which the model is differentiable.
        grid: numbers of patches: frames (of a video: of as many frames as one patch spans), rows and columns.
        digest: hexadecimal hash of all of the above and of the processor, the key of everything cached that was
            computed with it. Images of equal digests are equal.
        step: rotary positions between two frames on the time axis; part of the digest.
        video: its placeholders are the model's video token.
        tiles: rows and columns of the tiles of an image, whose frames are the tiles, row by row, and then the whole
            picture; part of the digest. None: it has no tiles.
    """

    patches: Any
    grid: tuple[int, int, int]
    digest: str = ""
    step: float = 1.0
    video: bool = False
    tiles: tuple[int, int] | None = None

    @property
    def frames(self) -> tuple[ImageInput, ...]:
        """The parts that a tower encodes each by itself: towers see one frame at a time."""
        count = self.grid[0]
        if count == 1:
            return (self,)
        grid, rows = (1, *self.grid[1:]), self.patches.shape[0] // count
        parts = (self.patches[index * rows : (index + 1) * rows] for index in range(count))
        return tuple(
            ImageInput(part, grid, f"{self.digest}{index:04x}", video=self.video) for index, part in enumerate(parts)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageInput) and (self.digest, self.grid) == (other.digest, other.grid)

    def __hash__(self) -> int:
        return hash((self.digest, self.grid))


class PlacedImage(NamedTuple):
    """An image at its place in a prompt.

    Attributes:
        start, stop: range of prompt positions. Each token in it that is the model's image or video token is a
            placeholder, and the k-th placeholder takes row k of the tower's output.
    """

    start: int
    stop: int
    image: ImageInput


class LoRARef(NamedTuple):
    """Reference from a request to a LoRA adapter.

    Attributes:
        name: the client's name for it; another adapter may have this name later.
        identity: hash of its content (`jaxinfer.lora.adapter.Adapter`), the key of everything cached that was computed
            with it.
    """

    name: str
    identity: str


VISION = "vision"
"""Name of the parameters of a model's vision tower."""
EMBEDDING = ("embed", "table")
"""Path of the embedding table."""
HEAD = ("head", "table")
"""Path of the table of the LM head; a model without one has tied embeddings."""


class LoRATarget(NamedTuple):
    """Shapes of an adapter's arrays for one parameter, as in `jaxinfer.lora.adapter.Delta`.

    Attributes:
        a: [rank, in]; for experts [experts, rank, in]; for a table [rank, table's rows].
        b: [*out, rank]; for experts [experts, *out, rank].
        axes: logical axes of the outputs, followed by those of the inputs.
        table: the parameter is an embedding table, looked up by token: its rows are its inputs.
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
    """Tokens that delimit the reasoning before an answer.

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
    """The grammar failed; ``SequenceDelta.stop_reason`` has the reason."""
    UNAVAILABLE = "unavailable"
    """An adapter or a grammar process was not available; ``SequenceDelta.stop_reason`` has the reason."""
    NOT_FINITE = "not_finite"
    """The model's logits were NaN or infinite."""


class TokenLogprob(NamedTuple):
    """Candidate at one position: natural log of its probability under the raw logits, and its rank from 1."""

    token_id: int
    logprob: float
    rank: int


class RoutedExperts(NamedTuple):
    """Experts that a forward pass took: ids [layers, k] of the layers that have any, int32 in this machine's byte
    order."""

    layers: int
    ids: bytes


class PositionExtras(NamedTuple):
    """Outputs for training at one position.

    Attributes:
        entropy: in nats; None: not requested, as for the other fields.
        token_logprobs: of the request's ``logprob_token_ids``.
        kept: token ids that the sampler could draw: ascending int32 in this machine's byte order.
        vocabulary: log probabilities of the whole vocabulary: float32 in this machine's byte order.
        experts: experts that the forward pass took.
    """

    entropy: float | None = None
    token_logprobs: tuple[float, ...] = ()
    kept: bytes | None = None
    vocabulary: bytes | None = None
    experts: RoutedExperts | None = None


class PositionLogprobs(NamedTuple):
    """The chosen token at one position and the ``N`` most likely ones, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    extras: PositionExtras | None = None

    @property
    def weight(self) -> int:
        """Size in candidates, by which messages with many positions are bounded."""
        if self.extras is None:
            return 1 + len(self.top)
        _, token_logprobs, kept, vocabulary, experts = self.extras
        ids = b"" if experts is None else experts.ids
        numbers = len(token_logprobs) + (len(kept or b"") + len(ids)) // 4  # each by itself in some messages
        return 1 + len(self.top) + numbers // 4 + len(vocabulary or b"") // 64


def experts_of(positions: Iterable[PositionLogprobs | None]) -> list[RoutedExperts]:
    """Return the experts of each position; none if they were not requested. The first position of a prompt has no
    forward pass before it, and none."""
    extras = (position.extras for position in positions if position is not None)
    return [each.experts for each in extras if each is not None and each.experts is not None]


WeightVersions = tuple[tuple[int, int], ...]
"""Versions of the weights that computed an output: (version, tokens), in order; empty: all tokens are of version 0.
"""


def added_versions(first: WeightVersions, count: int, then: WeightVersions, more: int) -> WeightVersions:
    """Return the versions of ``count`` tokens, and of ``more`` after them."""
    if (not first and not then) or (count and not more):
        return first
    first, then = (own or ((0, tokens),) for own, tokens in ((first, count), (then, more)))
    *before, (version, tokens) = [each for each in first if each[1]] or [(then[0][0], 0)]
    same = then[0][0] == version
    return (*before, (version, tokens + then[0][1]), *then[1:]) if same else (*before, (version, tokens), *then)


def version_ranges(versions: WeightVersions) -> list[tuple[int, int, int]]:
    """Return (version, start, end) of the tokens of each version."""
    ends = list(itertools.accumulate((tokens for _, tokens in versions), initial=0))
    return [(version, start, start + tokens) for (version, tokens), start in zip(versions, ends, strict=False)]


def first_versions(versions: WeightVersions, count: int) -> WeightVersions:
    """Return the versions of the first ``count`` tokens."""
    parts = ((version, min(end, count) - start) for version, start, end in version_ranges(versions))
    return tuple(part for part in parts if part[1] > 0)


@dataclasses.dataclass(slots=True)
class SequenceDelta:
    """Tokens that one step added to one sequence. ``index`` counts the ``n`` samples of a request.

    Every running sequence gets one per step: ``logprobs`` shares one empty tuple if none were requested.
    ``cached_tokens`` and ``prompt_logprobs`` are in the first delta that has a token: prompt tokens found in the prefix
    cache when the sequence was first admitted, and the requested prompt logprobs. ``draft_tokens`` were verified in
    this step, of which ``draft_accepted`` were accepted. ``weight_versions``: of the tokens, in order.
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
    weight_versions: WeightVersions = ()

    def extended(self, then: SequenceDelta) -> SequenceDelta:
        """Add the next delta of the sample, which its owner no longer uses, to this one. O(``then``), so that the cost
        does not grow with the deltas that a slow reader has not fetched."""
        counts = len(self.token_ids), len(then.token_ids)
        self.weight_versions = added_versions(self.weight_versions, counts[0], then.weight_versions, counts[1])
        self.token_ids += then.token_ids
        if then.logprobs:
            known = self.logprobs if isinstance(self.logprobs, list) else list(self.logprobs)
            known.extend(then.logprobs)
            self.logprobs = known
        self.finish_reason, self.stop_reason = then.finish_reason, then.stop_reason
        self.prompt_logprobs = self.prompt_logprobs or then.prompt_logprobs
        self.cached_tokens = then.cached_tokens if self.cached_tokens is None else self.cached_tokens
        self.draft_tokens += then.draft_tokens
        self.draft_accepted += then.draft_accepted
        return self


# ---- model parameters, declared once: shape, sharding, initialisation and checkpoint mapping derive from these specs


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint tensor, or a slice of one, and its position in a (possibly fused) parameter.

    The tensor named ``name`` has ``shape`` in the checkpoint. Its slice ``part`` (an index of its leading dimensions;
    default: all) is transposed (2-D) if ``transpose``, then reshaped to ``reshape`` (if given) and stored in
    ``parameter[where]``.
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
        dtype: fixed dtype, independent of the model's (None: the model's).
        inputs: contracted dimension of a matrix product with it, the first or the last (-1): a quantised weight of a
            checkpoint may replace it. None: it is always an array.
        on_host: it is kept in host memory, and copied to the device in each step (`weight_offload_gib`).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    scale: float = 0.02
    sources: tuple[Source, ...] = ()
    dtype: str | None = None
    inputs: int | None = None
    on_host: bool = False


@runtime_checkable
class ParamGroup(Protocol):
    """A parameter that consists of several arrays, each with a `ParamSpec`: a quantised weight."""

    def items(self) -> ItemsView[str, Any]:
        """The arrays by name."""

    def rebuilt(self, arrays: Mapping[str, Any]) -> ParamGroup:
        """Return this parameter with other arrays."""


ParamTree = Mapping[str, "ParamSpec | ParamGroup | ParamTree"]


def map_specs(function: Callable[[tuple[str, ...], ParamSpec], Any], tree: Any, path: tuple[str, ...] = ()) -> Any:
    """Return a tree of the same structure whose leaves are ``function(path, spec)``, in the order of the tree."""
    made = {
        key: function((*path, key), node) if isinstance(node, ParamSpec) else map_specs(function, node, (*path, key))
        for key, node in tree.items()
    }
    return made if isinstance(tree, Mapping) else tree.rebuilt(made)


def walk_specs(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ParamSpec]]:
    """Yield every parameter with its path, in the order of the tree."""
    for key, node in tree.items():
        here = (*path, key)
        yield from [(here, node)] if isinstance(node, ParamSpec) else walk_specs(node, here)


@dataclasses.dataclass(frozen=True, repr=False)
class StateSpec(ShortRepr):
    """An array of a layer's state, of fixed size regardless of the sequence length.

    Attributes:
        shape: the first dimension is sharded like the heads.
        exact: float32 regardless of the model's dtype, which is the default.
        whole: replicated: each device has all of it.
    """

    shape: tuple[int, ...]
    exact: bool = False
    whole: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class LayerSpec(ShortRepr):
    """Attention and cache parameters of one layer.

    Attributes:
        attends: whether it has keys and values (or latents) of each token.
        states: fixed-size arrays per sequence, instead of or in addition to keys and values (docs/states.md).
        window: the sliding window in tokens (None: full).
        softcap: scores become ``softcap * tanh(score / softcap)`` (None: unchanged).
        latent_rank: a key is a latent of the token, whose first ``latent_rank`` numbers are its value (None: keys and
            values are separate).
        index_topk: number of tokens that a query attends to, those whose index keys it scores highest (None: all).
        index_dim: numbers of an index key, stored after the latent of the token.
        kv_heads, head_dim: override those of the cache (None: no override).
        source: the layer whose keys and values it reads, storing none (None: its own). Such layers are the last ones.
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


# Dtype of cache elements by the value of the setting; None: the model's dtype.
KV_CACHE_DTYPES: Mapping[str, str | None] = {
    "auto": None,
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "int8": "int8",
}
_FLOAT32_BYTES = 4

STATE = 0
"""Window value of the cache group of states. A page of this group holds the state of one sequence after its last token
in that page, which covers all earlier tokens."""
NO_STATE = 2**30
"""Index in the tables of that group of a state that is not kept: beyond every pool."""


@dataclasses.dataclass(frozen=True, repr=False)
class CacheSpec(ShortRepr):
    """The KV cache of a model, and the only place that computes bytes per page.

    A layer's pool is ``[pages, 2, kv_heads, page_size, head_dim]``: keys at index 0, values at 1. Where the layers have
    a ``latent_rank`` it is ``[pages, page_size, head_dim]``: a latent serves all heads as key and value, and the last
    ``index_dim`` numbers are the token's index key.

    ``layers`` are those that keep keys and values: without the last ones where these have a ``source``.

    ``groups`` are the windows of all layers of the model, where ``layers`` are a subset (`part`).

    Layers with states also have pools ``[states, *shape]``, whose pages belong to a separate group (`STATE`).
    ``page_size`` is the number of tokens after which a state may be kept; an engine sets it.

    ``dtype`` is that of 8-bit elements, "int8" or "float8_e4m3fn": then each head of each token has a float32 scale, in
    ``[pages, 2, kv_heads, page_size]``. The first ``latent_rank`` numbers of a latent have one scale and the rotated
    key after them another, in ``[pages, page_size, 2]``, and an index key a third. None: elements are of the model's
    dtype, without scales.
    """

    layers: tuple[LayerSpec, ...]
    kv_heads: int
    head_dim: int
    groups: tuple[int | None, ...] | None = None
    dtype: str | None = None
    page_size: int = 0

    @property
    def attending(self) -> tuple[LayerSpec, ...]:
        """Layers that have keys and values."""
        return tuple(layer for layer in self.layers if layer.attends)

    @property
    def latent(self) -> bool:
        return any(layer.latent_rank is not None for layer in self.layers)

    @property
    def stateful(self) -> bool:
        """Whether any layer of the model has states, in this subset of layers or outside it."""
        return STATE in self.windows

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each cache group. Layers of one window share block tables."""
        if self.groups is not None:
            return self.groups
        found = tuple(dict.fromkeys(layer.window for layer in self.layers if layer.attends)) or (None,)
        return (*found, STATE) if any(layer.states for layer in self.layers) else found

    def group(self, layer: LayerSpec) -> int:
        return self.windows.index(layer.window)

    def part(self, layers: slice) -> CacheSpec:
        """Return the cache of a slice of the layers, under the block tables of all layers."""
        return dataclasses.replace(self, layers=self.layers[layers], groups=self.windows)

    def sizes(self, layer: LayerSpec) -> tuple[int, int]:
        """Return the number of KV heads of a layer, and their dimension."""
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    def on_each(self, devices: int) -> CacheSpec:
        """Return the cache of one of ``devices`` devices: its shard of the heads, or all latents."""
        if self.latent:
            return self
        layers = tuple(
            dataclasses.replace(layer, kv_heads=layer.kv_heads and layer.kv_heads // devices) for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers, kv_heads=self.kv_heads // devices)

    def pool_shape(
        self, pages: int, page_size: int, devices: int = 1, layer: LayerSpec = LayerSpec()
    ) -> tuple[int, ...]:
        """Return the shape of a layer's pool, or of its shard on each of ``devices`` over which heads are sharded."""
        kv_heads, head_dim = self.sizes(layer)
        return (pages, page_size, head_dim) if self.latent else (pages, 2, kv_heads // devices, page_size, head_dim)

    def scales_shape(
        self, pages: int, page_size: int, devices: int = 1, layer: LayerSpec = LayerSpec()
    ) -> tuple[int, ...]:
        """Return the shape of the scales of `pool_shape`: 0 pages if elements have the model's dtype and no scales."""
        parts = (3 if any(layer.index_dim for layer in self.layers) else 2,) if self.latent else ()
        return (pages if self.dtype else 0, *self.pool_shape(1, page_size, devices, layer)[1:-1], *parts)

    def stored_as(self, kv_cache_dtype: str) -> CacheSpec:
        """Return this cache with elements of one of `KV_CACHE_DTYPES`."""
        return dataclasses.replace(self, dtype=KV_CACHE_DTYPES[kv_cache_dtype])

    def bytes_per_page(self, page_size: int, itemsize: int, devices: int = 1, stages: int = 1) -> int:
        """Return the bytes of one page over all layers, its scales included, on each of ``devices`` devices.

        Args:
            itemsize: bytes of an element of the model's dtype, which the cache has unless ``dtype`` is set.
            stages: pipeline stages: the result is for the stage with the most bytes.
        """
        each = [self._bytes(page_size, itemsize, devices, layer) for layer in self.layers]
        # A model without attention layers has pages in its block tables only.
        return max(1, _most_in_stage(each, stages))

    def _bytes(self, page_size: int, itemsize: int, devices: int, layer: LayerSpec) -> int:
        if not layer.attends:
            return 0
        elements = math.prod(self.pool_shape(1, page_size, devices, layer))
        scales = math.prod(self.scales_shape(1, page_size, devices, layer))
        return elements * (1 if self.dtype else itemsize) + scales * _FLOAT32_BYTES

    def bytes_per_state(self, itemsize: int, devices: int = 1, stages: int = 1) -> int:
        """Return the bytes of the states of one sequence in all layers; arguments as in `bytes_per_page`."""
        return _most_in_stage([_state_bytes(layer, itemsize, devices) for layer in self.layers], stages)

    @property
    def exact_per_token(self) -> int:
        """Numbers per token over all layers that expose a change in the last bits of the model's arithmetic: elements
        of its dtype, or the scales of elements quantised to 8 bits."""
        shape = self.scales_shape if self.dtype else self.pool_shape
        return sum(math.prod(shape(1, 1, layer=layer)) for layer in self.attending)


def _state_bytes(layer: LayerSpec, itemsize: int, devices: int) -> int:
    def held(state: StateSpec) -> int:
        size = _FLOAT32_BYTES if state.exact else itemsize
        return math.prod(state.shape) // (1 if state.whole else devices) * size

    return sum(map(held, layer.states))


def _most_in_stage(layers: list[int], stages: int) -> int:
    """Return the largest sum over a stage's layers; layers are divided evenly, with one more in the first stages."""
    small, more = divmod(len(layers), stages)
    firsts = [stage * small + min(stage, more) for stage in range(stages + 1)]
    return max(sum(layers[first:end]) for first, end in itertools.pairwise(firsts))
