"""Servicer of `vllm.grpc.engine.VllmEngine`, used by SMG and llm-d's endpoint picker, based on a `Frontend`.

docs/routing.md lists the mapped and the rejected fields.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxinfer.serve.api.errors import Kind, ServeError, rename_fields
from jaxinfer.serve.api.requests import Call, Conversation
from jaxinfer.serve.core.profiling import checked_steps
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.grpc.auth import SCOPES
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.serve.grpc.stream_writer import StreamWriter
from jaxinfer.serve.grpc.vllm import convert, messages
from jaxinfer.serve.grpc.vllm.answers import Answer
from jaxinfer.serve.grpc.vllm.events import send_events
from jaxinfer.serve.grpc.vllm.info import Activity, model_info, model_type, server_info
from jaxinfer.serve.grpc.vllm.loads import Loads
from jaxinfer.serve.grpc.vllm.tokenizer import Bundles, chunks
from jaxinfer.serve.kv_events.hub import Hub
from jaxinfer.text.output import OutputDelta

NAME = "vllm.grpc.engine.VllmEngine"
MAX_IDS = 1024
"""Maximum number of requests in one Abort."""


class Service(NamedTuple):
    """Subset of a ServiceDescriptor that serving needs, without methods that only newer packages have."""

    full_name: str
    file: Any
    methods: list[Any]


def service() -> Service:
    """Return the service. Raises `ServeConfigError`: the message package is not available."""
    found = messages.pb.DESCRIPTOR.services_by_name["VllmEngine"]
    return Service(NAME, found.file, [method for method in found.methods if f"{NAME}/{method.name}" in SCOPES])


@runtime_checkable
class Condition(Protocol):
    """Health of the server; see `jaxinfer.serve.core.supervisor.Condition`."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


@runtime_checkable
class Profiler(Protocol):
    """Profiler of the engine; see `jaxinfer.serve.grpc.control.Engine`."""

    async def start_profile(self, steps: int) -> None: ...
    async def stop_profile(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Served:
    """Properties of the server that the service needs in addition to its front end.

    Attributes:
        condition: as reported by /ready; generations are accepted only in the state "ready".
        folder: returns the tokenizer's folder; called once there is a front end.
        model: value of the model setting.
        profiling: whether a folder for traces is configured.
        operated: whether admin RPCs are served: operators have API keys, or only operators can reach this server.
        kv_events: KV cache events of the engine; None: disabled.
    """

    condition: Callable[[], Condition]
    folder: Callable[[], pathlib.Path]
    model: str
    profiler: Profiler
    profiling: bool = False
    operated: bool = True
    kv_events: Hub | None = None


class VllmEngine:
    """All RPCs of the service.

    Args:
        frontend: returns the front end, or raises `ServeError` while the model is loading.
    """

    def __init__(self, frontend: Callable[[], Frontend], served: Served) -> None:
        self._frontend, self._served = frontend, served
        self._activity, self._loads, self._bundles = Activity(), Loads(), Bundles()

    async def Generate(self, request: Any, rpc: Rpc) -> None:
        self._activity.receive()
        async with await self._begin(self._frontend(), request, rpc) as generation:
            answer = Answer(generation, stream=request.stream)

            async def write(delta: OutputDelta) -> None:
                for response in answer.responses(delta):
                    await rpc.write(response)

            await StreamWriter(generation, write).run()
            for response in answer.rest():
                await rpc.write(response)

    async def _begin(self, frontend: Frontend, request: Any, rpc: Rpc) -> Generation:
        card = frontend.card
        call = convert.call_of(
            request,
            replicas=card.engine.get("data_parallel_size", 1),
            timeout=rpc.time_remaining(),
            tenant=rpc.caller.name,
            trace=rpc.trace(),
        )
        kept = convert.truncation_of(request.sampling_params, card.max_model_len)
        with rename_fields(convert.names_of(request)):
            if kept is not None:
                call = dataclasses.replace(call, prompt=(await _tokens(frontend, call))[-kept:])
            return await frontend.generate(call)

    async def Embed(self, request: Any, rpc: Rpc) -> Any:
        raise ServeError(Kind.UNIMPLEMENTED, "Embed is not served: jaxinfer has no embeddings")

    async def HealthCheck(self, request: Any, rpc: Rpc) -> Any:
        self._frontend()  # raises while loading: a router queries the model info after any response
        found = self._served.condition()
        healthy = found.state == "ready"
        return messages.pb.HealthCheckResponse(healthy=healthy, message="" if healthy else found.reason or found.state)

    async def Abort(self, request: Any, rpc: Rpc) -> Any:
        if len(request.request_ids) > MAX_IDS:
            reason = f"request_ids must hold at most {MAX_IDS} ids, not {len(request.request_ids)}"
            raise ServeError(Kind.INVALID, reason, "request_ids")
        for request_id in request.request_ids:
            await self._frontend().abort(request_id, tenant=rpc.caller.name)
        return messages.pb.AbortResponse()

    async def GetModelInfo(self, request: Any, rpc: Rpc) -> Any:
        frontend = self._frontend()
        kind = await asyncio.to_thread(model_type, self._served.folder())
        return model_info(frontend, self._served.model, kind)

    async def GetServerInfo(self, request: Any, rpc: Rpc) -> Any:
        return server_info(self._frontend(), self._activity)

    async def GetLoads(self, request: Any, rpc: Rpc) -> Any:
        return await self._loads.of(self._frontend(), request.dp_rank)

    async def GetTokenizer(self, request: Any, rpc: Rpc) -> None:
        self._frontend()
        bundle = await self._bundles.of(self._served.folder())
        for chunk in chunks(bundle):
            await rpc.write(chunk)

    async def FlushCache(self, request: Any, rpc: Rpc) -> Any:
        self._check_operated("FlushCache")
        pages = await self._frontend().flush_prefix_cache()
        return messages.common.FlushCacheResponse(success=True, message=f"{pages} pages forgotten")

    async def StartProfile(self, request: Any, rpc: Rpc) -> Any:
        self._check_profiling(request)
        steps = request.num_steps if request.HasField("num_steps") else None
        await self._served.profiler.start_profile(checked_steps(steps, "num_steps"))
        return messages.common.ProfileResponse(success=True)

    async def StopProfile(self, request: Any, rpc: Rpc) -> Any:
        self._check_profiling(request)
        folder = await self._served.profiler.stop_profile()
        return messages.common.ProfileResponse(success=True, message=folder)

    async def SubscribeKvEvents(self, request: Any, rpc: Rpc) -> None:
        hub, frontend = self._served.kv_events, self._frontend()
        if hub is None:
            raise ServeError(Kind.UNIMPLEMENTED, "SubscribeKvEvents needs kv_events, which is off")
        await send_events(hub, request, lambda: self._loads.load(frontend), rpc.write)

    def _check_operated(self, name: str) -> None:
        if not self._served.operated:
            reason = f"{name} is for operators, whom nothing tells apart here without api_keys"
            raise ServeError(Kind.FORBIDDEN, reason)

    def _check_profiling(self, request: Any) -> None:
        """Reject profiling options of the client but the steps: the server's settings decide how to profile."""
        self._check_operated(type(request).__name__.removesuffix("Request"))
        if not self._served.profiling:
            raise ServeError(Kind.UNIMPLEMENTED, "profiling is off: the server was started without profile_dir")
        for field in (field for field, _ in request.ListFields() if field.name != "num_steps"):
            raise ServeError(Kind.INVALID, f"{field.name} is not served: leave it out", field.name)


async def _tokens(frontend: Frontend, call: Call) -> Sequence[int]:
    prompt = call.prompt
    if isinstance(prompt, str | Conversation):
        return await frontend.tokenize(prompt, add_special_tokens=call.add_special_tokens, tenant=call.tenant)
    return prompt
