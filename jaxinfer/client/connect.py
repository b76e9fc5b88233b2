"""Connection settings: credentials, retries, channel options."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import grpc

_SERVICE = "jaxinfer.v1.Inference"
# Tokenize and Score answer in one message, for a text of any length.
_MAX_RECEIVED_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TLS:
    """An encrypted connection. All files are PEM and are read when the client is created.

    Attributes:
        ca: certificates to verify the server's with (default: those of the system).
        cert, key: client certificate, for a server that requires one.
        server_name: name in the server's certificate, if it differs from the target.
    """

    ca: str | pathlib.Path | None = None
    cert: str | pathlib.Path | None = None
    key: str | pathlib.Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError(f"cert={self.cert!r} and key={self.key!r} go together")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Retry policy: calls are retried only if no answer has begun. The deadline of the call covers all attempts.

    Calls are retried if the server is unavailable, or cancels the call: gRPC does that, before our code runs, to calls
    that arrive while a server stops (grpc/grpc#41785). Calls cancelled by the caller are not retried.

    The gRPC library implements it (proposal A6): it waits a random part of ``first_pause``, ``first_pause * factor``,
    ... up to ``longest_pause``, or as requested by the server (``grpc-retry-pushback-ms``), which may forbid it.

    Attributes:
        attempts: total attempts, 2 to 5.
        first_pause, longest_pause: seconds.
        queue_full: also retry if the server's queue is full, not only if it is unavailable.
    """

    attempts: int = 4
    first_pause: float = 0.2
    longest_pause: float = 5.0
    factor: float = 2.0
    queue_full: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.attempts <= 5:
            raise ValueError(f"attempts={self.attempts} must be 2 to 5: gRPC makes no more")
        if not 0 < self.first_pause <= self.longest_pause:
            raise ValueError(f"first_pause={self.first_pause} must be above 0 and at most {self.longest_pause=}")
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} must be at least 1")

    def service_config(self) -> str:
        """Return the service config as JSON."""
        codes = ["UNAVAILABLE", "CANCELLED", *(["RESOURCE_EXHAUSTED"] if self.queue_full else [])]
        policy = {
            "maxAttempts": self.attempts,
            "initialBackoff": f"{self.first_pause:.9f}s",
            "maxBackoff": f"{self.longest_pause:.9f}s",
            "backoffMultiplier": self.factor,
            "retryableStatusCodes": codes,
        }
        return json.dumps({"methodConfig": [{"name": [{"service": _SERVICE}], "retryPolicy": policy}]})


DEFAULT_RETRY = RetryPolicy()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connection:
    """Settings of a client's channel, in gRPC's terms."""

    credentials: grpc.ChannelCredentials | None
    options: Sequence[tuple[str, str | int]]
    metadata: Sequence[tuple[str, str]]


def connection(api_key: str | None, tls: bool | TLS, retry: RetryPolicy | None, keepalive: float | None) -> Connection:
    """Make the connection settings, for both clients.

    Raises:
        OSError: a file of ``tls`` cannot be read.
        ValueError: ``keepalive`` or ``api_key`` is invalid.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key must be printable ASCII")
    if keepalive is not None and keepalive < 1:
        raise ValueError(f"keepalive={keepalive} must be at least 1 second")
    tls = TLS() if tls is True else tls
    options: list[tuple[str, str | int]] = [("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES)]
    options += _retry_options(retry)
    if keepalive is not None:  # while calls are open, to detect a server that vanished
        options += [("grpc.keepalive_time_ms", round(keepalive * 1000)), ("grpc.keepalive_timeout_ms", 10_000)]
        options += [("grpc.http2.max_pings_without_data", 0)]
    if isinstance(tls, TLS) and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return Connection(
        credentials=_credentials(tls) if isinstance(tls, TLS) else None,
        options=options,
        metadata=[("authorization", f"Bearer {api_key}")] if api_key is not None else [],
    )


def checked_target(target: str) -> str:
    """Return ``target`` as gRPC resolves it, without ``grpc://``.

    Raises:
        ValueError: it is an address of another protocol.
    """
    if target.startswith(("http://", "https://", "grpcs://")):
        raise ValueError(f"{target=} must be HOST:PORT of the gRPC door (by default localhost:50051); tls= encrypts")
    return target.removeprefix("grpc://")


def _retry_options(retry: RetryPolicy | None) -> list[tuple[str, str | int]]:
    if retry is None:
        return [("grpc.enable_retries", 0)]
    return [("grpc.enable_retries", 1), ("grpc.service_config", retry.service_config())]


def _credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))


def _read(path: str | pathlib.Path | None) -> bytes | None:
    return None if path is None else pathlib.Path(path).read_bytes()
