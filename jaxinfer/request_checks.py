"""Checks of a request that need the model and the engine: vocabulary, context and limits. No jax."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxinfer.sampling_params import ContextLengthError, RequestError, SamplingLimits, SamplingParams

_LIMITS = SamplingLimits()


def validate_request(
    params: SamplingParams,
    prompt_token_ids: Sequence[Any],
    *,
    vocab_size: int,
    max_model_len: int,
    stop_token_ids: Collection[int] = frozenset(),
    bad_words_ids: Sequence[Sequence[int]] = (),
    limits: SamplingLimits = _LIMITS,
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
    if params.forced_token_ids is not None:
        _check_trace(params.forced_token_ids, len(prompt_token_ids), vocab_size, max_model_len, limits)
    check_token_ids("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    if params.return_sampling_mask and not _filters(params):
        why = "needs one of top_p, top_k, min_p, top_n_sigma, allowed_token_ids: nothing is filtered"
        raise RequestError("return_sampling_mask", f"=True {why}")
    if params.logprobs == -1 and not limits.whole:
        raise RequestError("logprobs", "=-1, the whole vocabulary, needs max_logprobs=-1 (enable_training_outputs)")
    if (name := params.training_output) is not None and not limits.training:
        raise RequestError(name, "is not served: enable_training_outputs is off")
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


def _filters(params: SamplingParams) -> bool:
    """Whether the sampler draws from a part of the vocabulary."""
    numbers = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or params.top_n_sigma > 0
    return params.temperature == 0 or numbers or params.allowed_token_ids is not None or params.grammar is not None


def check_vocabulary(params: SamplingParams, tokens: int, vocab_size: int, most: int | None) -> None:
    """Reject log probabilities of the whole vocabulary that take more than ``most`` bytes.

    Args:
        tokens: maximum number of tokens of an output.
        most: None: no limit.

    Raises:
        RequestError: the message names the number and the limit.
    """
    count = 4 * vocab_size * tokens * params.n
    if params.logprobs == -1 and most is not None and count > most:
        size = f"{tokens} tokens, {params.n} outputs, {vocab_size} log probabilities of 4 bytes: {count} bytes"
        raise RequestError("logprobs", f"=-1 is at most {most} bytes of a request (vocabulary_bytes), not {size}")


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


def _check_trace(
    forced: Sequence[int], prompt: int, vocab_size: int, max_model_len: int, limits: SamplingLimits
) -> None:
    """Check forced tokens: a trace is never cut."""
    check_token_ids("forced_token_ids", forced, vocab_size)
    if not limits.masks:
        why = "structured_output_helpers is 0, or enable_dp_attention is on"
        raise RequestError("forced_token_ids", f"is not served: {why}")
    if prompt + len(forced) > max_model_len:
        raise ContextLengthError(
            "forced_token_ids",
            f"has {len(forced)} tokens after a prompt of {prompt}: together they have at most {max_model_len} "
            f"(max_model_len)",
            f"{prompt + len(forced)} tokens",
            max_model_len,
        )


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
