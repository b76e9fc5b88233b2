"""Servicer of `jaxinfer.v1.Control`, for operators of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol, override, runtime_checkable

from jaxinfer.engine.core import PauseMode
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.protos.v1 import control_pb2 as pb
from jaxinfer.protos.v1.control_pb2_grpc import ControlServicer
from jaxinfer.serve.api.errors import Kind, ServeError, invalid, rename_fields
from jaxinfer.serve.core import operations
from jaxinfer.serve.core.operations import WeightState
from jaxinfer.serve.core.profiling import checked_steps
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.loras import NameInUseError, required
from jaxinfer.serve.frontend.operations import Operations
from jaxinfer.serve.grpc.loras import lora_message
from jaxinfer.serve.grpc.rpc import Rpc

_MAX_DRAIN_SECONDS = 24 * 3600.0


@runtime_checkable
class Startup(Protocol):
    """Progress of the engine's startup. ``phase``: a name of `control_pb2.StartupEvent.Phase`, case-insensitive."""

    @property
    def phase(self) -> str: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def bytes_total(self) -> int: ...
    @property
    def compilations_done(self) -> int: ...
    @property
    def compilations_total(self) -> int: ...
    @property
    def message(self) -> str: ...


@runtime_checkable
class Engine(Protocol):
    """Lifecycle of the engine, as the API servers use it; see `jaxinfer.serve.core.supervisor.Supervisor`."""

    @property
    def state(self) -> str:
        """Engine state: "starting", "ready", "dead" or "stopped"."""
        ...

    @property
    def restarts(self) -> int: ...

    def watch_startup(self) -> AsyncIterator[Startup]:
        """Yield startup progress from now on, until READY or FAILED."""
        ...

    async def start_profile(self, steps: int) -> None: ...

    async def stop_profile(self) -> str:
        """Stop profiling and return the folder of the trace."""
        ...

    @property
    def operations(self) -> Operations:
        """What operators may change."""
        ...


class Control(ControlServicer):
    """All RPCs of the service.

    Args:
        frontend: returns the front end, or raises `ServeError` while there is none.
        drain_seconds: timeout of a Drain that sets none.
        profiling: whether a folder for traces is configured.
    """

    def __init__(
        self, frontend: Callable[[], Frontend], engine: Engine, *, drain_seconds: float, profiling: bool
    ) -> None:
        self._frontend, self._engine, self._operations = frontend, engine, engine.operations
        self._drain_seconds, self._profiling = drain_seconds, profiling

    @override
    async def Abort(self, request: pb.AbortRequest, rpc: Rpc) -> pb.AbortResponse:
        index = request.output_index if request.HasField("output_index") else None
        tenant = request.tenant if request.HasField("tenant") else None
        await self._frontend().abort(request.request_id, index, tenant)
        return pb.AbortResponse()

    @override
    async def GetStats(self, request: pb.GetStatsRequest, rpc: Rpc) -> pb.Stats:
        """Return engine stats; only state and restarts if the engine does not run."""
        stats = pb.Stats(state=self._state(), restarts=self._engine.restarts)
        if self._engine.state == "ready":
            try:
                _fill(stats, await self._frontend().stats())
            except ServeError as error:
                if error.kind is not Kind.UNAVAILABLE:
                    raise
                stats.state = self._state()  # the engine died meanwhile
        return stats

    @override
    async def WatchStartup(self, request: pb.WatchStartupRequest, rpc: Rpc) -> AsyncIterator[pb.StartupEvent]:
        async for event in self._engine.watch_startup():
            yield pb.StartupEvent(
                phase=pb.StartupEvent.Phase.Value(event.phase.upper()),
                bytes_done=event.bytes_done,
                bytes_total=event.bytes_total,
                compilations_done=event.compilations_done,
                compilations_total=event.compilations_total,
                message=event.message,
            )

    @override
    async def Drain(self, request: pb.DrainRequest, rpc: Rpc) -> pb.DrainResponse:
        seconds = self._drain_seconds
        if request.HasField("timeout"):
            seconds = request.timeout.seconds + request.timeout.nanos / 1e9
        if not 0 <= seconds <= _MAX_DRAIN_SECONDS:
            reason = f"timeout={seconds:g} s must be within 0 and {_MAX_DRAIN_SECONDS:g} s"
            raise ServeError(Kind.INVALID, reason, field="timeout")
        return pb.DrainResponse(aborted=await self._frontend().drain(seconds))

    @override
    async def FlushPrefixCache(self, request: pb.FlushPrefixCacheRequest, rpc: Rpc) -> pb.FlushPrefixCacheResponse:
        return pb.FlushPrefixCacheResponse(pages=await self._frontend().flush_prefix_cache())

    @override
    async def StartProfile(self, request: pb.StartProfileRequest, rpc: Rpc) -> pb.StartProfileResponse:
        self._check_profiling()
        await self._engine.start_profile(checked_steps(request.steps if request.HasField("steps") else None))
        return pb.StartProfileResponse()

    @override
    async def StopProfile(self, request: pb.StopProfileRequest, rpc: Rpc) -> pb.StopProfileResponse:
        self._check_profiling()
        return pb.StopProfileResponse(folder=await self._engine.stop_profile())

    @override
    async def LoadLora(self, request: pb.LoadLoraRequest, rpc: Rpc) -> pb.LoadLoraResponse:
        frontend = self._frontend()
        loras, replace = required(frontend.loras), request.load_inplace
        try:
            loaded = await loras.load(request.lora_name, request.lora_path, replace=replace)
        except NameInUseError as error:
            raise ServeError(Kind.EXISTS, error.message, error.field) from None
        return pb.LoadLoraResponse(lora=lora_message(loaded, frontend.card.name))

    @override
    async def UnloadLora(self, request: pb.UnloadLoraRequest, rpc: Rpc) -> pb.UnloadLoraResponse:
        await required(self._frontend().loras).unload(request.lora_name)
        return pb.UnloadLoraResponse()

    @override
    async def ListLoras(self, request: pb.ListLorasRequest, rpc: Rpc) -> pb.ListLorasResponse:
        frontend = self._frontend()
        loras, parent = required(frontend.loras).list(), frontend.card.name
        return pb.ListLorasResponse(loras=[lora_message(loaded, parent) for loaded in loras])

    @override
    async def Pause(self, request: pb.PauseRequest, rpc: Rpc) -> pb.EngineState:
        return _engine_state(await self._operations.run(operations.Pause(_mode(request.mode) or "wait")))

    @override
    async def Resume(self, request: pb.ResumeRequest, rpc: Rpc) -> pb.EngineState:
        return _engine_state(await self._operations.run(operations.Resume()))

    @override
    async def AbortAll(self, request: pb.AbortAllRequest, rpc: Rpc) -> pb.AbortAllResponse:
        return pb.AbortAllResponse(aborted=(await self._operations.run(operations.AbortAll())).aborted)

    @override
    async def Sleep(self, request: pb.SleepRequest, rpc: Rpc) -> pb.EngineState:
        level = request.level if request.HasField("level") else 1
        tags, mode = tuple(request.tags) or operations.TAGS, _mode(request.mode) or "keep"
        return _engine_state(await self._operations.run(operations.Sleep(level, tags, mode)))

    @override
    async def WakeUp(self, request: pb.WakeUpRequest, rpc: Rpc) -> pb.EngineState:
        tags = tuple(request.tags) or operations.TAGS
        return _engine_state(await self._operations.run(operations.WakeUp(tags)))

    @override
    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, rpc: Rpc) -> pb.UpdateWeightsResponse:
        version = request.weight_version if request.HasField("weight_version") else None
        update = operations.UpdateWeights(request.path, version, _mode(request.mode), list(request.parts))
        with rename_fields({"version": "weight_version"}):
            state = await self._operations.run(update)
        return pb.UpdateWeightsResponse(state=_engine_state(state), bytes=state.bytes, seconds=state.seconds)

    @override
    async def WeightInfo(self, request: pb.WeightInfoRequest, rpc: Rpc) -> pb.WeightInfoResponse:
        state = await self._operations.run(operations.Look(request.checksums))
        return pb.WeightInfoResponse(state=_engine_state(state), checksums=state.checksums)

    def _check_profiling(self) -> None:
        if not self._profiling:
            raise ServeError(Kind.INVALID, "profiling is off: the server was started without profile_dir")

    def _state(self) -> str:
        state = self._engine.state
        return "draining" if state == "ready" and not self._frontend().is_open else state


def _engine_state(state: WeightState) -> pb.EngineState:
    return pb.EngineState(weight_version=state.version, is_paused=state.paused, asleep=state.asleep)


def _mode(mode: int) -> PauseMode | None:
    """Return the mode of a pause; None: the default. Raises `ServeError` INVALID for an unknown one."""
    if mode not in _MODES:
        raise invalid("mode", mode, "is no PauseMode")
    return _MODES[mode]


_MODES: Mapping[int, PauseMode | None] = {
    pb.PAUSE_MODE_UNSPECIFIED: None,
    pb.PAUSE_MODE_WAIT: "wait",
    pb.PAUSE_MODE_KEEP: "keep",
    pb.PAUSE_MODE_ABORT: "abort",
}


def _fill(message: pb.Stats, stats: EngineStats) -> None:
    message.running = stats.running
    message.waiting.update(stats.waiting)
    if stats.kv is not None:
        kv = stats.kv
        message.kv_pages.update(total=kv.total, free=kv.free, cached=kv.cached, held=kv.held)
        message.kv_pages.update(host_total=kv.host_total, host_used=kv.host_used)
    message.finished.update({reason.value: count for reason, count in stats.finished.items()})
    message.preemptions.update(stats.preemptions)
    message.draft_accepted_at.extend(stats.draft_accepted_at)
    if stats.loras is not None:
        message.lora_usage.CopyFrom(pb.LoraUsage(**dataclasses.asdict(stats.loras)))
    if (weights := stats.weights) is not None:
        message.weights.weight_version, message.weights.is_paused = weights.version, weights.paused
        message.weights.asleep.extend(weights.asleep)
        message.weights.updates, message.weights.update_seconds = weights.update_time.count, weights.update_time.sum
    if stats.usage is not None:
        _fill_usage(message, stats.usage)
    for name in _SAME:
        setattr(message, name, getattr(stats, name))


def _fill_usage(message: pb.Stats, usage: Usage) -> None:
    message.seconds = usage.seconds
    message.hosts.extend(pb.HostUsage(**dataclasses.asdict(host)) for host in usage.hosts)
    for device in usage.devices:  # fields that are None stay unset
        driver = None if device.driver is None else pb.DriverFigures(**dataclasses.asdict(device.driver))
        message.devices.append(pb.DeviceUsage(**{**vars(device), "driver": driver}))


_SAME = (
    "prompt_tokens",
    "generated_tokens",
    "prefix_queries",
    "prefix_hits",
    "drafts",
    "draft_tokens",
    "draft_accepted",
    "steps",
    "compilations",
)
