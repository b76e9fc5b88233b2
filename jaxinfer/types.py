"""Host-side records that cross room borders: what a request is, what a step does, what a parameter is.

Nothing here imports jax: the scheduler, the front end and the planner use these types without a device.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# --------------------------------------------------------------------------------------------------------------
# Requests


class RequestError(ValueError):
    """A request that cannot be served as asked. The message names the field and the value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 keeps every token. ``logprobs=N`` returns the chosen token and the
    N most likely ones at each generated position, ``prompt_logprobs=N`` the same for the prompt, both under the raw
    logits (before any processor). ``seed`` None is drawn once, at admission.

    Raises:
        RequestError: a value is out of range; the message names field and value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True


@dataclasses.dataclass(frozen=True)
class Request:
    """What the engine is asked to do: token ids only, text is the front end's business.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: at least one id, each within the vocabulary.
        params: validated sampling parameters; ``seed`` is resolved (never None) at admission.
        stop_token_ids: ids that end a sequence (EOS and the request's own), empty under ``ignore_eos`` without own ids.
        bad_words_ids: token sequences that must not appear in the output.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TokenLogprob(NamedTuple):
    """One candidate at one position: natural log of its probability under the raw logits, and its rank from 1."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(NamedTuple):
    """The chosen token at one position and the ``N`` most likely ones, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclasses.dataclass
class SequenceDelta:
    """What one step added to one sequence. ``index`` counts the ``n`` samples of a request."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None


# --------------------------------------------------------------------------------------------------------------
# Parameters of a model, declared once: shape, sharding, initialisation and checkpoint mapping derive from these.


@dataclasses.dataclass(frozen=True)
class Source:
    """One checkpoint tensor and the place of it in a (possibly fused) parameter.

    The tensor named ``name`` has ``shape`` in the checkpoint. It is transposed (2-D) if ``transpose``, then
    reshaped to ``reshape`` (if given), and lands in ``parameter[where]``.
    """

    name: str
    shape: tuple[int, ...]
    transpose: bool = False
    reshape: tuple[int, ...] | None = None
    where: tuple[slice | int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """An abstract parameter.

    Attributes:
        shape: as the forward pass uses it; matrices are [in, ..., out].
        axes: a logical axis name per dimension (None: never sharded); ``parallel`` maps them to mesh axes.
        init: "normal" (scaled by ``scale``), "ones" or "zeros": for random weights.
        sources: the checkpoint tensors that fill it.
        contract: how many leading dimensions a matmul with it contracts.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    scale: float = 0.02
    sources: tuple[Source, ...] = ()
    contract: int = 1


ParamTree = Mapping[str, "ParamSpec | ParamTree"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What distinguishes one layer's attention from another's: the sliding window in tokens (None: full)."""

    window: int | None = None


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The KV cache that a model needs. The only place that knows how many bytes a page has.

    A layer's pool is ``[pages, 2, kv_heads, page_size, head_dim]``: keys at index 0, values at 1.
    """

    layers: tuple[LayerSpec, ...]
    kv_heads: int
    head_dim: int

    def pool_shape(self, pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        return (pages, 2, self.kv_heads, page_size, self.head_dim)

    def bytes_per_page(self, page_size: int, itemsize: int) -> int:
        """Bytes of one page over all layers, for elements of ``itemsize`` bytes."""
        return len(self.layers) * 2 * self.kv_heads * page_size * self.head_dim * itemsize
