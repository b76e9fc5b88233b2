"""What trainers need of `LLM`: samples as arrays, log-probabilities, and weights that change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.outputs import CompletionOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.served import WeightUpdate


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


def samples(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[Sample]]:
    """Return the samples of each prompt, with log-probabilities.

    Raises:
        RequestError: a prompt or a parameter is rejected, naming field and value.
    """
    asked = [dataclasses.replace(each, logprobs=0) for each in params]
    outputs = llm.generate([list(prompt) for prompt in prompts], asked, progress=False)
    return [[_sample(each) for each in output.outputs] for output in outputs]


def _sample(output: CompletionOutput) -> Sample:
    arrays = output.arrays
    assert arrays.logprobs is not None  # they were requested
    return Sample(arrays.token_ids, arrays.logprobs, output.text, output.finish_reason or "")


def params_for(count: int, seed: int | None, **values: Any) -> list[SamplingParams]:
    """Return the parameters of ``count`` prompts, with different seeds: trainers repeat the prompt of a group.

    Raises:
        RequestError: a value is rejected, naming it.
    """
    return [SamplingParams(**values, seed=None if seed is None else seed + index) for index in range(count)]


def update(llm: LLM, weights: Any, names: str | None = None, version: int | None = None) -> WeightUpdate:
    """Replace the weights of an engine by those of a trainer, which may be in a wider dtype.

    Raises:
        WeightsError: the weights do not fit the model; the first array that does not is named.
    """
    return llm.update_weights(weights, version=version, names=names, cast=True)
