"""Client of a server's control port: statistics, requests, the prefix cache, LoRA adapters, weights, pauses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from jaxinfer.client.connect import TLS, checked_target, connection
from jaxinfer.client.diagnosis import explainer
from jaxinfer.client.fields import extend, set_field
from jaxinfer.client.translate import translated, translated_async
from jaxinfer.protos.v1 import control_pb2 as pb
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub

MODES = ("wait", "keep", "abort")
"""What becomes of running requests: see `Control.pause`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter that requests may name.

    Attributes:
        path: path of its folder on the server.
        identity: SHA-256 of its content, hexadecimal: identical for equal adapters, whatever their names.
        rank: the largest rank of its modules.
        parent: the served model, which it changes.
    """

    name: str
    path: str
    identity: str
    rank: int
    parent: str


@dataclasses.dataclass(frozen=True, slots=True)
class EngineState:
    """State of a server's engine.

    Attributes:
        weight_version: version of the served weights; 0: those of the start.
        is_paused: it computes nothing until `Control.resume`.
        asleep: what has no memory: "kv_cache", "weights".
    """

    weight_version: int
    is_paused: bool
    asleep: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightUpdate(EngineState):
    """State after an update of weights, their bytes, and the seconds for placing and exchanging them."""

    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class WeightInfo(EngineState):
    """State, and a digest of each parameter by path, if asked for."""

    checksums: Mapping[str, str]


class _Connected:
    """Base of both control clients. Calls are not retried: loading is not idempotent."""

    _grpc: ClassVar[Any] = grpc

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: bool | TLS = False,
        timeout: float | None = None,
        keepalive: float | None = 30.0,
    ) -> None:
        """Create the client; it connects at the first call. Arguments and errors: see `jaxinfer.client.Client`;
        ``api_key`` needs the scopes "admin" and "observe"."""
        target = checked_target(target)
        link = connection(api_key, tls, None, keepalive)
        if link.credentials is None:
            self._channel = self._grpc.insecure_channel(target, link.options)
        else:
            self._channel = self._grpc.secure_channel(target, link.credentials, link.options)
        self._stub = ControlStub(self._channel)
        self._metadata, self._timeout = link.metadata, timeout
        self._shown = f"<{type(self).__name__} {target}{'' if link.credentials is None else ', TLS'}>"
        self._explain = explainer(target, tls)

    def __repr__(self) -> str:
        return self._shown

    def _settings(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": self._timeout if timeout is None else timeout, "metadata": self._metadata}


class Control(_Connected):
    """Connection to the control port of a server, for any number of threads.

    ```
    with Control("localhost:50052") as control:
        control.load_lora("pirate", "adapters/pirate")
    ```

    Calls raise `ServerError` or a subclass. ``timeout`` is in seconds; None is that of the client.
    """

    def close(self) -> None:
        """Close the connection, and cancel every open call."""
        self._channel.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the fields of `Stats` in protos/jaxinfer/v1/control.proto, by name."""
        with translated(self._explain):
            return as_dict(self._stub.GetStats(pb.GetStatsRequest(), **self._settings(timeout)))

    def abort(self, request_id: str, *, tenant: str | None = None, timeout: float | None = None) -> None:
        """Abort a request in any state; an unknown id is ignored. ``tenant``: only if it belongs to that tenant."""
        request = abort_request(request_id, tenant)
        with translated(self._explain):
            self._stub.Abort(request, **self._settings(timeout))

    def drain(self, within: float | None = None, *, timeout: float | None = None) -> int:
        """Make the server reject new requests, wait for running ones, and return how many were aborted after ``within``
        seconds (None: the server's ``drain_seconds``)."""
        request = drain_request(within)
        with translated(self._explain):
            return int(self._stub.Drain(request, **self._settings(timeout)).aborted)

    def flush_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Drop cached prefixes and return the number of pages. Pages of running requests stay."""
        with translated(self._explain):
            return int(self._stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(), **self._settings(timeout)).pages)

    def start_profile(self, steps: int | None = None, *, timeout: float | None = None) -> None:
        """Start a device profile, which ends after ``steps`` of the engine (None: 1000, the most).

        Raises:
            InvalidRequest: the server has no folder for profiles, or one is running.
        """
        request = profile_request(steps)
        with translated(self._explain):
            self._stub.StartProfile(request, **self._settings(timeout))

    def stop_profile(self, *, timeout: float | None = None) -> str:
        """End the profile, unless it has ended by itself, and return the folder with the trace on the server."""
        with translated(self._explain):
            return str(self._stub.StopProfile(pb.StopProfileRequest(), **self._settings(timeout)).folder)

    def load_lora(
        self, lora_name: str, lora_path: str, *, load_inplace: bool = False, timeout: float | None = None
    ) -> Lora:
        """Load an adapter; requests may name it once the server has read it.

        Args:
            lora_path: path of its folder on the server, below its ``lora_root``.
            load_inplace: replace a loaded adapter of this name.

        Raises:
            AlreadyExists: the name is loaded, and ``load_inplace`` is false.
            FailedPrecondition: the server takes no adapters.
            InvalidRequest: the folder, or its contents, cannot be served.
        """
        request = load_request(lora_name, lora_path, load_inplace)
        with translated(self._explain):
            return read_lora(self._stub.LoadLora(request, **self._settings(timeout)).lora)

    def unload_lora(self, lora_name: str, *, timeout: float | None = None) -> None:
        """Unload an adapter, so that further requests cannot name it. `NotFound`: there is none of this name."""
        request = unload_request(lora_name)
        with translated(self._explain):
            self._stub.UnloadLora(request, **self._settings(timeout))

    def list_loras(self, *, timeout: float | None = None) -> list[Lora]:
        """Return the loaded adapters, sorted by name."""
        with translated(self._explain):
            answer = self._stub.ListLoras(pb.ListLorasRequest(), **self._settings(timeout))
        return [read_lora(lora) for lora in answer.loras]

    def pause(self, mode: str | None = None, *, timeout: float | None = None) -> EngineState:
        """Compute nothing until `resume`; requests queue.

        Args:
            mode: "wait" (the default): requests that have begun end first; "keep": they go on later; "abort": they end.
        """
        request = pause_request(mode)
        with translated(self._explain):
            return read_state(self._stub.Pause(request, **self._settings(timeout)))

    def resume(self, *, timeout: float | None = None) -> EngineState:
        """Go on after `pause`. `InvalidRequest`: something is asleep."""
        with translated(self._explain):
            return read_state(self._stub.Resume(pb.ResumeRequest(), **self._settings(timeout)))

    def abort_all(self, *, timeout: float | None = None) -> int:
        """Abort all requests and return their number."""
        with translated(self._explain):
            return int(self._stub.AbortAll(pb.AbortAllRequest(), **self._settings(timeout)).aborted)

    def sleep(
        self, level: int = 1, tags: Sequence[str] = (), *, mode: str | None = None, timeout: float | None = None
    ) -> EngineState:
        """Free device memory until `wake_up`; requests queue.

        Args:
            level: 1: weights are copied to the host's memory; 2: they are dropped.
            tags: "kv_cache", "weights"; none: both.
            mode: see `pause`; the default is "keep".
        """
        request = sleep_request(level, tags, mode)
        with translated(self._explain):
            return read_state(self._stub.Sleep(request, **self._settings(timeout)))

    def wake_up(self, tags: Sequence[str] = (), *, timeout: float | None = None) -> EngineState:
        """Take back what `sleep` freed; no tags: all of it."""
        with translated(self._explain):
            return read_state(self._stub.WakeUp(pb.WakeUpRequest(tags=tags), **self._settings(timeout)))

    def update_weights(
        self,
        path: str,
        *,
        weight_version: int | None = None,
        mode: str | None = None,
        parts: Sequence[str] = (),
        timeout: float | None = None,
    ) -> WeightUpdate:
        """Serve new weights, all of them from one step on.

        Args:
            path: folder of safetensors on the server, below its ``weights_root``.
            weight_version: above that of the served weights (None: by 1).
            mode: see `pause`; "keep": requests go on under the new weights. The default is "wait", or "keep" if the
                engine is paused.
            parts: folders with the tensors that ``path`` lacks.

        Raises:
            FailedPrecondition: the server reads no weights.
            InvalidRequest: the weights cannot be served; the old ones stay.
        """
        request = update_request(path, weight_version, mode, parts)
        with translated(self._explain):
            return read_update(self._stub.UpdateWeights(request, **self._settings(timeout)))

    def weight_info(self, *, checksums: bool = False, timeout: float | None = None) -> WeightInfo:
        """Return the state of the engine and, with ``checksums``, a digest of each parameter by path."""
        request = pb.WeightInfoRequest(checksums=checksums)
        with translated(self._explain):
            return read_info(self._stub.WeightInfo(request, **self._settings(timeout)))


class AsyncControl(_Connected):
    """`Control` for asyncio. Create it where the loop runs."""

    _grpc = grpc.aio

    async def close(self) -> None:
        """Close the connection, and cancel every open call."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """See `Control.stats`."""
        async with translated_async(self._explain):
            return as_dict(await self._stub.GetStats(pb.GetStatsRequest(), **self._settings(timeout)))

    async def abort(self, request_id: str, *, tenant: str | None = None, timeout: float | None = None) -> None:
        """See `Control.abort`."""
        request = abort_request(request_id, tenant)
        async with translated_async(self._explain):
            await self._stub.Abort(request, **self._settings(timeout))

    async def drain(self, within: float | None = None, *, timeout: float | None = None) -> int:
        """See `Control.drain`."""
        request = drain_request(within)
        async with translated_async(self._explain):
            return int((await self._stub.Drain(request, **self._settings(timeout))).aborted)

    async def flush_prefix_cache(self, *, timeout: float | None = None) -> int:
        """See `Control.flush_prefix_cache`."""
        async with translated_async(self._explain):
            answer = await self._stub.FlushPrefixCache(pb.FlushPrefixCacheRequest(), **self._settings(timeout))
        return int(answer.pages)

    async def start_profile(self, steps: int | None = None, *, timeout: float | None = None) -> None:
        """See `Control.start_profile`."""
        request = profile_request(steps)
        async with translated_async(self._explain):
            await self._stub.StartProfile(request, **self._settings(timeout))

    async def stop_profile(self, *, timeout: float | None = None) -> str:
        """See `Control.stop_profile`."""
        async with translated_async(self._explain):
            return str((await self._stub.StopProfile(pb.StopProfileRequest(), **self._settings(timeout))).folder)

    async def load_lora(
        self, lora_name: str, lora_path: str, *, load_inplace: bool = False, timeout: float | None = None
    ) -> Lora:
        """See `Control.load_lora`."""
        request = load_request(lora_name, lora_path, load_inplace)
        async with translated_async(self._explain):
            return read_lora((await self._stub.LoadLora(request, **self._settings(timeout))).lora)

    async def unload_lora(self, lora_name: str, *, timeout: float | None = None) -> None:
        """See `Control.unload_lora`."""
        request = unload_request(lora_name)
        async with translated_async(self._explain):
            await self._stub.UnloadLora(request, **self._settings(timeout))

    async def list_loras(self, *, timeout: float | None = None) -> list[Lora]:
        """See `Control.list_loras`."""
        async with translated_async(self._explain):
            answer = await self._stub.ListLoras(pb.ListLorasRequest(), **self._settings(timeout))
        return [read_lora(lora) for lora in answer.loras]

    async def pause(self, mode: str | None = None, *, timeout: float | None = None) -> EngineState:
        """See `Control.pause`."""
        request = pause_request(mode)
        async with translated_async(self._explain):
            return read_state(await self._stub.Pause(request, **self._settings(timeout)))

    async def resume(self, *, timeout: float | None = None) -> EngineState:
        """See `Control.resume`."""
        async with translated_async(self._explain):
            return read_state(await self._stub.Resume(pb.ResumeRequest(), **self._settings(timeout)))

    async def abort_all(self, *, timeout: float | None = None) -> int:
        """See `Control.abort_all`."""
        async with translated_async(self._explain):
            return int((await self._stub.AbortAll(pb.AbortAllRequest(), **self._settings(timeout))).aborted)

    async def sleep(
        self, level: int = 1, tags: Sequence[str] = (), *, mode: str | None = None, timeout: float | None = None
    ) -> EngineState:
        """See `Control.sleep`."""
        request = sleep_request(level, tags, mode)
        async with translated_async(self._explain):
            return read_state(await self._stub.Sleep(request, **self._settings(timeout)))

    async def wake_up(self, tags: Sequence[str] = (), *, timeout: float | None = None) -> EngineState:
        """See `Control.wake_up`."""
        async with translated_async(self._explain):
            return read_state(await self._stub.WakeUp(pb.WakeUpRequest(tags=tags), **self._settings(timeout)))

    async def update_weights(
        self,
        path: str,
        *,
        weight_version: int | None = None,
        mode: str | None = None,
        parts: Sequence[str] = (),
        timeout: float | None = None,
    ) -> WeightUpdate:
        """See `Control.update_weights`."""
        request = update_request(path, weight_version, mode, parts)
        async with translated_async(self._explain):
            return read_update(await self._stub.UpdateWeights(request, **self._settings(timeout)))

    async def weight_info(self, *, checksums: bool = False, timeout: float | None = None) -> WeightInfo:
        """See `Control.weight_info`."""
        request = pb.WeightInfoRequest(checksums=checksums)
        async with translated_async(self._explain):
            return read_info(await self._stub.WeightInfo(request, **self._settings(timeout)))


def load_request(lora_name: str, lora_path: str, load_inplace: bool) -> pb.LoadLoraRequest:
    """Build the message. Raises ValueError: a value that the message cannot carry."""
    request = pb.LoadLoraRequest(load_inplace=load_inplace)
    set_field(request, "lora_name", lora_name)
    set_field(request, "lora_path", lora_path)
    return request


def unload_request(lora_name: str) -> pb.UnloadLoraRequest:
    """Build the message. Raises ValueError: a value that the message cannot carry."""
    request = pb.UnloadLoraRequest()
    set_field(request, "lora_name", lora_name)
    return request


def abort_request(request_id: str, tenant: str | None) -> pb.AbortRequest:
    """Build the message. Raises ValueError: a value that the message cannot carry."""
    request = pb.AbortRequest()
    set_field(request, "request_id", request_id)
    if tenant is not None:
        set_field(request, "tenant", tenant)
    return request


def pause_request(mode: str | None) -> pb.PauseRequest:
    """Build the message. Raises ValueError: there is no such mode."""
    return pb.PauseRequest(mode=_mode(mode))


def sleep_request(level: int, tags: Sequence[str], mode: str | None) -> pb.SleepRequest:
    """Build the message. Raises ValueError: a value that the message cannot carry."""
    request = pb.SleepRequest(tags=tags, mode=_mode(mode))
    set_field(request, "level", level)
    return request


def update_request(
    path: str, weight_version: int | None, mode: str | None, parts: Sequence[str]
) -> pb.UpdateWeightsRequest:
    """Build the message. Raises ValueError: a value that the message cannot carry."""
    request = pb.UpdateWeightsRequest(mode=_mode(mode))
    extend("parts", request.parts, parts)
    set_field(request, "path", path)
    if weight_version is not None:
        set_field(request, "weight_version", weight_version)
    return request


def _mode(mode: str | None) -> Any:
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    return pb.PauseMode.Value(f"PAUSE_MODE_{(mode or 'unspecified').upper()}")


def profile_request(steps: int | None) -> pb.StartProfileRequest:
    """Build the message. Raises ValueError: ``steps`` is no number that the message can carry."""
    request = pb.StartProfileRequest()
    if steps is not None:
        set_field(request, "steps", steps)
    return request


def drain_request(within: float | None) -> pb.DrainRequest:
    """Build the message. Raises ValueError: ``within`` is negative or not a number of seconds."""
    request = pb.DrainRequest()
    if within is not None:
        if not 0 <= within < 10**9:
            raise ValueError(f"within={within} must be seconds, 0 or more")
        request.timeout.FromNanoseconds(int(within * 1e9))
    return request


def as_dict(message: Any) -> dict[str, Any]:
    """Return a message's fields by name, as Python values; unset messages are left out."""
    fields = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    return {field.name: _plain(getattr(message, field.name)) for field in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return as_dict(value) if isinstance(value, Message) else value


def read_lora(lora: pb.Lora) -> Lora:
    return Lora(lora.name, lora.path, lora.identity, lora.rank, lora.parent)


def read_state(state: pb.EngineState) -> EngineState:
    return EngineState(state.weight_version, state.is_paused, list(state.asleep))


def read_update(answer: pb.UpdateWeightsResponse) -> WeightUpdate:
    state = answer.state
    return WeightUpdate(
        state.weight_version, state.is_paused, list(state.asleep), bytes=answer.bytes, seconds=answer.seconds
    )


def read_info(answer: pb.WeightInfoResponse) -> WeightInfo:
    state = answer.state
    return WeightInfo(state.weight_version, state.is_paused, list(state.asleep), checksums=dict(answer.checksums))
