"""Data types between the API servers and the front end: requests, usage, limits. No jax, no wire format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.types import LoRARef, PositionLogprobs


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Chat messages to render with the checkpoint's chat template.

    Attributes:
        messages: messages, each with a ``role`` and the other fields that the template uses, usually ``content``: text,
            or a list of text parts and `jaxinfer.text.contents.GivenImage`.
        variables: additional template variables.
        template: chat template of the request, rejected unless the server allows it.
        reasoning_effort: OpenAI's reasoning effort, if the template supports it.
        continue_final_message: whether the output continues the content of the last message.
        image_options: options of the image processor for all images (``min_pixels``, ``max_pixels``).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool = False
    image_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Input = str | Sequence[int] | Conversation


@dataclasses.dataclass(frozen=True)
class Call:
    """A generation request of a client.

    Attributes:
        sampling: fields set by the client, by the names of `SamplingParams`, not validated. The other fields get the
            checkpoint's recommended values (`jaxinfer.text.intake.recommended_sampling`), and ``max_tokens`` the
            context's rest.
        request_id: id given by the client; None: the front end generates one.
        timeout: seconds that the client waits from now on, including queueing; None: no limit.
        tenant: tenant of the request, see `jaxinfer.serve.api.tenants`: request ids, cached prefixes and scheduling
            turns are per tenant.
        trace: W3C headers ``traceparent`` and ``tracestate``, if the client sent them.
        logged: whether the request gets a line in the request log; false for a part of another request.
        shown: texts of special tokens that stay in the output text, for a parser.
        lora: adapter that ``model`` names, once it is resolved (`Frontend.meant`).
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
    """Number of tokens. ``completion``: of all outputs; ``cached``: prompt tokens found in the prefix cache;
    ``reasoning``: reasoning tokens among ``completion`` (None: not counted)."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None = None


@dataclasses.dataclass(frozen=True)
class Scored:
    """A scored continuation: the log probability and rank of each token, see `PositionLogprobs.chosen`."""

    tokens: Sequence[PositionLogprobs]

    @property
    def logprob(self) -> float:
        return sum(position.chosen.logprob for position in self.tokens)

    @property
    def is_greedy(self) -> bool:
        return all(position.chosen.rank == 1 for position in self.tokens)


@dataclasses.dataclass(frozen=True)
class ServeLimits:
    """Limits of one request; GetModelInfo reports all of them.

    Attributes:
        n: outputs of one request.
        logprobs: most likely tokens per position (the engine's `max_logprobs` may be lower).
        stop_strings: stop strings of one request.
        stop_characters: characters of one stop string or bad word.
        stop_token_ids: stop token ids of one request.
        bad_words: bad words of one request.
        logit_bias: logit bias entries of one request.
        prompt_characters: characters of a text prompt, or of all messages or all prompts together.
        messages: messages of one conversation.
        values: values of one JSON body or gRPC message: names, strings, lists and objects; token ids are not counted.
        message_bytes: bytes of one gRPC message or HTTP body.
        score_continuations: continuations of one Score call.
        image_bytes: bytes of one image file; in a body, base64 makes them a third more.
        image_pixels: pixels of one image, as its header tells them, before it is resized.
        vocabulary_bytes: bytes of all log probabilities of one request with logprobs=-1: 4 for each token of the
            vocabulary at each position of each output.
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
    image_bytes: int = 10 << 20
    image_pixels: int = 1 << 26
    vocabulary_bytes: int = 1 << 26


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """Model metadata for the front end, without the weights.

    Attributes:
        name: model name for clients (``--served-model-name``, or the name of the folder).
        defaults: sampling parameters that generation_config.json recommends.
        engine: resolved engine settings by name.
        created: start time of the server, seconds since 1970.
        image_processor: ``module:function`` that makes the image processor; "": images are not served.
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
    image_processor: str = ""
