"""A server as the load generator sees it, whatever it speaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable


class TargetError(RuntimeError):
    """No load can be put on this server. The message is one sentence that says why."""


class SendFailed(Exception):
    """One request failed. ``kind`` is what errors are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Item(NamedTuple):
    """A request to make.

    Attributes:
        prompt: text, or token ids.
        prompt_len: its length in tokens; of a text an estimate.
        due: seconds since the trace began, where the data set tells.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    due: float | None = None


class Ending(NamedTuple):
    """Facts that a stream states at its end; None: not stated."""

    finish: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Served:
    """Facts that a server tells of itself; None: it does not.

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
    """The address of a server, and the way there.

    Attributes:
        url: grpc://, grpcs://, http:// or https:// with host and port.
        model: None: the one that is served.
        ca: PEM of whom to trust, under TLS; None: the system's.
        connections: over gRPC; requests take turns. Over HTTP each request under way has one.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    ca: bytes | None = None
    connections: int = 8
    connect_timeout: float = 10.0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings that all requests of a run have in common.

    Attributes:
        ignore_eos: outputs have exactly the length that was asked for, if the server knows how.
    """

    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0


@runtime_checkable
class Target(Protocol):
    """A server. `open` first."""

    async def open(self) -> Served:
        """Connect.

        Raises:
            TargetError: nobody answers, the key is wrong, or there is no such model.
        """
        ...

    async def count_tokens(self, text: str) -> int:
        """Tokens of ``text`` as a prompt.

        Raises:
            TargetError: it cannot be asked.
        """
        ...

    def prepare(self, item: Item) -> bytes:
        """The message, ahead of time: encoding it must not delay its sending."""
        ...

    async def stream(self, message: bytes, note: Callable[[int], None]) -> Ending:
        """Send, and call ``note`` with the number of tokens whenever some come, at once.

        Raises:
            SendFailed: the request was refused, or its stream did not end well.
        """
        ...

    async def close(self) -> None: ...
