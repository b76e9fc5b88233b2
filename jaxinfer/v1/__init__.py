"""Public alias of `jaxinfer.protos.v1`, the messages between clients and a server."""

import sys

from jaxinfer.protos.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

__all__ = ["control_pb2", "control_pb2_grpc", "inference_pb2", "inference_pb2_grpc"]

# `import jaxinfer.v1.inference_pb2` finds these; a second import of the file would register its messages twice.
sys.modules |= {f"{__name__}.{name}": globals()[name] for name in __all__}
