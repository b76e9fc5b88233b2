"""Validation of a request against the model: ids within the vocabulary, lengths, and fixed limits of the device arrays.

Every API (Python, command line, servers) calls ``validate_request``, so all of them reject the same requests with the
same message. No jax.
"""

from __future__ import annotations

import dataclasses
import numbers
import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxinfer.sampling_params import ContextLengthError, RequestError, SamplingParams


@dataclasses.dataclass(frozen=True)
class SamplingLimits:
    """Limits on what a request may use of the sampler, fixed before compilation: array sizes (counts) and drafts.

    Attributes:
        max_stop_ids: token ids that can end one request (EOS and its own).
        max_bad_words: forbidden token sequences of one request.
        max_bad_word_tokens: tokens of one such sequence.
        max_logprobs: top logprobs of one position.
        drafts: the engine speculates, so that requests may choose an acceptance rule.
        grammars: the engine supports structured outputs.
    """

    max_stop_ids: int = 64
    max_bad_words: int = 32
    max_bad_word_tokens: int = 8
    max_logprobs: int = 20
    drafts: bool = False
    grammars: bool = False


def validate_request(
    params: SamplingParams,
    prompt_token_ids: Sequence[Any],
    *,
    vocab_size: int,
    max_model_len: int,
    stop_token_ids: Collection[int] = frozenset(),
    bad_words_ids: Sequence[Sequence[int]] = (),
    limits: SamplingLimits = SamplingLimits(),
) -> None:
    """Reject a request that this model cannot serve.

    Args:
        params: already checked at construction.
        prompt_token_ids: the prompt, special tokens included, as the caller gave it.
        vocab_size: number of token ids that the model scores.
        max_model_len: maximum tokens of prompt and output together.
        stop_token_ids: all ids that end the sequence, those of the request and EOS.
        bad_words_ids: ``params.bad_words`` as token sequences.
        limits: fixed limits of the engine.

    Raises:
        RequestError: the first error; the message names field and value.
    """
    _check_prompt(prompt_token_ids, vocab_size, max_model_len)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("logit_bias key", params.logit_bias or (), vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    stops = {*stop_token_ids, *(params.stop_token_ids or ())}
    if len(stops) > limits.max_stop_ids:
        most = f"must hold at most {limits.max_stop_ids} ids, EOS included, not {len(stops)}"
        raise RequestError("stop_token_ids", most)
    _check_bad_words(bad_words_ids, vocab_size, limits)
    _check_logprobs("logprobs", params.logprobs, limits.max_logprobs)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, limits.max_logprobs)
    if params.typical and not limits.drafts:
        none = "needs drafts, and there are none: speculation is off (speculative)"
        raise RequestError("speculation.acceptance", f"='typical' {none}")
    if params.grammar is not None and not limits.grammars:
        raise RequestError(
            "structured_outputs",
            "is not served: structured_output_helpers is 0, or enable_dp_attention is on, or there is no tokenizer",
        )
    if params.thinking_token_budget is not None and not limits.grammars:
        place, needs = "thinking_token_budget", "what structured outputs need, and these are not served"
        raise RequestError(place, f"={params.thinking_token_budget} needs {needs}")
    _check_something_is_left(params, stops, bad_words_ids)


def _check_prompt(prompt: Sequence[Any], vocab_size: int, max_model_len: int) -> None:
    check_prompt_length(len(prompt), max_model_len)
    check_token_ids("prompt_token_ids", prompt, vocab_size)


def check_prompt_length(count: int, max_model_len: int) -> None:
    """Reject a prompt length that is 0 or leaves no token to generate.

    Raises:
        RequestError: the message names the number.
    """
    if count == 0:
        raise RequestError("prompt_token_ids", "is empty: a prompt has at least one token")
    if count + 1 > max_model_len:
        raise ContextLengthError(
            "prompt_token_ids",
            f"has {count} tokens, which leaves no room to generate: "
            f"prompt and output together have at most {max_model_len} (max_model_len)",
            f"{count} tokens",
            max_model_len,
        )


def check_token_ids(field: str, ids: Iterable[Any], vocab_size: int) -> None:
    """Reject values that are not ids of the vocabulary.

    Raises:
        RequestError: the first such value; the message names field and value.
    """
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise RequestError(field, f": {reprlib.repr(token)} must be an integer")
        if not 0 <= int(token) < vocab_size:
            raise RequestError(field, f": {token} must be a token id from 0 to {vocab_size - 1}")


def _check_bad_words(words: Sequence[Sequence[int]], vocab_size: int, limits: SamplingLimits) -> None:
    if len(words) > limits.max_bad_words:
        raise RequestError("bad_words", f"must make at most {limits.max_bad_words} token sequences, not {len(words)}")
    for word in words:
        if not 0 < len(word) <= limits.max_bad_word_tokens:
            sizes = f"1 to {limits.max_bad_word_tokens} tokens, not {len(word)}"
            raise RequestError("bad_words", f": {list(word)} must have {sizes}")
        check_token_ids("bad_words", word, vocab_size)


def _check_logprobs(field: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise RequestError(field, f"={value} must be at most {most}")


def _check_something_is_left(params: SamplingParams, stops: set[int], bad_words: Sequence[Sequence[int]]) -> None:
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens > 0:
        banned |= stops
    if banned.issuperset(params.allowed_token_ids):
        allowed = list(params.allowed_token_ids)
        raise RequestError("allowed_token_ids", f"={allowed} leaves no token: bad_words and min_tokens bar all")
