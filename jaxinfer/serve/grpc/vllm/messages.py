"""Messages of `vllm.grpc.engine`, loaded on first access.

They are defined by the package `smg-grpc-proto` (extra ``routing``), which is optional. Loading them adds names as
general as ``common.proto`` to the process-wide protobuf pool.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.unknown_fields import UnknownFieldSet

from jaxinfer.serve.settings import ROUTING_PACKAGE, ServeConfigError

if TYPE_CHECKING:
    from smg_grpc_proto.generated import common_pb2 as common
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

__all__ = ["common", "pb"]


def __getattr__(name: str) -> Any:
    """Load both modules on first access.

    Raises:
        ServeConfigError: the package is missing or incompatible with the installed protobuf.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(ROUTING_PACKAGE) is None:
        raise ServeConfigError(f"vllm_grpc needs {ROUTING_PACKAGE}: pip install 'jaxinfer[routing]'")
    try:
        # optional, and loaded only when needed
        from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
    except Exception as error:
        raise ServeConfigError(f"vllm_grpc: {ROUTING_PACKAGE} cannot be loaded: {error}") from error
    globals().update(common=common_pb2, pb=vllm_engine_pb2)
    return globals()[name]


def unknown_fields(message: Any) -> Iterable[Any]:
    """Return the fields of a message that the installed package does not know, each with its ``field_number``."""
    return UnknownFieldSet(message)
