"""Agreement of log-probabilities that an engine served with those of a trainer: requests to serve, and differences."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution.on_policy import GivenTokens, ServedPrograms, applied_logprobs
from jaxinfer.lora.adapter import Adapter
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import RequestError, SamplingParams

AT_ONCE = 16  # sequences of a call
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
)

# A function of tokens, prompt lengths and lengths, see `Sequences`.
Logprobs = Callable[..., Any]


class Sample(NamedTuple):
    """A generated sequence: the ids of the prompt and of the generated tokens, and these tokens' log-probabilities."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of log-probabilities from the served ones.

    Attributes:
        tokens: generated tokens that were compared.
        largest: greatest magnitude of a difference.
        kl: mean of ``exp(d) - 1 - d`` over the differences ``d``, the estimator k3 of the KL divergence.
    """

    tokens: int
    largest: float
    kl: float


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Generated sequences with their served log-probabilities, padded on the right."""

    tokens: Int[np.ndarray, "batch time"]
    prompt_lengths: Int[np.ndarray, " batch"]
    lengths: Int[np.ndarray, " batch"]
    served: Float32[np.ndarray, "batch positions"]

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Sequences:
        listed = list(samples)
        prompts = np.array([len(each.prompt) for each in listed], np.int32)
        lengths = prompts + np.array([len(each.token_ids) for each in listed], np.int32)
        longest = lengths.max(initial=1)
        tokens, served = np.zeros((len(listed), longest), np.int32), np.zeros((len(listed), longest - 1), np.float32)
        for row, each in enumerate(listed):
            tokens[row, : lengths[row]] = [*each.prompt, *each.token_ids]
            served[row, prompts[row] - 1 : lengths[row] - 1] = each.logprobs
        return cls(tokens, prompts, lengths, served)

    @property
    def parts(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and generated tokens of each sequence."""
        rows = zip(self.tokens.tolist(), self.prompt_lengths, self.lengths, strict=True)
        return [(row[:begin], row[begin:end]) for row, begin, end in rows]

    @property
    def _generated(self) -> Bool[np.ndarray, "batch positions"]:
        at = np.arange(self.served.shape[1])
        return (at >= self.prompt_lengths[:, None] - 1) & (at < self.lengths[:, None] - 1)

    def batches(self, size: int) -> Iterator[Sequences]:
        """Cut into batches of one shape; the last one is filled up with sequences without generated tokens."""
        missing = -len(self.tokens) % size
        tokens, served = (np.pad(x, ((0, missing), (0, 0))) for x in (self.tokens, self.served))
        begins, ends = (np.pad(x, (0, missing), constant_values=1) for x in (self.prompt_lengths, self.lengths))
        for at in range(0, len(tokens), size):
            part = slice(at, at + size)
            yield Sequences(tokens[part], begins[part], ends[part], served[part])

    def difference(self, compute: Logprobs) -> Difference:
        """Compare with a function of tokens, prompt lengths and lengths."""
        batches = list(self.batches(AT_ONCE))
        found = [np.asarray(compute(each.tokens, each.prompt_lengths, each.lengths)) for each in batches]
        return self.difference_from([each[batch._generated] for each, batch in zip(found, batches, strict=True)])

    def difference_from(self, found: Sequence[np.ndarray]) -> Difference:
        """Compare with log-probabilities of the generated tokens, those of one or more sequences in an array."""
        differences = np.concatenate(found).astype(np.float64) - self.served[self._generated]
        # A NaN is a difference.
        largest = float(np.nan_to_num(np.abs(differences), nan=np.inf).max(initial=0))
        return Difference(differences.size, largest, float((np.expm1(differences) - differences).mean()))


def training_step(model: Model, programs: ServedPrograms, adapter: Adapter | None = None) -> Logprobs:
    """Return `Model.logprobs` as a trainer runs it: compiled with a loss and its gradient."""

    def loss(
        params: Any, lora: Adapter | None, tokens: Array, prompt_lengths: Array, lengths: Array
    ) -> tuple[Array, Array]:
        found = model.logprobs(params, tokens, like=programs, prompt_lengths=prompt_lengths, lengths=lengths, lora=lora)
        return found.mean(), found

    step = jax.jit(jax.grad(loss, (0, 1), has_aux=True, allow_int=True))
    return lambda *given: step(model.params, adapter, *map(jnp.asarray, given))[1]


def applied(model: Model) -> Logprobs:
    """Return the same by `Model.apply`."""
    step = jax.jit(lambda params, *given: applied_logprobs(model, params, GivenTokens(*given)))
    return lambda *given: step(model.params, *given)


def requests(
    engine: ResolvedEngine, vocab: int, sequences: int, max_tokens: int, seed: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of random tokens, a third of them with a common prefix, and mixed sampling parameters.

    Raises:
        RequestError: ``max_tokens`` leave no room for a prompt.
    """
    rng = np.random.default_rng(seed)
    longest = min(engine.max_model_len - max_tokens, 2 * engine.prefill_sizes[-1] + engine.page_size)
    if longest < 1:
        raise RequestError("max_tokens", f"={max_tokens} leaves no room for a prompt in {engine.max_model_len} tokens")
    shared, prompts, params = rng.integers(0, vocab, longest).tolist(), list[list[int]](), list[SamplingParams]()
    for kind in itertools.cycle(_KINDS):
        own = {**kind, "logprobs": 0, "max_tokens": max_tokens, "seed": seed + len(prompts), "ignore_eos": True}
        params.append(SamplingParams(**own))
        length = int(np.exp(rng.uniform(0, np.log(longest))).round())
        kept = int(rng.integers(length)) if len(prompts) % 3 == 0 else 0
        prompts.append(shared[:kept] + rng.integers(0, vocab, length - kept).tolist())
        if sum(each.n for each in params) >= sequences:
            return prompts, params
    raise AssertionError
