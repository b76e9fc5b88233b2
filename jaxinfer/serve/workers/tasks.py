"""The tasks that worker processes do for the front end, and the pools of workers that do them. No jax.

A jinja template is compiled to Python, so a loop in it holds a thread, and the GIL, until it ends; parsing, tokenizing
and compiling a grammar may take seconds, and many times the memory of their input. Small inputs are processed in the
event loop or a thread, the rest in workers (`jaxinfer.serve.workers.worker`): the kernel shares out the CPU, a limit
bounds the memory, and a process can be killed at any time, even in a C function. Each task has its own workers, shared
round-robin between tenants: no tenant has all of them, and no task delays another.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from jaxinfer.images.registry import ProcessorSource
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.serve.api.errors import map_exceptions
from jaxinfer.serve.api.requests import Conversation, ModelCard, ServeLimits
from jaxinfer.serve.workers.codec import encode
from jaxinfer.serve.workers.images import decoded
from jaxinfer.serve.workers.pool import Pool
from jaxinfer.serve.workers.worker import Task
from jaxinfer.structured.masks import CPU_SECONDS
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import ImageInput

LONG_CHARACTERS = 64 << 10
"""Characters above which a text is tokenized in a worker. Up to here a thread takes 0.1 s and some megabytes."""

_REMEMBERED = 4096
_PACKAGE = "jaxinfer.serve.workers"
_STOPPED = "was stopped: it ran for {seconds:g} s, or wanted too much memory"
_RENDER = Task(
    f"{_PACKAGE}.render:renderer", "conversations", f": the chat template {_STOPPED}", workers=4, memory=2 << 30
)
TASKS = {
    # The checkpoint's template takes about a millisecond, one of a request may take the whole time limit.
    "render": replace(_RENDER, waiting=4096),
    "render_own": replace(_RENDER, share=1),
    "parse_body": Task(f"{_PACKAGE}.texts:body_parser", "long bodies", f"the body {_STOPPED}"),
    "tokenize": Task(f"{_PACKAGE}.texts:tokenizer", "long texts", f": the tokenizer {_STOPPED}"),
    # The engine's helper needs about twice as much CPU time: a grammar accepted here compiles there.
    "check_grammar": Task(
        f"{_PACKAGE}.grammar_checks:checker",
        "grammars",
        "was stopped: compiled, it takes too long, too much memory or too deep a stack",
        seconds=10.0,
        cpu_seconds=CPU_SECONDS / 2,
        idle=True,
    ),
    # Decoded pixels are bounded; a processor holds them a few times, some of them as floating point numbers.
    "prepare_image": Task(
        f"{_PACKAGE}.images:preparer", "images", f": the image {_STOPPED}", workers=4, waiting=1024, memory=6 << 30
    ),
}


class Renderer:
    """A renderer of conversations, as `ChatTemplate.render`. Templates of requests have their own workers.

    Args:
        template: template of the checkpoint. Its ``now`` is not used: workers have the clock of the machine.
        seconds: time limit of one conversation.
    """

    def __init__(self, template: ChatTemplate | None, seconds: float) -> None:
        sources, tokens = (template.sources, template.tokens) if template is not None else ({}, {})
        self.has_template = template is not None
        self._default, self._requests = (
            Pool(replace(TASKS[name], seconds=seconds), sources=sources, tokens=tokens)
            for name in ("render", "render_own")
        )

    async def warm(self) -> None:
        """Start the workers of the checkpoint's template, if it has one."""
        if self.has_template:
            await self._default.warm()

    async def render(self, conversation: Conversation, tenant: str = "") -> str:
        """Return the prompt text of a conversation. Raises the errors of `Pool.ask`."""
        pool = self._default if conversation.template is None else self._requests
        try:
            question = encode(vars(conversation))
        except (TypeError, ValueError, RecursionError) as cause:
            raise RequestError("messages", f"must be JSON-like data: {cause}") from cause
        text: str = await pool.ask(tenant, "messages", question)
        return text

    def close(self) -> None:
        """Kill the workers."""
        self._default.close()
        self._requests.close()


class BodyReader(Pool):
    """A parser of long JSON bodies, in workers without a model. ``limits.values`` bounds the values of a body."""

    def __init__(self, limits: ServeLimits) -> None:
        super().__init__(TASKS["parse_body"], values=limits.values)

    async def read(self, body: bytes, tenant: str) -> Any:
        """Parse a body as `jaxinfer.serve.api.json_bodies.parse` does, except that lists of token ids become arrays.

        Raises:
            ServeError: the body is invalid; or for an error of `Pool.ask`.
        """
        with map_exceptions():
            return await self.ask(tenant, None, body)


class LongTexts(Pool):
    """A tokenizer of long texts. ``folder``: that of `jaxinfer.text.load.load_tokenizer`."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(TASKS["tokenize"], folder=str(folder))

    async def encode(self, field: str, text: str, add_special_tokens: bool, tenant: str) -> Sequence[int]:
        """Return the token ids of a text. Raises the errors of `Pool.ask`."""
        ids: Sequence[int] = await self.ask(tenant, field, encode((field, text, add_special_tokens)))
        return ids


class Grammars(Pool):
    """A validator that compiles grammars and rejects those that cannot be enforced, before the engine gets them."""

    def __init__(self) -> None:
        super().__init__(TASKS["check_grammar"])
        # Recently accepted grammars, by tenant: response times must not reveal the grammars of other tenants.
        self._good: collections.OrderedDict[tuple[str, bytes], None] = collections.OrderedDict()

    async def check(self, params: SamplingParams, tenant: str) -> None:
        """Check the grammar of a request, if it has one. Raises the errors of `Pool.ask`."""
        if params.grammar is None:
            return
        question = encode(params.grammar)
        key = tenant, hashlib.sha256(question).digest()
        if key not in self._good:
            await self.ask(tenant, f"structured_outputs.{params.grammar[0]}", question)
        self._good[key] = None
        self._good.move_to_end(key)
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)


class ImagePreparer(Pool):
    """A preparer of images for the model's vision tower."""

    def __init__(self, source: ProcessorSource, limits: ServeLimits) -> None:
        bounds = limits.image_bytes, limits.image_pixels
        super().__init__(TASKS["prepare_image"], source=dataclasses.asdict(source), limits=bounds)

    async def prepare(
        self, field: str, image: str | bytes | list[str | bytes], options: Mapping[str, Any], tenant: str
    ) -> ImageInput:
        """Return an image, given as a data URL or as the bytes of a file, or a video of such frames. Raises the errors
        of `Pool.ask`."""
        return decoded(await self.ask(tenant, field, encode((field, image, dict(options)))))


def has_grammars(card: ModelCard, tokenizer: Tokenizer | None) -> bool:
    """Whether the engine constrains outputs by grammars, see `ResolvedEngine.grammars`."""
    return has_masks(card) and tokenizer is not None


def has_masks(card: ModelCard) -> bool:
    """Whether the engine's decode programs take token masks, see `ResolvedEngine.grammars`."""
    return card.engine.get("structured_output_helpers", 0) > 0 and not card.engine.get("enable_dp_attention")
