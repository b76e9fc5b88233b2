"""The messages of `vllm.grpc.engine`, loaded when the first of them is asked for.

They are those of the package `smg-grpc-proto` (extra ``routing``), which a server without them need not have. To load
them puts names as general as ``common.proto`` into protobuf's pool for all.
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
    """Load both modules.

    Raises:
        ServeConfigError: the package is missing, or does not fit the installed protobuf.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(ROUTING_PACKAGE) is None:
        raise ServeConfigError(f"vllm_grpc needs {ROUTING_PACKAGE}: pip install 'jaxinfer[routing]'")
    try:
        # optional, and not to be loaded where nobody asks for it
        from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
    except Exception as error:
        raise ServeConfigError(f"vllm_grpc: {ROUTING_PACKAGE} cannot be loaded: {error}") from error
    globals().update(common=common_pb2, pb=vllm_engine_pb2)
    return globals()[name]


def unknown_fields(message: Any) -> Iterable[Any]:
    """Fields of a message that the installed package does not know, each with its ``field_number``."""
    return UnknownFieldSet(message)
