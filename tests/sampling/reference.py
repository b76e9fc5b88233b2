"""A float64 numpy reference of the sampler with sorts: written from the definitions, sharing no code with it."""

import dataclasses

import jax
import numpy as np
import scipy.stats

from jaxinfer.engine.scheduling.sequence import needs_sampler_state
from jaxinfer.sampling import HostSlots, SamplingLimits, SlotParams, SlotState, admit, neutral_slots, new_state
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

LIMITS = SamplingLimits(max_stop_ids=4, max_bad_words=4, max_bad_word_tokens=3, max_logprobs=5)
ADMIT = jax.jit(admit)


@dataclasses.dataclass(frozen=True)
class Row:
    """A slot in the middle of a request: parameters, generated tokens and logits."""

    logits: np.ndarray
    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def request(self) -> Request:
        params = self.params if self.params.seed is not None else dataclasses.replace(self.params, seed=0)
        return Request("r", self.prompt, params, frozenset(self.stop_ids), self.bad_words)

    def processed(self) -> np.ndarray:
        """Return the logits after every processor."""
        logits, asked = self.logits.astype(np.float64), self.params
        if asked.allowed_token_ids is not None:
            barred = np.setdiff1d(np.arange(len(logits)), asked.allowed_token_ids)
            logits[barred] = -np.inf
        for token, bias in (asked.logit_bias or {}).items():
            logits[token] += bias
        for word in self.bad_words:
            if len(word) == 1 or self.output[-len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf
        if len(self.output) < asked.min_tokens:
            logits[list(self.stop_ids)] = -np.inf
        for token in {*self.prompt, *self.output}:
            value = logits[token]
            logits[token] = value / asked.repetition_penalty if value > 0 else value * asked.repetition_penalty
        for token in self.output:
            logits[token] -= asked.frequency_penalty
        for token in set(self.output):
            logits[token] -= asked.presence_penalty
        return logits

    def probabilities(self) -> np.ndarray:
        """Return the distribution of the next token."""
        logits, asked = self.processed(), self.params
        if asked.temperature == 0:
            return np.eye(len(logits))[np.argmax(logits)]
        weights = np.exp((logits - logits.max()) / asked.temperature)
        keep = weights >= asked.min_p
        if asked.top_n_sigma:
            keep &= logits >= logits.max() - asked.top_n_sigma * logits[logits > -np.inf].std()
        if asked.top_k:
            keep &= logits >= np.sort(logits)[::-1][: asked.top_k][-1]
        weights = np.where(keep, weights, 0)
        return normalised(np.where(nucleus(weights, asked.top_p), weights, 0))


def normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Return the mask of top-p: a token is kept if all strictly likelier ones have less than ``top_p`` of the mass."""
    values, inverse, times = np.unique(-weights, return_inverse=True, return_counts=True)
    mass = np.cumsum(-values * times)
    above = np.concatenate([[0], mass[:-1]])
    return (above < top_p * mass[-1])[inverse] & (weights > 0)


def slots_and_state(rows: list[Row], indices: list[int] | None = None) -> tuple[SlotParams, SlotState]:
    """Return the sampler's inputs as the engine makes them: admission, then the outputs so far."""
    host, vocab = HostSlots(len(rows), LIMITS), len(rows[0].logits)
    state = new_state(len(rows), vocab, LIMITS)
    for slot, row in enumerate(rows):
        host.set(slot, row.request, indices[slot] if indices else 0)
        if needs_sampler_state(row.request):
            state = ADMIT(state, np.int32(slot), *HostSlots.state_rows(row.request, vocab))
        counts = np.bincount(row.output, minlength=vocab)
        recent = ([-1] * LIMITS.max_bad_word_tokens + list(row.output))[-LIMITS.max_bad_word_tokens + 1 :]
        state = state._replace(
            counts=state.counts.at[slot].set(counts.astype(np.int32)),
            recent=state.recent.at[slot].set(np.array(recent, np.int32)),
        )
    return host.snapshot(), state


def repeated(row: Row, times: int) -> tuple[SlotParams, SlotState]:
    """Return the slot many times, each copy with its own seed."""
    one, state = slots_and_state([row])
    slots = SlotParams(*(np.repeat(x, times, axis=0) for x in one))
    slots.seed[:] = np.random.default_rng(0).integers(2**32, size=(times, 2))
    return slots, SlotState(*(np.repeat(np.asarray(x), times, axis=0) for x in state))


def p_value(draws: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the chi-square p-value; tokens of fewer than 5 expected draws share a bin. Impossible draws give 0."""
    observed = np.bincount(draws, minlength=len(probabilities))
    if observed[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(draws)
    rare = expected < 5
    bins = [*zip(observed[~rare], expected[~rare], strict=True), (observed[rare].sum(), expected[rare].sum())]
    seen, hoped = np.array([pair for pair in bins if pair[1] > 0]).T
    return float(scipy.stats.chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue) if len(seen) > 1 else 1.0


def neutral(rows: int) -> SlotParams:
    return neutral_slots(rows, LIMITS)
