"""Client of a server's control port: statistics, requests, the prefix cache, LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from jaxinfer.client.connect import TLS, checked_target, connection
from jaxinfer.client.diagnosis import explainer
from jaxinfer.client.fields import set_field
from jaxinfer.client.translate import translated, translated_async
from jaxinfer.protos.v1 import control_pb2 as pb
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub


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
        return list(value)
    return as_dict(value) if isinstance(value, Message) else value


def read_lora(lora: pb.Lora) -> Lora:
    return Lora(lora.name, lora.path, lora.identity, lora.rank, lora.parent)
