"""Protocol-independent interface of the load generator to a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable


class TargetError(RuntimeError):
    """A server that cannot be measured. The message is one sentence with the reason."""


class SendFailed(Exception):
    """A failed request. ``kind``: category by which errors are counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Item(NamedTuple):
    """A request to make.

    Attributes:
        prompt: text, or token ids.
        prompt_len: its length in tokens; for a text an estimate.
        due: seconds since the trace began, if the data set has arrival times.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    due: float | None = None


class Ending(NamedTuple):
    """Facts reported at the end of a stream; None: not reported."""

    finish: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Served:
    """Facts that a server reports about itself; None: not reported.

    Attributes:
        accepts_ids: whether prompts may be token ids.
    """

    model: str
    version: str | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    accepts_ids: bool = True


@dataclasses.dataclass(frozen=True)
class Access:
    """Address and credentials of a server.

    Attributes:
        url: grpc://, grpcs://, http:// or https:// with host and port.
        model: None: the one that is served.
        ca: trusted certificates in PEM, under TLS; None: the system's.
        connections: number of gRPC connections, used round-robin. Over HTTP each request in flight has one.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    ca: bytes | None = None
    connections: int = 8
    connect_timeout: float = 10.0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings shared by all requests of a run.

    Attributes:
        ignore_eos: outputs have exactly the requested length, if the server supports that.
    """

    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0


@runtime_checkable
class Target(Protocol):
    """A server under test. Call `open` first."""

    async def open(self) -> Served:
        """Connect.

        Raises:
            TargetError: the server does not respond, the key is wrong, or the model does not exist.
        """
        ...

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens of ``text`` as a prompt.

        Raises:
            TargetError: the request failed.
        """
        ...

    def prepare(self, item: Item) -> bytes:
        """Encode a request ahead of time, so that encoding does not delay its sending."""
        ...

    async def stream(self, message: bytes, note: Callable[[int], None]) -> Ending:
        """Send a message, and call ``note`` immediately with the number of tokens of each delivery.

        Raises:
            SendFailed: the request was rejected, or its stream did not end properly.
        """
        ...

    async def close(self) -> None: ...
