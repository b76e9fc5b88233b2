"""Sampling parameters of each slot, set at admission, and the sampler state, which changes with every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jaxinfer.sampling_params import PARAMETERS, SamplingLimits
from jaxinfer.types import Request

# float32 would round larger numbers to infinity or flush smaller ones to zero, and turn masked logits into NaN.
_LARGE = 1e30
_SMALL = 1e-30
_INT32 = (-(2**31), 2**31 - 1)
_DTYPES: Mapping[str, type[np.generic]] = {"float": np.float32, "int": np.int32}
_NUMBERS = {row.name: row for row in PARAMETERS.values() if row.neutral is not None}


class SlotParams(NamedTuple):
    """Sampling parameters per slot, on the host (numpy) or the device. A neutral value switches its feature off.

    Fields that are missing below are those of `SamplingParams`; their neutral values are in its table.

    Attributes:
        seed: high and low word.
        sample_index: index among the request's ``n`` samples.
        has_bias: the slot's row of ``SlotState.bias`` applies.
        stop_ids: banned while fewer than ``min_tokens`` are generated; padded with -1.
        bad_words: right-aligned token sequences padded with -1; a row of -1 is unused.
        logprobs: the request wants log probabilities.
        typical: typical acceptance of drafts, see `jaxinfer.sampling.sample`.
        constrained: the row of the step's mask applies: of a grammar, a thinking budget or a forced token.
    """

    temperature: Float32[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float32[Array, " rows"]
    min_p: Float32[Array, " rows"]
    top_n_sigma: Float32[Array, " rows"]
    presence_penalty: Float32[Array, " rows"]
    frequency_penalty: Float32[Array, " rows"]
    repetition_penalty: Float32[Array, " rows"]
    min_tokens: Int32[Array, " rows"]
    seed: UInt32[Array, "rows 2"]
    sample_index: Int32[Array, " rows"]
    has_bias: Bool[Array, " rows"]
    stop_ids: Int32[Array, "rows stops"]
    bad_words: Int32[Array, "rows words length"]
    logprobs: Bool[Array, " rows"]
    typical: Bool[Array, " rows"]
    constrained: Bool[Array, " rows"]


class SlotState(NamedTuple):
    """Sampler state by slot on the device, donated to every step.

    Attributes:
        counts: how often the slot generated each token.
        prompt: whether the token is in the prompt.
        bias: added to the logits; -inf bans a token.
        recent: the last generated tokens, newest last; -1 where there is none yet.
    """

    counts: Int32[Array, "rows vocab"]
    prompt: Bool[Array, "rows vocab"]
    bias: Float32[Array, "rows vocab"]
    recent: Int32[Array, "rows tail"]


def first_rows[Rows: (SlotParams, SlotState)](slots: Rows, count: int) -> Rows:
    """Return the first ``count`` rows of each array."""
    return type(slots)(*(array[:count] for array in slots))


def neutral_slots(rows: int, limits: SamplingLimits) -> SlotParams:
    """Make numpy parameters of ``rows`` greedy slots with every feature off."""

    def full(value: float | None, dtype: type[np.generic], *shape: int) -> Any:
        return np.full((rows, *shape), value, dtype)

    return SlotParams(
        **{name: full(row.neutral, _DTYPES[row.kind]) for name, row in _NUMBERS.items()},
        seed=full(0, np.uint32, 2),
        sample_index=full(0, np.int32),
        has_bias=full(False, np.bool_),
        stop_ids=full(-1, np.int32, limits.max_stop_ids),
        bad_words=full(-1, np.int32, limits.max_bad_words, limits.max_bad_word_tokens),
        logprobs=full(False, np.bool_),
        typical=full(False, np.bool_),
        constrained=full(False, np.bool_),
    )


def new_state(rows: int, vocab_size: int, limits: SamplingLimits) -> SlotState:
    """Make the state of ``rows`` slots without generated tokens."""
    return SlotState(
        counts=jnp.zeros((rows, vocab_size), jnp.int32),
        prompt=jnp.zeros((rows, vocab_size), jnp.bool_),
        bias=jnp.zeros((rows, vocab_size), jnp.float32),
        recent=jnp.full((rows, limits.max_bad_word_tokens - 1), -1, jnp.int32),
    )


def admit(
    state: SlotState, slot: Int[Array, ""], prompt_mask: Bool[Array, " vocab"], bias: Float[Array, " vocab"]
) -> SlotState:
    """Reset one slot for a new request: no generated tokens, its prompt and bias set. No effect for a slot beyond the
    last one."""
    return SlotState(
        counts=state.counts.at[slot].set(0),
        prompt=state.prompt.at[slot].set(prompt_mask),
        bias=state.bias.at[slot].set(bias),
        recent=state.recent.at[slot].set(-1),
    )


def keep_slot(state: SlotState, slot: Int[Array, ""]) -> SlotState:
    """Copy one slot's state, as the state of one row."""
    return SlotState(*(lax.dynamic_slice_in_dim(x, slot, 1) for x in state))


def resume_slot(state: SlotState, slot: Int[Array, ""], saved: SlotState) -> SlotState:
    """Restore one slot to the state that `keep_slot` copied, from the same or another slot. No effect for a slot beyond
    the last one."""
    return SlotState(*(x.at[slot].set(row[0], mode="drop") for x, row in zip(state, saved, strict=True)))


class HostSlots:
    """Host copy of ``SlotParams``: written one slot at a time, read as snapshots."""

    def __init__(self, rows: int, limits: SamplingLimits) -> None:
        self._neutral = neutral_slots(1, limits)
        self._params = neutral_slots(rows, limits)
        self._snapshot = neutral_slots(rows, limits)
        self._written: set[int] = set()  # slots written since the last snapshot

    def set(self, slot: int, request: Request, sample_index: int = 0) -> None:
        """Write a validated request's parameters into ``slot``.

        Raises:
            ValueError: the request's seed is not resolved.
        """
        params = request.params
        if params.seed is None:
            raise ValueError(f"request {request.request_id}: the seed must be resolved before admission")
        self.clear(slot)
        mine = self._params
        for name, row in _NUMBERS.items():
            value = getattr(params, name)
            least, most = (_SMALL if value > 0 else -_LARGE, _LARGE) if row.kind == "float" else _INT32
            getattr(mine, name)[slot] = min(max(value, least), most)
        mine.seed[slot] = (params.seed >> 32) & 0xFFFFFFFF, params.seed & 0xFFFFFFFF
        mine.sample_index[slot] = sample_index
        mine.has_bias[slot] = bool(params.logit_bias) or params.allowed_token_ids is not None
        mine.stop_ids[slot, : len(request.stop_token_ids)] = sorted(request.stop_token_ids)
        for word, ids in enumerate(request.bad_words_ids):
            mine.bad_words[slot, word, -len(ids) :] = ids
        mine.logprobs[slot] = params.logprobs is not None
        mine.typical[slot] = params.typical
        mine.constrained[slot] = any(
            each is not None for each in (params.grammar, request.thinking, params.forced_token_ids)
        )

    def clear(self, slot: int) -> None:
        """Make ``slot`` neutral."""
        for mine, neutral in zip(self._params, self._neutral, strict=True):
            mine[slot] = neutral[0]
        self._written.add(slot)

    def snapshot(self) -> SlotParams:
        """Return arrays that later writes do not change; an unchanged field is the array of the last snapshot."""
        if self._written:
            slots = list(self._written)
            pairs = zip(self._params, self._snapshot, strict=True)
            same = (last if np.array_equal(mine[slots], last[slots]) else mine.copy() for mine, last in pairs)
            self._snapshot = SlotParams(*same)
            self._written.clear()
        return self._snapshot

    @staticmethod
    def state_rows(
        request: Request, vocab_size: int
    ) -> tuple[Bool[np.ndarray, " vocab"], Float32[np.ndarray, " vocab"]]:
        """Return the arguments of ``admit``: which tokens the prompt has, and the bias of each token."""
        prompt = np.zeros(vocab_size, np.bool_)
        prompt[list(request.prompt_token_ids)] = True
        allowed = request.params.allowed_token_ids
        bias = np.full(vocab_size, 0 if allowed is None else -np.inf, np.float32)
        bias[list(allowed or ())] = 0
        for token, value in (request.params.logit_bias or {}).items():
            bias[token] += value
        return prompt, bias
