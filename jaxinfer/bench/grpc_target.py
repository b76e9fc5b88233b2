"""Target for jaxinfer's own servers, over gRPC."""

from __future__ import annotations

import itertools
import urllib.parse
from collections.abc import Callable
from typing import Any

import grpc

from jaxinfer.bench.target import Access, Ending, Item, Sampling, SendFailed, Served, TargetError
from jaxinfer.protos.v1 import inference_pb2 as pb

SERVICE = "/jaxinfer.v1.Inference/"
# Rejected requests must be counted, not retried by gRPC; each channel has its own connection.
OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]
PORT = 50051


class GrpcTarget:
    """gRPC implementation of `Target`."""

    def __init__(self, access: Access, sampling: Sampling) -> None:
        url = urllib.parse.urlsplit(access.url)
        self._address = f"{url.hostname}:{url.port or PORT}"
        self._secure = url.scheme == "grpcs"
        self._access, self._sampling = access, sampling
        key = access.api_key
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._channels: list[grpc.aio.Channel] = []

    async def open(self) -> Served:
        self._channels = [self._channel() for _ in range(self._access.connections)]
        # Messages are serialised ahead of time: the stub sends bytes.
        self._generate = itertools.cycle(
            [
                channel.unary_stream(f"{SERVICE}Generate", response_deserializer=pb.GenerateResponse.FromString)
                for channel in self._channels
            ]
        )
        info = await self._ask("GetModelInfo", pb.GetModelInfoRequest(model=self._access.model), pb.ModelInfo)
        self._model = info.name
        return Served(info.name, info.version or None, info.vocab_size or None, info.max_model_len or None)

    def _channel(self) -> grpc.aio.Channel:
        if self._secure:
            return grpc.aio.secure_channel(self._address, grpc.ssl_channel_credentials(self._access.ca), OPTIONS)
        return grpc.aio.insecure_channel(self._address, OPTIONS)

    async def count_tokens(self, text: str) -> int:
        request = pb.TokenizeRequest(text=text, add_special_tokens=False)
        return len((await self._ask("Tokenize", request, pb.TokenizeResponse)).token_ids)

    async def _ask(self, method: str, request: Any, response: Any) -> Any:
        call = self._channels[0].unary_unary(
            SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return await call(request, timeout=self._access.connect_timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as cause:
            raise TargetError(_sentence(self._access.url, cause)) from cause

    def prepare(self, item: Item) -> bytes:
        sampling = pb.SamplingParams(max_tokens=item.output_len, temperature=self._sampling.temperature)
        sampling.ignore_eos = self._sampling.ignore_eos
        sampling.seed = self._sampling.seed
        request = pb.GenerateRequest(model=self._model, sampling=sampling)
        if isinstance(item.prompt, str):
            request.prompt = item.prompt
        else:
            request.token_ids.ids.extend(item.prompt)
        return request.SerializeToString()

    async def stream(self, message: bytes, note: Callable[[int], None]) -> Ending:
        finish, usage = None, None
        call = next(self._generate)(message, metadata=self._metadata)
        try:
            async for response in call:
                event = response.WhichOneof("event")
                if event == "delta":
                    delta = response.delta
                    if delta.token_ids:
                        note(len(delta.token_ids))
                    if delta.HasField("finish_reason"):
                        finish = pb.FinishReason.Name(delta.finish_reason).removeprefix("FINISH_REASON_").lower()
                elif event == "finished":
                    usage = response.finished.usage
        except grpc.aio.AioRpcError as cause:
            raise SendFailed(cause.code().name, cause.details() or "") from cause
        finally:
            call.cancel()  # cancels a stream that was left early; else a no-op
        if usage is None:
            raise SendFailed("truncated", "the stream ended without its last message")
        return Ending(finish, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def _sentence(url: str, cause: grpc.aio.AioRpcError) -> str:
    if cause.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"no answer from {url}: {cause.details()}"
    if cause.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"{url} has no service jaxinfer.v1.Inference (UNIMPLEMENTED: {cause.details()})"
    return f"{url} answers {cause.code().name}: {cause.details()}"
