"""Scopes that RPCs require, and extraction of API keys from metadata. RPCs that are not in the table are not served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxinfer.serve.api.errors import Kind, ServeError

OPEN = None
"""Value in place of a scope: no API key is required."""


@runtime_checkable
class Caller(Protocol):
    """The principal of a call."""

    @property
    def name(self) -> str: ...


@runtime_checkable
class Authoriser(Protocol):
    """Checks API keys; see `jaxinfer.serve.api.auth.Authoriser`."""

    def authorise(
        self, token: str | None, scope: str, certificate: Callable[[], bytes | None] = lambda: None
    ) -> Caller:
        """Authorise a call. Raises `ServeError`: UNAUTHENTICATED without a valid key, FORBIDDEN without the scope."""
        ...

    def during(self, caller: Any, scope: str, cut: Callable[[ServeError], None]) -> AbstractContextManager[None]:
        """Watch the key of ``caller`` while a call runs: ``cut`` is called if the key is revoked."""
        ...


def _methods(service: str, scopes: Mapping[str, Iterable[str]], free: Iterable[str] = ()) -> dict[str, str | None]:
    table: dict[str, str | None] = {f"{service}/{name}": scope for scope, names in scopes.items() for name in names}
    return table | {f"{service}/{name}": OPEN for name in free}


SCOPES: Mapping[str, str | None] = MappingProxyType(
    _methods(
        "jaxinfer.v1.Inference",
        {"infer": ("Generate", "GenerateBatch", "Tokenize", "Detokenize", "Score", "GetModelInfo")},
    )
    | _methods(
        "jaxinfer.v1.Control",
        {
            "admin": (
                *("Abort", "Drain", "FlushPrefixCache", "StartProfile", "StopProfile"),
                *("LoadLora", "UnloadLora"),
                *("Pause", "Resume", "AbortAll", "Sleep", "WakeUp", "UpdateWeights", "WeightInfo"),
            ),
            "observe": ("GetStats", "WatchStartup", "ListLoras"),
        },
    )
    # ServerLive and ServerReady report no more than health and need no key either: probes of this protocol have none.
    | _methods(
        "inference.GRPCInferenceService",
        {"infer": ("ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer")},
        free=("ServerLive", "ServerReady"),
    )
    # Load figures cover all tenants, and KV events contain prompt tokens.
    | _methods(
        "vllm.grpc.engine.VllmEngine",
        {
            "infer": ("Generate", "Embed", "Abort", "GetModelInfo", "GetTokenizer"),
            "observe": ("GetServerInfo", "GetLoads"),
            "admin": ("FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"),
        },
        free=("HealthCheck",),
    )
    | _methods("grpc.health.v1.Health", {}, free=("Check", "List", "Watch"))
    | _methods("grpc.reflection.v1alpha.ServerReflection", {"infer": ("ServerReflectionInfo",)})
)
"""Full name of every RPC -> the scope that the caller's key must have."""


def token_of(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """Return the key in ``authorization: Bearer KEY``; None without that metadata entry.

    Raises:
        ServeError: UNAUTHENTICATED: the entry occurs more than once or has another format.
    """
    found = [value for name, value in metadata if name == "authorization"]
    if not found:
        return None
    scheme, _, token = found[0].partition(" ") if isinstance(found[0], str) else ("", "", "")
    if len(found) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise ServeError(Kind.UNAUTHENTICATED, "authorization must be one 'Bearer KEY'")
    return token.strip()
