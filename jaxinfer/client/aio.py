"""Client for asyncio. `jaxinfer.client.sync` is generated from this file: see tools/gen_sync_client.py."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from jaxinfer.client.batch import Batch
from jaxinfer.client.connect import DEFAULT_RETRY, TLS, RetryPolicy, checked_target, connection
from jaxinfer.client.diagnosis import Explain, explainer
from jaxinfer.client.errors import DeadlineExceeded, Truncated, Unavailable
from jaxinfer.client.health import CHECK, READINESS, WATCH, health_request, read_health
from jaxinfer.client.messages import ChatMessage
from jaxinfer.client.requests import (
    GenerateOptions,
    Prompt,
    ScoreOptions,
    TokenizeOptions,
    detokenize_request,
    generate_request,
    score_request,
    tokenize_request,
)
from jaxinfer.client.results import (
    Answer,
    BatchItem,
    Completion,
    Delta,
    Health,
    ModelInfo,
    Scored,
    Usage,
    read_model_info,
    read_scored,
)
from jaxinfer.client.translate import read_response_async, translated_async
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10

_RECONNECT_SECONDS = 0.1


class AsyncClient:
    """Connection to a jaxinfer server, for any number of tasks of one event loop. Create it where the loop runs.

    ```
    async with AsyncClient("localhost:50051") as client:
        completion = await client.generate("Once upon a time", max_tokens=32)
        print(completion.text)
    ```

    Calls raise `ServerError` or a subclass; a cancelled task cancels its call. ``timeout`` is in seconds,
    including the wait in the server's queue; None is that of the client.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: bool | TLS = False,
        timeout: float | None = None,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        keepalive: float | None = 30.0,
    ) -> None:
        """Create the client; it connects at the first call.

        Args:
            target: ``host:port`` (or ``grpc://host:port``), ``unix:/path``, or any other name that gRPC resolves.
            api_key: sent with each call; readable on the network without ``tls``.
            tls: True for the system's certificates.
            timeout: default timeout of each call, in seconds (default: none).
            retry: None disables retries.
            keepalive: seconds between pings while calls are open; None sends none.

        Raises:
            OSError: a file of ``tls`` cannot be read.
            ValueError: ``target``, ``keepalive`` or ``api_key`` is invalid.
        """
        target = checked_target(target)
        link = connection(api_key, tls, retry, keepalive)
        if link.credentials is None:
            self._channel = grpc.aio.insecure_channel(target, link.options)
        else:
            self._channel = grpc.aio.secure_channel(target, link.credentials, link.options)
        self._stub = InferenceStub(self._channel)
        self._metadata = link.metadata
        self._shown = f"<{type(self).__name__} {target}{'' if link.credentials is None else ', TLS'}>"
        self._explain = explainer(target, tls)
        self._timeout = timeout

    def __repr__(self) -> str:
        return self._shown

    async def close(self) -> None:
        """Close the connection, and cancel every open call."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- generation

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Return the complete answer to a text, to token ids, or to chat messages.

        Raises:
            ServerError: see the class.
            TypeError, ValueError: the request is invalid.
        """
        request = generate_request(prompt, token_ids, messages, options)
        async with self._open(request, timeout) as stream:
            return await stream.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Stream the answer. Raises as `generate`, except that the stream raises the server's errors."""
        return self._open(generate_request(prompt, token_ids, messages, options), timeout)

    async def generate_batch(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[BatchItem, None]:
        """Generate for many prompts (text, token ids, or chat messages) over one stream; yield items as they finish.

        ``prompts`` is read no faster than the server accepts them. Errors of one prompt are in its
        item; errors raised here concern all. Closing the generator (``contextlib.aclosing``) cancels
        unfinished prompts.

        Raises:
            ServerError, TypeError, ValueError: see `generate`.
            Exception: raised by ``prompts``, after the items of the earlier prompts.
        """
        batch = Batch(dict(options))
        call = self._stub.GenerateBatch(batch.requests_async(prompts), **self._settings(timeout))
        try:
            async with translated_async(self._explain):
                async for response in call:
                    if (item := batch.take(response)) is not None:
                        yield item
            batch.check()
        finally:
            call.cancel()

    # ---- the other calls

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        timeout: float | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> list[int]:
        """Return the token ids of a text, or of chat messages under the model's template."""
        request = tokenize_request(text, messages, options)
        async with translated_async(self._explain):
            response = await self._stub.Tokenize(request, **self._settings(timeout))
        return list(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens, model)
        async with translated_async(self._explain):
            response = await self._stub.Detokenize(request, **self._settings(timeout))
        return response.text

    async def score(
        self,
        prompt: str | None = None,
        continuations: Sequence[str | Sequence[int]] = (),
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | None = None,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[Scored]:
        """Return log probabilities of each continuation after the same prompt."""
        request = score_request(prompt, token_ids, messages, continuations, options)
        async with translated_async(self._explain):
            response = await self._stub.Score(request, **self._settings(timeout))
        return [read_scored(item) for item in response.scored]

    async def model_info(self, *, model: str | None = None, timeout: float | None = None) -> ModelInfo:
        """Describe the served model, with its defaults and limits."""
        request = pb.GetModelInfoRequest(model=model)
        async with translated_async(self._explain):
            return read_model_info(await self._stub.GetModelInfo(request, **self._settings(timeout)))

    async def health(self, service: str = READINESS, *, timeout: float | None = None) -> Health:
        """Return the health of a service; "" checks liveness.

        Raises:
            NotFound: the server does not know the service.
        """
        check = self._channel.unary_unary(CHECK.path, CHECK.serializer, CHECK.deserializer)
        async with translated_async(self._explain):
            return read_health(await check(health_request(service), **self._settings(timeout)))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the server accepts requests, also if it does not listen yet.

        Raises:
            DeadlineExceeded: it is not ready after ``timeout`` seconds.
            Incompatible: this client can never connect to it.
        """
        seconds = self._timeout if timeout is None else timeout
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                if await self._watched_ready(left):
                    return
            if end is not None and time.monotonic() >= end:
                raise DeadlineExceeded(f"not ready after {seconds} s", grpc.StatusCode.DEADLINE_EXCEEDED)
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _watched_ready(self, timeout: float | None) -> bool:
        """Watch the health; return False if the server ended the watch before it was ready."""
        watch = self._channel.unary_stream(WATCH.path, WATCH.serializer, WATCH.deserializer)
        call = watch(health_request(READINESS), timeout=timeout, metadata=self._metadata)
        try:
            async with translated_async(self._explain):
                async for response in call:
                    if read_health(response) is Health.SERVING:
                        return True
            return False
        finally:
            call.cancel()

    def _open(self, request: pb.GenerateRequest, timeout: float | None) -> AsyncStream:
        return AsyncStream(self._stub.Generate(request, **self._settings(timeout)), self._explain)

    def _settings(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": self._timeout if timeout is None else timeout, "metadata": self._metadata}


class AsyncStream:
    """Deltas of one request. ``async with`` waits until the server has accepted it, and cancels it on early exit.

    ```
    async with client.stream("Once") as stream:
        async for delta in stream:
            print(delta.text, end="")
    ```

    Iterating raises `ServerError` if the call fails, `Truncated` if it ends early.
    """

    def __init__(self, call: Any, explain: Explain) -> None:
        self._call, self._explain = call, explain
        self._answer = Answer()

    async def __aenter__(self) -> AsyncStream:
        try:
            if self._answer.seed is None:
                self._answer.take(await self._read())
        except BaseException:
            self._call.cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if (delta := self._answer.take(await self._read())) is not None:
                return delta

    def cancel(self) -> None:
        """Abort the request. A concurrent iteration raises `Cancelled`. No-op after its end."""
        self._call.cancel()

    async def completion(self) -> Completion:
        """Read the rest of the stream, and return the complete answer, including deltas that were already iterated.

        Raises:
            ServerError: see the class.
        """
        async for _ in self:
            pass
        return self._answer.completion()

    @property
    def request_id(self) -> str:
        """Id of the request; available once the stream is entered, as are ``seed``, ``prompt_tokens`` and ``model``."""
        return self._answer.request_id

    @property
    def seed(self) -> int | None:
        return self._answer.seed

    @property
    def prompt_tokens(self) -> int | None:
        return self._answer.prompt_tokens

    @property
    def model(self) -> str:
        """Name of the model that answers: the served model, or an adapter."""
        return self._answer.model

    @property
    def usage(self) -> Usage | None:
        """Token usage; available when the iteration has ended."""
        return self._answer.usage

    async def _read(self) -> pb.GenerateResponse:
        async with translated_async(self._explain):
            response = await read_response_async(self._call)
        if response is not None:
            return response
        if self._answer.usage is None:
            raise Truncated(f"the stream of request {self.request_id!r} ended before the answer did")
        raise StopAsyncIteration
