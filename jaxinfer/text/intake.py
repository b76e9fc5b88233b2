"""Conversion of prompts and sampling parameters to validated requests of token ids."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxinfer.formats import json_values
from jaxinfer.request_checks import check_prompt_length, check_vocabulary, validate_request
from jaxinfer.sampling_params import (
    PARAMETERS,
    ContextLengthError,
    RequestError,
    SamplingLimits,
    SamplingParams,
    StructuredOutputs,
)
from jaxinfer.text.lengths import utf8_length
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import Request, Thinking

Prompt = str | Sequence[int]
AnyPrompt = Prompt | Mapping[str, Any]
"""A prompt of an offline call: text, token ids, or an object of a prompt with its images."""

# Fields read from generation_config.json, with their converters: other tools write 20.0 or "20" for 20.
_READ: Mapping[str, Callable[[object], Any]] = {
    **{
        row.name: json_values.real if row.kind == "float" else json_values.whole
        for row in PARAMETERS.values()
        if "generation_config" in row.also_in
    },
    "do_sample": json_values.flag,
}
_MUST_BE: Mapping[Callable[[object], Any], str] = {
    json_values.real: "a finite number",
    json_values.whole: "an integer",
    json_values.flag: "true or false",
}


def as_prompts(prompts: Any) -> list[AnyPrompt]:
    """Return the list of prompts for a text, a list of token ids, an object of a prompt, or a list of these."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        reason = f"={reprlib.repr(prompts)} must be a text, a list of token ids, or a list of these"
        raise RequestError("prompts", reason)
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # a single list of token ids
    return list(prompts)


_PROMPT_TOKENS = 16
"""Tokens at the end of a prompt that show whether it has begun reasoning."""


class ThoughtFormat(Protocol):
    """Protocol of a reasoning format: `jaxinfer.parsers.thought.Thought`."""

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...
    def is_open(self, prompt: str) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Intake:
    """Request validation for one model, shared by every API.

    Attributes:
        thought: reasoning format of its answers; None: unknown.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    limits: SamplingLimits
    thought: ThoughtFormat | None = None

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        add_special_tokens: bool = True,
        *,
        answers: bool = False,
    ) -> Request:
        """Tokenise and validate. ``max_tokens`` None becomes all that the context leaves.

        Args:
            answers: the prompt is a conversation: the output may begin with reasoning.

        Raises:
            RequestError: the request cannot be served; names field and value.
        """
        if params.stop:
            self._need_tokenizer("stop")
        if isinstance(prompt, str):
            self.check_text("prompt", prompt)
            prompt = self.encode("prompt", prompt, add_special_tokens)
        check_prompt_length(len(prompt), self.max_model_len)  # before copying
        ids = tuple(prompt)
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        bad_words = self._bad_words(params)
        validate_request(
            params,
            ids,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            stop_token_ids=stops,
            bad_words_ids=bad_words,
            limits=self.limits,
        )
        # As in other servers: max_tokens beyond the context is clipped, not rejected.
        room = self.max_model_len - len(ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        check_vocabulary(params, most, self.vocab_size, self.limits.vocabulary_bytes)
        params = dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        return Request(request_id, ids, params, stops, bad_words, thinking=self._thinking(ids, params, answers))

    def _thinking(self, prompt: tuple[int, ...], params: SamplingParams, answers: bool) -> Thinking | None:
        """Return the delimiters of the reasoning, if a grammar or a budget needs them."""
        asked, budget = params.structured_outputs, params.thinking_token_budget
        held = isinstance(asked, StructuredOutputs) and not asked.enable_in_reasoning
        if budget is None and not held:
            return None
        found = self._thought_behind(prompt, answers)
        if budget is not None and found is None and not self.ends_thoughts:
            raise RequestError("thinking_token_budget", f"={budget}: no token is known that ends this model's thought")
        return found

    def _thought_behind(self, prompt: tuple[int, ...], answers: bool) -> Thinking | None:
        begin, end = self._thought_tokens
        if self.thought is None or self.tokenizer is None or end is None:
            return None
        last = self.tokenizer.decode(prompt[-_PROMPT_TOKENS:], skip_special_tokens=False)
        is_open = self.thought.is_open(last)
        may_begin = answers and begin is not None and not last.rstrip().endswith(self.thought.end)
        return Thinking(begin, end, is_open) if is_open or may_begin else None

    @property
    def ends_thoughts(self) -> bool:
        """Whether a token is known that ends the model's reasoning."""
        return self._thought_tokens[1] is not None

    @property
    def _thought_tokens(self) -> tuple[int | None, int | None]:
        """Token ids around the reasoning, None where they are unknown."""
        if self.thought is None or self.tokenizer is None:
            return None, None
        return self.tokenizer.token_to_id(self.thought.begin), self.tokenizer.token_to_id(self.thought.end)

    def check_text(self, field: str, text: str) -> None:
        """Check whether a text can fit into the context, without tokenising it.

        Raises:
            RequestError: it cannot fit under any tokenisation.
        """
        most = None if self.tokenizer is None else self.tokenizer.most_bytes
        if most is None or len(text) < self.max_model_len:
            return
        least = -(-utf8_length(text) // most)
        if least >= self.max_model_len:
            raise ContextLengthError(
                field,
                f"has {len(text)} characters, which are at least {least} tokens and leave no room to generate: "
                f"prompt and output together have at most {self.max_model_len} (max_model_len)",
                f"at least {least} tokens",
                self.max_model_len,
            )

    def encode(self, field: str, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of the text in ``field`` of a request.

        Raises:
            RequestError: the model has no tokenizer, or that has no tokens for the text.
        """
        try:
            return self._need_tokenizer(field).encode(text, add_special_tokens)
        except TokenizerError as cause:
            raise RequestError(field, f": {cause}") from cause

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, except ids outside the model's vocabulary."""
        ids = () if self.tokenizer is None else self.tokenizer.eos_ids
        return frozenset(token_id for token_id in ids if token_id < self.vocab_size)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word as spelt within a text and, where that differs, at the beginning of one."""
        if not params.bad_words:
            return ()
        spelt = (
            self.encode("bad_words", lead + word.lstrip(), add_special_tokens=False)
            for word in params.bad_words
            for lead in ("", " ")
        )
        return tuple(dict.fromkeys(tuple(ids) for ids in spelt))

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(field, "is text, but the model has no tokenizer: pass token ids")
        return self.tokenizer


def recommended_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields of generation_config.json; ``do_sample`` false means greedy.

    Raises:
        RequestError: a value has a type that cannot be converted, or is out of range; names field and value.
    """
    found = {name: generation_config[name] for name in _READ if generation_config.get(name) is not None}
    fields = {name: _READ[name](said) for name, said in found.items()}
    for name, value in fields.items():
        if value is None:
            raise RequestError(name, f"={reprlib.repr(found[name])} must be {_MUST_BE[_READ[name]]}")
    if fields.pop("do_sample", None) is False:
        fields["temperature"] = 0.0
    SamplingParams(**fields)
    return fields
