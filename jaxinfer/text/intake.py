"""Make a validated request of token ids from a prompt and sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.text.lengths import utf8_length
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import Request
from jaxinfer.validate import SamplingLimits, check_prompt_length, validate_request

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Intake:
    """The model as a door needs to know it to accept requests. One validator serves every door."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    limits: SamplingLimits

    def request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, add_special_tokens: bool = True
    ) -> Request:
        """Tokenise and check. ``max_tokens`` None becomes all that the context leaves.

        Raises:
            RequestError: what cannot be served, naming field and value.
        """
        if params.stop:
            self._need_tokenizer("stop")
        if isinstance(prompt, str):
            self.check_text("prompt", prompt)
            prompt = self.encode("prompt", prompt, add_special_tokens)
        check_prompt_length(len(prompt), self.max_model_len)  # before they are copied
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
        # Like the field's servers: what does not fit behind the prompt is cut, not refused.
        room = self.max_model_len - len(ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        params = dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        return Request(request_id, ids, params, stops, bad_words)

    def check_text(self, field: str, text: str) -> None:
        """Check whether a text can fit into the context, without looking for its tokens.

        Raises:
            RequestError: it cannot, however it is tokenised.
        """
        most = None if self.tokenizer is None else self.tokenizer.most_bytes
        if most is None or len(text) < self.max_model_len:
            return
        least = -(-utf8_length(text) // most)
        if least >= self.max_model_len:
            raise RequestError(
                field,
                f"has {len(text)} characters, which are at least {least} tokens and leave no room to generate: "
                f"prompt and output together have at most {self.max_model_len} (max_model_len)",
            )

    def encode(self, field: str, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of the text in ``field`` of a request.

        Raises:
            RequestError: the model has no tokenizer, or that has no tokens for the text.
        """
        try:
            return self._need_tokenizer(field).encode(text, add_special_tokens)
        except TokenizerError as cause:
            raise RequestError(field, f": {cause}") from cause

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_ids) if self.tokenizer is not None else frozenset()

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word as it is spelt inside a text and, where that differs, at the beginning of one."""
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
    """The sampling fields of generation_config.json; ``do_sample`` false means greedy."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    fields = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        fields["temperature"] = 0.0
    return fields
