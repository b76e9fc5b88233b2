"""`AsyncLLM`: text generation in an asyncio program, with the engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any

from jaxinfer.images.prompts import bare_prompt
from jaxinfer.llm import LLM
from jaxinfer.lora.door import LoRAChoice
from jaxinfer.models.model import Model
from jaxinfer.outputs import Collector, Delta, RequestOutput
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.text.intake import Prompt
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import Request

Messages = Sequence[Mapping[str, Any]]
AnyInput = Prompt | Mapping[str, Any] | Messages


class AsyncLLM:
    """A model that serves any number of asyncio tasks: ``async with AsyncLLM(...) as llm:``, or until `close`.

    Making one loads the weights and compiles the programs, which takes seconds to minutes: make it before the event
    loop runs, or in `asyncio.to_thread`.

    Args:
        model, settings: see `LLM`, which raises the same errors.

    Attributes:
        engine: the engine: ``stats``, ``abort``, ``pause``, ``resume``, ``update_weights``, ``sleep``, ``wake_up``.
    """

    def __init__(self, model: str | Model, **settings: Any) -> None:
        self._llm = LLM(model, **settings)
        self.engine = AsyncEngine(self._llm.engine, weights=self._llm.served)
        self.engine.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what runs, and free the memory of weights, KV cache and programs."""
        await self.engine.stop(drain=False)
        self._llm.close()

    @property
    def model(self) -> Model:
        return self._llm.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._llm.tokenizer

    async def generate(
        self,
        prompt: AnyInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora: LoRAChoice = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far after each step with new tokens, until all samples have ended. It is the same object
        each time, which grows.

        Leaving the iterator early, or cancelling the task, aborts the request.

        Args:
            prompt: a prompt as for `LLM.generate`, or a conversation (a list of messages) as for `LLM.chat`.
            sampling_params: None: the checkpoint's recommendation.
            request_id: a name that no running request has; None makes one.
            lora: the adapter; a string names a loaded one.

        Raises:
            RequestError, QueueFullError, TemplateError, LoRAError: the request is rejected.
            EngineDeadError: the engine has ended.
        """
        collector, deltas = await self._begin(prompt, sampling_params, request_id, lora)
        async with contextlib.aclosing(deltas):
            async for _ in deltas:
                yield collector.output

    async def stream(
        self,
        prompt: AnyInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora: LoRAChoice = None,
    ) -> AsyncGenerator[Delta, None]:
        """Yield what is new after each step: text and tokens of a sample. See `generate`."""
        _, deltas = await self._begin(prompt, sampling_params, request_id, lora)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator ends with the finish reason "abort". An unknown id is ignored."""
        await self.engine.abort(request_id)

    async def _begin(
        self, prompt: AnyInput, params: SamplingParams | None, request_id: str | None, lora: LoRAChoice
    ) -> tuple[Collector, AsyncGenerator[Delta, None]]:
        """Check a request in a worker thread, as reading images and adapters takes time, and submit it."""
        name = str(uuid.uuid4()) if request_id is None else request_id
        given, made = await asyncio.to_thread(self._prepared, prompt, params, lora)
        stream = await self.engine.submit(dataclasses.replace(made, request_id=name))
        collector = Collector(given, stream.request, self.tokenizer)
        return collector, self._deltas(stream, collector)

    def _prepared(self, prompt: Any, params: SamplingParams | None, lora: LoRAChoice) -> tuple[Prompt, Request]:
        talk = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        inputs: Any = self._llm.render(prompt) if talk else prompt
        listed, requests = self._llm.prepare(inputs, params, lora, answers=talk)
        if len(requests) != 1:
            raise RequestError("prompt", f": {len(requests)} prompts, and a request has one")
        return bare_prompt(listed[0]), requests[0]

    async def _deltas(self, stream: Any, collector: Collector) -> AsyncGenerator[Delta, None]:
        async with stream:
            async for delta in stream:
                if delta.index not in collector.open:  # aborted after a stop string
                    continue
                new = collector.take(delta)
                if new.finish_reason is not None and delta.finish_reason is None and collector.open:
                    await self.engine.abort(delta.request_id, delta.index)
                yield Delta(0, new.index, new.text, new.token_ids, new.finish_reason)
                if not collector.open:
                    return
