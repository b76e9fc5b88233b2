"""Tensors of the Open Inference Protocol that text generation needs: BYTES, BOOL and UINT32."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from jaxinfer.protos.oip import open_inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError

_CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "UINT32": "uint_contents"}
_LENGTH = struct.Struct("<I")

_LONG = 9  # maximum number of dimensions that are read

Value = bytes | bool | int


def refuse(name: str, reason: str) -> ServeError:
    """Return an INVALID error about one tensor or parameter."""
    return ServeError(Kind.INVALID, f"{name}: {reason}", field=name)


def read_scalar(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None, datatype: str) -> bytes | bool:
    """Read the single element of an input.

    Args:
        raw: its entry of raw_input_contents; None: the request has none, and the element is in ``contents``.
        datatype: required datatype of the input: "BYTES" or "BOOL".

    Raises:
        ServeError: INVALID: the datatype, shape or content is wrong.
    """
    name, shape = tensor.name, list(tensor.shape[:_LONG])
    if tensor.datatype != datatype:
        raise refuse(name, f"datatype {tensor.datatype[:20]!r} must be {datatype}")
    if not shape or len(shape) > 2 or math.prod(shape) != 1 or min(shape) < 1:
        raise refuse(name, f"shape {shape[:8]} must be [1] or [1, 1]")
    if tensor.parameters:
        raise refuse(name, f"its parameter {min(tensor.parameters)[:100]!r} is not served")
    if raw is not None:
        return _raw_bytes(name, raw) if datatype == "BYTES" else _raw_bool(name, raw)
    values = getattr(tensor.contents, _CONTENTS[datatype])
    if len(values) != 1:
        raise refuse(name, f"contents.{_CONTENTS[datatype]} must hold 1 element, not {len(values)}")
    value: bytes | bool = values[0]
    return value


def text_of(name: str, value: bytes | bool) -> str:
    """Decode a BYTES element as text.

    Raises:
        ServeError: INVALID: it is not UTF-8.
    """
    assert isinstance(value, bytes)
    try:
        return value.decode()
    except UnicodeDecodeError as cause:
        raise refuse(name, f"it is not UTF-8 at byte {cause.start}") from cause


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[Value], *, raw: bool
) -> None:
    """Add a one-dimensional output; ``raw``: write it to raw_output_contents."""
    output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if raw:
        response.raw_output_contents.append(_packed(datatype, values))
    else:
        getattr(output.contents, _CONTENTS[datatype]).extend(values)


def _raw_bytes(name: str, raw: bytes) -> bytes:
    if len(raw) < _LENGTH.size or len(raw) - _LENGTH.size != _LENGTH.unpack_from(raw)[0]:
        raise refuse(name, f"its {len(raw)} raw bytes must be 1 element behind its length in 4 bytes")
    return raw[_LENGTH.size :]


def _raw_bool(name: str, raw: bytes) -> bool:
    if raw not in (b"\0", b"\1"):
        raise refuse(name, "its raw content must be one byte, 0 or 1")
    return raw == b"\1"


def _packed(datatype: str, values: Sequence[Value]) -> bytes:
    if datatype == "UINT32":
        return struct.pack(f"<{len(values)}I", *values)
    assert datatype == "BYTES"
    return b"".join(_LENGTH.pack(len(value)) + value for value in values if isinstance(value, bytes))
