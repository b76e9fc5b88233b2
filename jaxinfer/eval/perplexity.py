"""Perplexity of a text over windows of a fixed length, as Hugging Face's page on it defines.

A window of ``max_length`` tokens begins each ``stride`` tokens. Of each only those tokens count that no window before
it had, each given all tokens before it in its window; its first token, before which there is none, does not count. So
from the second window on each token that counts has at least ``max_length - stride`` before it.

The mean is over tokens. (The code on that page weighs all windows but the first with one token less than they have.)
See https://huggingface.co/docs/transformers/perplexity.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxinfer.llm import LLM, RequestOutput
from jaxinfer.sampling_params import RequestError, SamplingParams

AT_ONCE = 32  # windows in one call: what they return is in memory
_SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


class Window(NamedTuple):
    """A part of the text, of which the last ``counted`` tokens count."""

    begin: int
    end: int
    counted: int


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What was found.

    Attributes:
        loss: mean negative log likelihood, in nats a token.
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
    """Windows over a text of so many tokens, to the first that reaches its end."""
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
    """Perplexity of the text under the engine as it is, with its caches and its kernels.

    Args:
        progress: called with windows done, windows in all, and a name.

    Raises:
        RequestError: a window has no place in the context, or the text is shorter than two tokens.
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
    """Refuse what cannot be measured, before anything is.

    Raises:
        RequestError: see `measure`.
    """
    most = llm.engine.config.max_model_len - 1  # the engine always generates a token behind
    if not 2 <= max_length <= most:
        raise RequestError(
            "max_length", f"={max_length} must be from 2 to {most}: one token of the context is generated"
        )
    if not 1 <= stride <= max_length:
        raise RequestError("stride", f"={stride} must be from 1 to max_length={max_length}: no token is left out")
    if tokens < 2:
        raise RequestError(None, f"a text of {tokens} tokens has no perplexity: it needs at least 2")


def _losses(output: RequestOutput) -> list[float]:
    """Negative log likelihood of each token but the first."""
    places = zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=True)
    return [-candidates[token].logprob for candidates, token in places if candidates is not None]
