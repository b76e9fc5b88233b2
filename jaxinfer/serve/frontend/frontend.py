"""Front end, the only layer that API servers call: validation, tokenization, detokenization. No jax."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from jaxinfer.config.speculative import GRAMMAR
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.parsers.registry import Parsers
from jaxinfer.request_checks import check_prompt_length, check_token_ids
from jaxinfer.sampling_params import (
    RequestError,
    SamplingLimits,
    SamplingParams,
)
from jaxinfer.serve.api.admission import check_characters, check_prompt, check_terms, request_id_of, sampling_of
from jaxinfer.serve.api.capacity import CapacityLimiter, Load, Place
from jaxinfer.serve.api.errors import DuplicateIdError, ServeError, map_exceptions, unavailable
from jaxinfer.serve.api.requests import Call, Conversation, Input, ModelCard, Scored, ServeLimits, Usage
from jaxinfer.serve.api.tenants import cache_scope, engine_id, own_id
from jaxinfer.serve.core.backend import Backend
from jaxinfer.serve.frontend.generation import Generation, failing, within
from jaxinfer.serve.frontend.images import Images, named_images, refuse_images
from jaxinfer.serve.frontend.loras import LoRAs, meant
from jaxinfer.serve.frontend.scoring import check_continuations, check_lengths, score_all
from jaxinfer.serve.runtime.event_loop import INLINE, off_loop
from jaxinfer.serve.telemetry.tracing import Tracing
from jaxinfer.serve.workers.normalize import normalize_messages
from jaxinfer.serve.workers.tasks import LONG_CHARACTERS, Grammars, LongTexts, Renderer, has_grammars, has_masks
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.contents import GivenImage, images_in, with_images
from jaxinfer.text.intake import Intake
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, ImageInput, PlacedImage, Request

_LIMITS = ServeLimits()
_NO_PARSERS = Parsers()
_FEW_MESSAGES = 64
_MOST_IDS = 1 << 18  # ids of one detokenize call, unless the context is longer
_TEXT_THREADS = 2


class Frontend:
    """The front end of the gRPC and HTTP APIs, over a backend that may die and be restarted.

    Methods raise no exception except `ServeError`. All of them must be called from one event loop.

    Args:
        template: chat template of the checkpoint.
        allow_request_templates: whether a conversation may bring its own template.
        template_seconds: time limit of rendering a template.
        clock: the engine's clock in seconds, for deadlines.
        tracing: traces every generation.
        scope: returns the `Request.cache_scope` of a tenant; default: each tenant has its own.
        weight: returns the `Request.weight` of a tenant; default: equal weights.
        folder: folder of the tokenizer for helper processes that tokenize long texts (None: threads do it).
        parsers: tool and reasoning parsers of the model.
        loras: LoRA adapters that calls may name as their model (None: the engine serves none).
        images: images of the model's requests (None: it reads text only).

    Attributes:
        leaving: whether readiness is withdrawn while new calls are still accepted.
        draining: whether new calls are rejected.
        room: admission control of the waiting requests.
    """

    def __init__(
        self,
        backend: Backend,
        card: ModelCard,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        limits: ServeLimits = _LIMITS,
        *,
        allow_request_templates: bool = False,
        template_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        scope: Callable[[str], str] = cache_scope,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        folder: pathlib.Path | None = None,
        parsers: Parsers = _NO_PARSERS,
        loras: LoRAs | None = None,
        images: Images | None = None,
    ) -> None:
        most = card.engine.get("max_logprobs", limits.logprobs)
        whole = most < 0  # the whole vocabulary
        most = limits.logprobs if whole else min(limits.logprobs, most)
        self.card, self.limits = card, dataclasses.replace(limits, logprobs=most)
        self.tokenizer, self.template, self.parsers, self.loras = tokenizer, template, parsers, loras
        self.leaving = self.draining = False
        self.room = CapacityLimiter(card.engine)
        self._backend, self._clock = backend, clock
        self._tracing = tracing or Tracing()
        self._scope, self._weight, self._images = scope, weight, images
        self._allow_templates = allow_request_templates
        drafts = card.engine.get("speculative") not in (None, GRAMMAR)
        grammars, masks = has_grammars(card, tokenizer), has_masks(card)
        training = bool(card.engine.get("enable_training_outputs"))
        bounds = SamplingLimits(
            max_logprobs=most,
            drafts=drafts,
            grammars=grammars,
            masks=masks,
            training=training,
            whole=whole,
            vocabulary_bytes=limits.vocabulary_bytes,
        )
        self._intake = Intake(tokenizer, card.vocab_size, card.max_model_len, bounds, parsers.thought)
        self._renderer, self._grammars = Renderer(template, template_seconds), Grammars()
        self._sources = list(template.sources.values()) if template is not None else []
        self._long = None if folder is None or tokenizer is None else LongTexts(folder)
        # Long inputs use a separate thread pool so that short requests are not delayed.
        self._threads, self._long_threads = (
            concurrent.futures.ThreadPoolExecutor(_TEXT_THREADS, name) for name in ("jaxinfer-text", "jaxinfer-long")
        )
        self._stopped = False
        self._finished = dict.fromkeys(FinishReason, 0)
        self._active: dict[str, Generation | None] = {}  # by `engine_id`; None: being prepared
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ends_thoughts(self) -> bool:
        """See `Intake`."""
        return self._intake.ends_thoughts

    # ---- lifecycle

    async def warm(self) -> None:
        """Start the helpers of templates and images, so that the first conversation does not wait for them."""
        await self._renderer.warm()
        if self._images is not None:
            await self._images.warm()

    @property
    def is_open(self) -> bool:
        """Whether the server is neither leaving nor draining."""
        return not (self.leaving or self.draining)

    async def leave(self, seconds: float) -> None:
        """Accept calls for ``seconds`` more while readiness is withdrawn."""
        self.leaving = True
        await asyncio.sleep(seconds)

    async def drain(self, timeout: float) -> int:
        """Reject new calls, wait for the admitted ones, end those that are left after ``timeout`` seconds with
        UNAVAILABLE, and return their number."""
        self.draining = True
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                await self._idle.wait()
        except TimeoutError:
            self._stopped = True
            left = [generation for generation in self._active.values() if generation is not None]
            for generation in left:
                generation.cut(_stopping())
            return len(left)
        return 0

    async def aclose(self) -> None:
        """End all generations, and stop the helper processes and threads."""
        await self.drain(0.0)
        self._renderer.close()
        self._grammars.close()
        if self._images is not None:
            self._images.close()
        if self._long is not None:
            self._long.close()
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False)

    @property
    def active(self) -> int:
        """Number of generations in flight or being prepared."""
        return len(self._active)

    # ---- generation

    def reserve(self, calls: Sequence[Call]) -> list[Place]:
        """Reserve queue capacity for calls that differ only in their prompts: for all of them or none, before any work.
        The caller must release the reservations."""
        with map_exceptions():
            self._check_open()
            n = sampling_of(calls[0], self.card, self.limits).n
            return self.room.enter(calls[0].tenant, [_load(call.prompt, n) for call in calls])

    async def generate(self, call: Call, place: Place | None = None) -> Generation:
        """Start a generation. Raises `ServeError` if it is rejected, before the first delta.

        Args:
            place: reservation from `reserve`.
        """
        trace = self._tracing.begin(call, self.card.name)
        with failing(trace):
            generation = await self._generate(call, place)
        generation.trace = trace
        return generation

    async def _generate(self, call: Call, place: Place | None) -> Generation:
        with map_exceptions(), self.meant(call) as call:
            self._check_open()
            request_id = engine_id(call.tenant, request_id_of(call))
            check_terms(call)
            params = sampling_of(call, self.card, self.limits)
            if place is None:  # before any work that is proportional to the prompt length
                (place,) = self.room.enter(call.tenant, [_load(call.prompt, params.n)])
            try:
                await self._check_prompt(call.prompt)
                await self._grammars.check(params, call.tenant)
                return await self._prepared(call, request_id, params, place)
            except BaseException:
                place.leave()
                raise

    async def _prepared(self, call: Call, request_id: str, params: SamplingParams, place: Place) -> Generation:
        deadline = None if call.timeout is None else self._clock() + call.timeout
        self._enter(request_id)
        try:
            async with within(call.timeout):
                request = await self._request(call, request_id, params)
                place.measure(len(request.prompt_token_ids))
                with named_images(_images_of(call.prompt)):
                    return await self._start(dataclasses.replace(request, deadline=deadline), place, call.shown)
        finally:
            if self._active.get(request_id) is None:
                self._leave(request_id)

    async def abort(self, request_id: str, index: int | None = None, tenant: str | None = None) -> None:
        """Abort a request or one of its outputs: its reader gets a last delta with "abort". Unknown ids are ignored.

        Args:
            request_id: id given by the client.
            tenant: tenant of the request; None: the requests of all tenants with this id.
        """
        with map_exceptions():
            if index is not None and index < 0:
                raise RequestError("output_index", f"={index} must be at least 0")
            for name in self._named(request_id, tenant):
                await self._backend.abort(name, index)

    def _named(self, request_id: str, tenant: str | None) -> list[str]:
        """Return the engine ids of a request. An unknown id is kept, so that a dead engine raises its error."""
        if tenant is not None:
            return [engine_id(tenant, request_id)]
        return [name for name in self._active if own_id(name) == request_id] or [request_id]

    async def score(
        self,
        prompt: Input,
        continuations: Sequence[str | Sequence[int]],
        *,
        model: str | None = None,
        add_special_tokens: bool = True,
        timeout: float | None = None,
        tenant: str = "",
    ) -> list[Scored]:
        """Return the log probability of each continuation of the same prompt, under the raw logits."""
        call = Call(
            prompt, model=model, add_special_tokens=add_special_tokens, timeout=timeout, tenant=tenant, logged=False
        )
        line = self._tracing.line(call)
        with failing(line), map_exceptions(), self.meant(call) as call:
            self._check_open()
            check_terms(call)
            check_prompt(prompt, self.limits, allow_templates=False)
            check_continuations(continuations, self.limits)
            async with within(timeout):
                results = await self._score(call, continuations)
        line.finished(Usage(sum(len(each.tokens) for each in results), 0, 0), ["score"])
        return results

    async def _score(self, call: Call, continuations: Sequence[str | Sequence[int]]) -> list[Scored]:
        prompt, tenant = call.prompt, call.tenant
        refuse_images(_images_of(prompt), "a score is of text")
        if isinstance(prompt, str):
            self._intake.check_text("prompt", prompt)
        context = await self._ids(prompt, call.add_special_tokens, tenant)
        if not len(context):
            raise RequestError("prompt", "is empty: a score needs at least one token to stand behind")
        check_lengths(context, (), self.card.max_model_len)
        await self._off_loop(len(context), check_token_ids, "prompt_token_ids", context, self.card.vocab_size)
        ids = [await self._continuation(rank, each, tenant) for rank, each in enumerate(continuations)]
        check_lengths(context, ids, self.card.max_model_len)
        return await score_all(self.generate, call, context, ids)

    # ---- text

    async def tokenize(
        self,
        text: str | Conversation,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        tenant: str = "",
    ) -> Sequence[int]:
        """Tokenize a text, or a conversation after rendering it with the chat template.

        Args:
            add_special_tokens: default: true for a text, false for a conversation, since its template writes them.
        """
        with map_exceptions():
            self.check_model(model)
            await self._check_prompt(text)
            return await self._ids(text, add_special_tokens, tenant)

    async def detokenize(
        self, ids: Sequence[int], *, model: str | None = None, skip_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids."""
        with map_exceptions():
            self.check_model(model)
            if self.tokenizer is None:
                raise RequestError("token_ids", "cannot become text: the model has no tokenizer")
            most = min(self.limits.prompt_characters, max(self.card.max_model_len, _MOST_IDS))
            if len(ids) > most:
                raise RequestError("token_ids", f"must hold at most {most} ids, not {len(ids)}")
            return await self._off_loop(len(ids), self._text_of, self.tokenizer, ids, skip_special_tokens)

    def token_text(self, token: int) -> str:
        """Return the text of one token; bytes that are not valid UTF-8 on their own become U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token within a text; empty without a tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)

    # ---- the engine

    async def stats(self) -> EngineStats:
        """Return current engine statistics. Ended outputs are counted by the front end, which detects stop strings."""
        with map_exceptions():
            return dataclasses.replace(await self._backend.stats(), finished=dict(self._finished))

    async def flush_prefix_cache(self) -> int:
        """See `Backend.reset_prefix_cache`."""
        with map_exceptions():
            return await self._backend.reset_prefix_cache()

    def check_model(self, name: str | None) -> str:
        """Return the model name for a response to a request with the model ``name``; None means the base model.

        Raises:
            ServeError: NOT_FOUND: neither the model nor an adapter has this name.
        """
        with self.meant(Call("", model=name)):
            return self.card.name if name is None else name

    def meant(self, call: Call) -> AbstractContextManager[Call]:
        """See `jaxinfer.serve.frontend.loras.meant`."""
        return meant(call, self.card.name, self.loras)

    # ---- one call

    def _check_open(self) -> None:
        if self.draining:
            raise unavailable("the server is draining: it takes no more requests")

    def _enter(self, request_id: str) -> None:
        if request_id in self._active:
            raise DuplicateIdError("request_id", f"={own_id(request_id)!r} is in use")
        self._active[request_id] = None
        self._idle.clear()

    def _ended(self, request_id: str, reasons: Collection[FinishReason]) -> None:
        for reason in reasons:
            self._finished[reason] += 1
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        del self._active[request_id]
        if not self._active:
            self._idle.set()

    async def _request(self, call: Call, request_id: str, params: SamplingParams) -> Request:
        answers = isinstance(call.prompt, Conversation) and not call.prompt.continue_final_message
        make = functools.partial(self._intake.request, answers=answers)
        special = call.add_special_tokens and not isinstance(call.prompt, Conversation)  # the template writes them
        prompt, images = await self._text(call.prompt, call.tenant)
        if isinstance(prompt, str):
            self._intake.check_text("prompt", prompt)
            if len(prompt) > LONG_CHARACTERS or self._images is not None:
                prompt = await self._encoded("prompt", prompt, special, call.tenant)
        prompt, placed = self._placed(prompt, images)
        words = sum(map(len, params.bad_words or ()))
        work = len(prompt) + words + len(params.allowed_token_ids or ())
        request = await self._off_loop(work, make, request_id, prompt, params, special)
        return dataclasses.replace(
            request,
            priority=call.priority,
            tenant=call.tenant,
            weight=self._weight(call.tenant),
            cache_scope=self._scope(call.tenant),
            cache_salt=call.cache_salt,
            lora=call.lora,
            images=placed,
        )

    async def _start(self, request: Request, place: Place, shown: frozenset[str]) -> Generation:
        stream = await self._backend.submit(request)
        seconds = None if request.deadline is None else request.deadline - self._clock()
        tokenizer = self.tokenizer.showing(shown) if self.tokenizer is not None and shown else self.tokenizer
        generation = Generation(self._backend, stream, tokenizer, self._ended, seconds, place)
        self._active[request.request_id] = generation
        if self._stopped:
            generation.cut(_stopping())
        return generation

    async def _ids(self, prompt: Input, add_special_tokens: bool | None, tenant: str) -> Sequence[int]:
        special = bool(add_special_tokens) if isinstance(prompt, Conversation) else add_special_tokens is not False
        text, images = await self._text(prompt, tenant)
        if not isinstance(text, str):
            return text
        ids = await self._encoded("prompt", text, special, tenant)
        return self._images.placed("prompt", ids, images)[0] if self._images is not None and images else ids

    def _placed(
        self, prompt: str | Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[str | Sequence[int], tuple[PlacedImage, ...]]:
        """Return a prompt with the tokens of its images in place of their placeholders, and the images."""
        if self._images is None or isinstance(prompt, str):
            return prompt, ()
        check_prompt_length(len(prompt), self.card.max_model_len)  # before copying
        return self._images.placed("prompt", prompt, images)

    async def _text(self, prompt: Input, tenant: str) -> tuple[str | Sequence[int], Sequence[ImageInput]]:
        """Return the text of a conversation and its images, or any other prompt as it is."""
        if not isinstance(prompt, Conversation):
            return prompt, ()
        given, options = _images_of(prompt), prompt.image_options
        if self._images is None or not given:
            return await self._rendered(prompt, tenant), ()
        given = self._images.resolved(given, tenant)
        text = self._images.with_timestamps(await self._rendered(prompt, tenant), given, options)
        return text, await self._images.prepare(given, options, tenant)

    async def _encoded(self, field: str, text: str, special: bool, tenant: str) -> Sequence[int]:
        if self._long is not None and len(text) > LONG_CHARACTERS:
            return await self._long.encode(field, text, special, tenant)
        return await self._off_loop(len(text), self._intake.encode, field, text, special)

    async def _continuation(self, rank: int, continuation: str | Sequence[int], tenant: str) -> Sequence[int]:
        field = f"continuations[{rank}]"
        if isinstance(continuation, str):
            check_characters(field, len(continuation), self.limits)
            self._intake.check_text(field, continuation)
            return await self._encoded(field, continuation, False, tenant)
        check_lengths((), (continuation,), self.card.max_model_len)
        await self._off_loop(len(continuation), check_token_ids, field, continuation, self.card.vocab_size)
        return continuation

    async def _check_prompt(self, prompt: Input) -> None:
        """Check a prompt, in a thread if it is a long conversation."""
        if isinstance(prompt, Conversation):
            given = _images_of(prompt)
            if self._images is None:
                refuse_images(given)
            else:
                self._images.check(given, prompt.image_options)
        work = len(prompt.messages) + len(prompt.tools or ()) if isinstance(prompt, Conversation) else 0
        check = functools.partial(check_prompt, prompt, self.limits, allow_templates=self._allow_templates)
        await self._off_loop(work * INLINE // _FEW_MESSAGES, check)

    async def _rendered(self, conversation: Conversation, tenant: str) -> str:
        if self.tokenizer is None or (self.template is None and conversation.template is None):
            raise RequestError("messages", f": the model {self.card.name!r} has no chat template")
        sources = [conversation.template] if conversation.template is not None else self._sources
        messages, _ = with_images(conversation.messages, sources)
        shown = dataclasses.replace(conversation, messages=messages, image_options={})
        text = await self._renderer.render(normalize_messages(shown, sources), tenant)
        check_prompt(text, self.limits, allow_templates=False)
        return text

    def _text_of(self, tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
        check_token_ids("token_ids", ids, self.card.vocab_size)
        parts, characters = [], 0
        for part in tokenizer.decoded(ids, skip_special_tokens):
            parts.append(part)
            characters += len(part)
            check_characters("token_ids: their text", characters, self.limits)
        return "".join(parts)

    async def _off_loop[*A, T](self, work: int, function: Callable[[*A], T], *args: *A) -> T:
        threads = self._threads if work <= LONG_CHARACTERS else self._long_threads
        return await off_loop(work, function, *args, threads=threads)


def _images_of(prompt: Input) -> list[GivenImage]:
    return images_in(prompt.messages) if isinstance(prompt, Conversation) else []


def _load(prompt: Input, n: int) -> Load:
    """Return the load of a request before tokenization: the token count of a text is not known yet."""
    tokens = len(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray) else 0
    return Load(1, n, tokens)


def _stopping() -> ServeError:
    return unavailable("the server stops: try another, or later")
