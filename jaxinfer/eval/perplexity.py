"""Perplexity of a text over windows of a fixed length, as defined in the Hugging Face documentation.

A window of ``max_length`` tokens begins every ``stride`` tokens. In each window only the tokens that no earlier window
covers count, each conditioned on all tokens before it in its window; the first token of the text, which has no context,
does not count. So from the second window on each counted token has at least ``max_length - stride`` tokens of context.

The mean is over tokens. (The code in that documentation weighs each window but the first with one token less than it
has.) See https://huggingface.co/docs/transformers/perplexity.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import RequestError, SamplingParams

AT_ONCE = 32  # windows per call, whose outputs are in memory
_SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


class Window(NamedTuple):
    """A slice of the text, of which the last ``counted`` tokens count."""

    begin: int
    end: int
    counted: int


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Result of a measurement.

    Attributes:
        loss: mean negative log likelihood, in nats per token.
        scored: tokens that counted.
    """

    loss: float
    scored: int
    tokens: int
    windows: int
    max_length: int
    stride: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def windows(tokens: int, max_length: int, stride: int) -> Iterator[Window]:
    """Yield windows over a text of ``tokens`` tokens, up to the first that reaches its end."""
    done = 0
    for begin in range(0, tokens, stride):
        end = min(begin + max_length, tokens)
        yield Window(begin, end, end - max(done, begin + 1))
        done = end
        if end == tokens:
            return


def measure(
    llm: LLM,
    token_ids: Sequence[int],
    max_length: int,
    stride: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> Perplexity:
    """Measure the perplexity of the text under the engine as configured, with its caches and kernels.

    Args:
        progress: called with windows done, total windows, and a name.

    Raises:
        RequestError: a window does not fit into the context, or the text is shorter than two tokens.
    """
    check(llm, len(token_ids), max_length, stride)
    all_windows = list(windows(len(token_ids), max_length, stride))
    losses: list[float] = []
    done = 0
    for batch in itertools.batched(all_windows, AT_ONCE):
        outputs = llm.generate([list(token_ids[each.begin : each.end]) for each in batch], _SCORING)
        for window, output in zip(batch, outputs, strict=True):
            found = _losses(output)
            losses += found[len(found) - window.counted :]
        done += len(batch)
        if progress is not None:
            progress(done, len(all_windows), "windows")
    mean = math.fsum(losses) / len(losses)
    return Perplexity(mean, len(losses), len(token_ids), len(all_windows), max_length, stride)


def check(llm: LLM, tokens: int, max_length: int, stride: int) -> None:
    """Reject invalid parameters before the measurement.

    Raises:
        RequestError: see `measure`.
    """
    most = llm.engine.config.max_model_len - 1  # the engine always generates one token after the prompt
    if not 2 <= max_length <= most:
        raise RequestError(
            "max_length", f"={max_length} must be from 2 to {most}: one token of the context is generated"
        )
    if not 1 <= stride <= max_length:
        raise RequestError("stride", f"={stride} must be from 1 to max_length={max_length}: no token is left out")
    if tokens < 2:
        raise RequestError(None, f"a text of {tokens} tokens has no perplexity: it needs at least 2")


def _losses(output: RequestOutput) -> list[float]:
    """Return the negative log likelihood of each token except the first."""
    places = zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=True)
    return [-candidates[token].logprob for candidates, token in places if candidates is not None]
