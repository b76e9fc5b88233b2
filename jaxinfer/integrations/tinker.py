"""`TinkerClient`: the calls of Tinker's sampling client (https://tinker-docs.thinkingmachines.ai) over `LLM`.

For trainers in one process with their sampler: calls return their results, where Tinker's return futures of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.integrations.rollouts import Sample, samples, update
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class SampledSequence:
    """A sample; fields as in Tinker. ``stop_reason`` is "stop" or "length"."""

    stop_reason: str
    tokens: list[int]
    logprobs: list[float]


@dataclasses.dataclass(frozen=True)
class SampleResponse:
    """The samples of a prompt, and the log-probabilities of the prompt's tokens where they were asked for."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclasses.dataclass(frozen=True)
class SavedWeights:
    """Weights that are served. ``path`` names them, ``version`` is that of `LLM.weight_version`."""

    path: str
    version: int


class TinkerClient:
    """A sampling client whose engine is in this process.

    A prompt is a list of token ids, or a ``ModelInput`` of Tinker (anything with ``to_ints()``). Sampling parameters
    are a `SamplingParams` or an object with Tinker's fields: max_tokens, temperature, top_p, top_k, seed, stop.

    Args:
        llm: an `LLM`.
        names: convention of the weights' names, see `jaxinfer.weights.params_from`.
    """

    def __init__(self, llm: LLM, *, names: str | None = None) -> None:
        self._llm, self._names = llm, names

    def sample(
        self, prompt: Any, num_samples: int = 1, sampling_params: Any = None, include_prompt_logprobs: bool = False
    ) -> SampleResponse:
        """Complete a prompt ``num_samples`` times.

        Raises:
            RequestError: the prompt or a parameter is rejected, naming field and value.
        """
        ids = _ids(prompt)
        params = dataclasses.replace(_params(sampling_params), n=num_samples)
        found = samples(self._llm, [ids], [params])[0]
        return SampleResponse(
            [_sequence(each) for each in found], self.compute_logprobs(ids) if include_prompt_logprobs else None
        )

    def compute_logprobs(self, prompt: Any) -> list[float | None]:
        """Return the log-probability of each token after those before it, as `LLM.logprobs`; None for the first."""
        ids = _ids(prompt)
        if len(ids) < 2:
            return [None] * len(ids)
        return [None, *self._llm.logprobs([ids[:1]], [ids[1:]])[0].tolist()]

    def save_weights_for_sampler(
        self, weights: Any, name: str | None = None, version: int | None = None
    ) -> SavedWeights:
        """Serve the weights of a trainer from the next sample on.

        Args:
            weights: in a form that `jaxinfer.weights.params_from` takes, which may be in a wider dtype.
            name: of the path that is returned; default: the version.

        Raises:
            WeightsError: they do not fit the model; the first array that does not is named.
        """
        served = update(self._llm, weights, self._names, version).version
        return SavedWeights(f"jaxinfer://{self._llm.model.name or 'model'}/{served if name is None else name}", served)


def _ids(prompt: Any) -> list[int]:
    return [int(token) for token in (prompt.to_ints() if hasattr(prompt, "to_ints") else prompt)]


def _params(given: Any) -> SamplingParams:
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    stop = getattr(given, "stop", None) or ()
    ids = not isinstance(stop, str) and all(isinstance(each, int) for each in stop)
    fields = {name: getattr(given, name, None) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    known = {name: value for name, value in fields.items() if value is not None}
    return SamplingParams(**known, **({"stop_token_ids": list(stop)} if ids else {"stop": stop}))


def _sequence(sample: Sample) -> SampledSequence:
    return SampledSequence(sample.finish_reason, sample.tokens.tolist(), sample.logprobs.tolist())
