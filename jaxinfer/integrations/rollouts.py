"""What trainers need of `LLM`: samples as arrays, log-probabilities, and weights that change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.engine.core import EngineCore
from jaxinfer.models.model import Model
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights import each_param


@runtime_checkable
class WeightUpdate(Protocol):
    """Result of an update: see `LLM.update_weights`."""

    @property
    def version(self) -> int: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """The part of `LLM` that trainers use."""

    @property
    def model(self) -> Model: ...

    @property
    def engine(self) -> EngineCore: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def weight_version(self) -> int: ...

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, progress: bool | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt."""

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probabilities of completions."""

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        mode: str = "wait",
        partial: bool = False,
        names: str | None = None,
    ) -> WeightUpdate:
        """Replace the weights."""

    def pause(self, mode: str = "wait") -> Any:
        """Stop running steps."""

    def resume(self) -> Any:
        """Go on."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion.

    Attributes:
        tokens: int32 ids, with the one that ended it.
        logprobs: float32, of each token.
        text: without special tokens; "" if the model has no tokenizer.
        finish_reason: "stop" or "length", or why it failed.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    text: str
    finish_reason: str


def samples(
    llm: RolloutEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[Sample]]:
    """Return the samples of each prompt, with log-probabilities.

    Raises:
        RequestError: a prompt or a parameter is rejected, naming field and value.
    """
    asked = [dataclasses.replace(each, logprobs=0) for each in params]
    outputs = llm.generate([list(prompt) for prompt in prompts], asked, progress=False)
    return [[_sample(each) for each in output.outputs] for output in outputs]


def _sample(output: CompletionOutput) -> Sample:
    chosen = zip(output.token_ids, output.logprobs or (), strict=True)
    numbers = np.asarray([position[token].logprob for token, position in chosen], np.float32)
    return Sample(np.asarray(output.token_ids, np.int32), numbers, output.text, output.finish_reason or "")


def params_for(count: int, seed: int | None, **values: Any) -> list[SamplingParams]:
    """Return the parameters of ``count`` prompts, with different seeds: trainers repeat the prompt of a group.

    Raises:
        RequestError: a value is rejected, naming it.
    """
    return [SamplingParams(**values, seed=None if seed is None else seed + index) for index in range(count)]


def update(llm: RolloutEngine, weights: Any, names: str | None = None, version: int | None = None) -> WeightUpdate:
    """Replace the weights of an engine by those of a trainer, which may be in a wider dtype.

    Raises:
        WeightsError: the weights do not fit the model; the first array that does not is named.
    """
    converted = ((".".join(path), array) for path, array in each_param(llm.model, weights, names=names, cast=True))
    return llm.update_weights(converted, version=version, names="own")
