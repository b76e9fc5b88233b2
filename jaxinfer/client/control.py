"""The client of those who run a server, for its control port: LoRA adapters."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import grpc
import grpc.aio

from jaxinfer.client.aio import translated as async_translated
from jaxinfer.client.connect import TLS, checked_target, connection
from jaxinfer.client.diagnosis import explainer
from jaxinfer.client.fields import set_field
from jaxinfer.client.sync import translated
from jaxinfer.protos.v1 import control_pb2 as pb
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub


@dataclasses.dataclass(frozen=True, slots=True)
class Lora:
    """An adapter that requests may name.

    Attributes:
        path: of its folder on the server.
        identity: SHA-256 of its content, hexadecimal: equal adapters have equal ones, whatever their names.
        rank: the largest of its modules'.
        parent: the served model, which it changes.
    """

    name: str
    path: str
    identity: str
    rank: int
    parent: str


class _Connected:
    """What both clients are made of. A call is made once: loading is no question that could be asked again."""

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
        """Connects at the first call. Arguments and errors: see `jaxinfer.client.Client`; ``api_key`` needs the scopes
        "admin" and "observe"."""
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
    """One connection to the control port of a server, for any number of threads.

    ```
    with Control("localhost:50052") as control:
        control.load_lora("pirate", "adapters/pirate")
    ```

    All calls raise `ServerError`: its subclasses say what went wrong. ``timeout`` is in seconds; None is the client's
    own.
    """

    def close(self) -> None:
        """Ends the connection, and every call that is still open."""
        self._channel.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load_lora(
        self, lora_name: str, lora_path: str, *, load_inplace: bool = False, timeout: float | None = None
    ) -> Lora:
        """Lets requests name an adapter, when the server has read it.

        Args:
            lora_path: of its folder on the server, below its ``lora_root``.
            load_inplace: a name that is loaded means the new content from now on.

        Raises:
            AlreadyExists: the name is loaded, and ``load_inplace`` is false.
            FailedPrecondition: the server takes no adapters.
            InvalidRequest: the folder, or what is in it, cannot be served.
        """
        request = load_request(lora_name, lora_path, load_inplace)
        with translated(self._explain):
            return read_lora(self._stub.LoadLora(request, **self._settings(timeout)).lora)

    def unload_lora(self, lora_name: str, *, timeout: float | None = None) -> None:
        """Lets no further request name an adapter. `NotFound`: there is none of this name."""
        request = unload_request(lora_name)
        with translated(self._explain):
            self._stub.UnloadLora(request, **self._settings(timeout))

    def list_loras(self, *, timeout: float | None = None) -> list[Lora]:
        """Adapters that requests may name, by name."""
        with translated(self._explain):
            answer = self._stub.ListLoras(pb.ListLorasRequest(), **self._settings(timeout))
        return [read_lora(lora) for lora in answer.loras]


class AsyncControl(_Connected):
    """`Control` for asyncio. Make it where the loop runs."""

    _grpc = grpc.aio

    async def close(self) -> None:
        """Ends the connection, and every call that is still open."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def load_lora(
        self, lora_name: str, lora_path: str, *, load_inplace: bool = False, timeout: float | None = None
    ) -> Lora:
        """See `Control.load_lora`."""
        request = load_request(lora_name, lora_path, load_inplace)
        async with async_translated(self._explain):
            return read_lora((await self._stub.LoadLora(request, **self._settings(timeout))).lora)

    async def unload_lora(self, lora_name: str, *, timeout: float | None = None) -> None:
        """See `Control.unload_lora`."""
        request = unload_request(lora_name)
        async with async_translated(self._explain):
            await self._stub.UnloadLora(request, **self._settings(timeout))

    async def list_loras(self, *, timeout: float | None = None) -> list[Lora]:
        """See `Control.list_loras`."""
        async with async_translated(self._explain):
            answer = await self._stub.ListLoras(pb.ListLorasRequest(), **self._settings(timeout))
        return [read_lora(lora) for lora in answer.loras]


def load_request(lora_name: str, lora_path: str, load_inplace: bool) -> pb.LoadLoraRequest:
    """Raises ValueError: a value that the message cannot carry."""
    request = pb.LoadLoraRequest(load_inplace=load_inplace)
    set_field(request, "lora_name", lora_name)
    set_field(request, "lora_path", lora_path)
    return request


def unload_request(lora_name: str) -> pb.UnloadLoraRequest:
    """Raises ValueError: a value that the message cannot carry."""
    request = pb.UnloadLoraRequest()
    set_field(request, "lora_name", lora_name)
    return request


def read_lora(lora: pb.Lora) -> Lora:
    return Lora(lora.name, lora.path, lora.identity, lora.rank, lora.parent)
