"""Calls that the doors hand to the front end, and deltas that they get back. No jax, no wire format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.types import LoRARef, PositionLogprobs


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages for the checkpoint's chat template.

    Attributes:
        messages: each with a ``role`` and what the template wants besides, usually ``content``.
        variables: further variables of the template.
        template: the request's own template, refused unless the server allows it.
        reasoning_effort: how much the model should think, in OpenAI's words, if its template knows of that.
        continue_final_message: the answer goes on where the content of the last message ends.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool = False


Input = str | Sequence[int] | Conversation


@dataclasses.dataclass(frozen=True)
class Call:
    """One generation, as a client asked for it.

    Attributes:
        sampling: only the fields that the client set, by the names of `SamplingParams`, unchecked; the others get the
            checkpoint's recommended values (`jaxinfer.text.intake.recommended_sampling`), and ``max_tokens`` all that
            the context leaves.
        request_id: None: the front end makes one.
        timeout: seconds that the client waits from now on, the queue included; None: for ever.
        tenant: whose request it is, see `jaxinfer.serve.tenants`: ids, cached prefixes and turns are its own.
        trace: the W3C headers ``traceparent`` and ``tracestate``, where the client sent them.
        logged: it is a request of its own, with a line in the log, and no part of one.
        shown: special tokens, by their texts, that are part of its text all the same: a parser looks for them.
        lora: the adapter that ``model`` means, once that is known (`Frontend.meant`).
    """

    prompt: Input
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str | None = None
    request_id: str | None = None
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    tenant: str = ""
    trace: Mapping[str, str] = dataclasses.field(default_factory=dict)
    logged: bool = True
    shown: frozenset[str] = frozenset()
    lora: LoRARef | None = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens. ``completion`` is of all outputs; ``cached`` were found in the prefix cache; ``reasoning``, of
    ``completion``, said thoughts (None: was not counted)."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None = None


@dataclasses.dataclass(frozen=True)
class Scored:
    """The tokens of a continuation, each with its log probability and rank; see `PositionLogprobs.chosen`."""

    tokens: Sequence[PositionLogprobs]

    @property
    def logprob(self) -> float:
        return sum(position.chosen.logprob for position in self.tokens)

    @property
    def is_greedy(self) -> bool:
        return all(position.chosen.rank == 1 for position in self.tokens)


@dataclasses.dataclass(frozen=True)
class ServeLimits:
    """Bounds on what one request may bring; all of them are told by GetModelInfo.

    Attributes:
        n: outputs of one request.
        logprobs: most likely tokens for each position (the engine's `max_logprobs` may be less).
        stop_strings: how many.
        stop_characters: of each of them.
        stop_token_ids: how many, EOS included.
        bad_words: how many.
        logit_bias: entries.
        prompt_characters: of a text, or of all messages or all prompts together.
        messages: of one conversation.
        values: of one JSON body or gRPC message, names, texts, lists and objects alike; token ids are not counted.
        message_bytes: of one gRPC message or HTTP body.
        score_continuations: of one Score call.
    """

    n: int = 128
    logprobs: int = 20
    stop_strings: int = 64
    stop_characters: int = 1024
    stop_token_ids: int = 64
    bad_words: int = 32
    logit_bias: int = 1024
    prompt_characters: int = 4 << 20
    messages: int = 4096
    values: int = 32768
    message_bytes: int = 16 << 20
    score_continuations: int = 64


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """The model as the front end knows it: without the weights.

    Attributes:
        name: what clients call it (``--served-model-name``, or the folder's name).
        defaults: sampling fields that generation_config.json recommends.
        engine: the engine's resolved settings by name.
        created: seconds since 1970 at which the server started.
    """

    name: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: Sequence[int]
    defaults: Mapping[str, Any]
    engine: Mapping[str, Any]
    created: int
