"""Parsing of ModelInferRequest, with the tensor and parameter names of Triton's LLM backends.

Sampling parameters are sent as request parameters or in the input ``sampling_parameters``, a JSON object in which
numbers may be strings. Parameters that are given in both are rejected, as are unknown names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.protos.oip import open_inference_pb2 as pb
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.json_bodies import is_short, parse
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.grpc.tensors import read_scalar, refuse, text_of

INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "text_input": "BYTES",
        "stream": "BOOL",
        "sampling_parameters": "BYTES",
        "exclude_input_in_output": "BOOL",
        "return_finish_reason": "BOOL",
        "return_num_input_tokens": "BOOL",
        "return_num_output_tokens": "BOOL",
    }
)
"""Inputs and their datatypes, one element each; only the first is required. ``prompt`` is an alias of it."""
OUTPUTS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "text_output": ("BYTES", -1),
        "finish_reason": ("BYTES", -1),
        "num_input_tokens": ("UINT32", 1),
        "num_output_tokens": ("UINT32", -1),
    }
)
"""Outputs, their datatypes and sizes; -1: one element for each of the ``n`` outputs."""

_ALIAS = "prompt"
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_TEXTS = frozenset({"stop", "bad_words"})
_MAX_DIGITS = 20
_MAX_PARAMETERS = 64
_MAX_VALUES = 4096  # of the input sampling_parameters
_MAX_SPELT = 400  # characters of a number
_MAX_SPELT_GRAMMAR = 1 << 20


@dataclasses.dataclass(frozen=True)
class Ask:
    """A generation request and its response format.

    Attributes:
        stream: stream the deltas.
        echo: the answer starts with the prompt.
        outputs: names of `OUTPUTS`, in the order of the response.
        raw: the request uses raw contents, so the response does.
        named: the request's name of the prompt input.
    """

    call: Call
    stream: bool
    echo: bool
    outputs: tuple[str, ...]
    raw: bool
    named: str


def ask_of(request: pb.ModelInferRequest, *, timeout: float | None, tenant: str, trace: Mapping[str, str]) -> Ask:
    """Parse a request. Raises `ServeError` INVALID; the message names the tensor or the parameter."""
    inputs = _inputs(request)
    if "text_input" not in inputs:
        raise refuse("text_input", "the request must have this input")
    prompt, stream = text_of("text_input", inputs["text_input"]), bool(inputs.get("stream", False))
    exclude = bool(inputs.get("exclude_input_in_output", stream))
    if stream and not exclude:
        raise refuse("exclude_input_in_output", "a stream never repeats the prompt: it must be true, or left out")
    if len(request.parameters) > _MAX_PARAMETERS:
        raise refuse("parameters", f"there must be at most {_MAX_PARAMETERS}, not {len(request.parameters)}")
    parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
    call = Call(
        prompt,
        model=request.model_name,
        priority=parameters.pop("priority", 0),
        timeout=_earlier(timeout, parameters.pop("timeout", None)),
        tenant=tenant,
        trace=trace,
        sampling=_sampling(parameters, inputs.get("sampling_parameters")),
    )
    raw, named = bool(request.raw_input_contents), {tensor.name for tensor in request.inputs}
    return Ask(call, stream, not exclude, _outputs(request, inputs), raw, min(named & {"text_input", _ALIAS}))


def _inputs(request: pb.ModelInferRequest) -> dict[str, bytes | bool]:
    raws = request.raw_input_contents
    if len(request.inputs) > len(INPUTS):
        raise refuse("inputs", f"there must be at most {len(INPUTS)}, not {len(request.inputs)}")
    if raws and len(raws) != len(request.inputs):
        raise refuse("raw_input_contents", f"there must be one for each input, not {len(raws)}")
    found: dict[str, bytes | bool] = {}
    for rank, tensor in enumerate(request.inputs):
        name = "text_input" if tensor.name == _ALIAS else tensor.name
        if name not in INPUTS:
            raise refuse(tensor.name[:100], f"there is no such input: they are {', '.join(INPUTS)}")
        if name in found:
            raise refuse(tensor.name, "this input was given twice")
        found[name] = read_scalar(tensor, raws[rank] if raws else None, INPUTS[name])
    return found


def _outputs(request: pb.ModelInferRequest, inputs: Mapping[str, bytes | bool]) -> tuple[str, ...]:
    """Return the outputs that the request names, by default the text and the outputs of its ``return_*`` inputs."""
    if len(request.outputs) > _MAX_PARAMETERS:
        raise refuse("outputs", f"there must be at most {_MAX_PARAMETERS}, not {len(request.outputs)}")
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise refuse(output.name[:100], f"there is no such output: they are {', '.join(OUTPUTS)}")
        if output.parameters:
            raise refuse(output.name, f"its parameter {min(output.parameters)[:100]!r} is not served")
    if request.outputs:
        return tuple(dict.fromkeys(output.name for output in request.outputs))
    return ("text_output", *(name for name in OUTPUTS if inputs.get(f"return_{name}", False)))


def _sampling(parameters: dict[str, Any], encoded: bytes | bool | None) -> dict[str, Any]:
    """Return the sampling fields. ``triton_enable_empty_final_response`` is ignored: the last response is marked as
    such and is never empty."""
    parameters.pop("triton_enable_empty_final_response", None)
    for name in sorted(parameters.keys() - _SAMPLING):
        raise refuse(name[:100], f"there is no such parameter: they are {', '.join(sorted(_SAMPLING))}")
    encoded_fields = {} if encoded is None else _decoded(encoded)
    for name in sorted(encoded_fields.keys() & parameters.keys()):
        raise refuse(name, "it is in sampling_parameters and in the request's parameters")
    return {name: _typed(name, value) for name, value in {**encoded_fields, **parameters}.items()}


def _decoded(encoded: bytes | bool) -> dict[str, Any]:
    assert isinstance(encoded, bytes)
    if not is_short(encoded, _MAX_VALUES):
        raise refuse("sampling_parameters", f"its {len(encoded)} bytes hold too much")
    encoded_fields = parse(encoded, "sampling_parameters", "sampling_parameters")
    if not isinstance(encoded_fields, dict):
        raise ServeError(Kind.INVALID, "sampling_parameters must be a JSON object", "sampling_parameters")
    return encoded_fields


def _typed(name: str, value: Any) -> Any:
    """Convert strings that contain a number or boolean to it, and the string keys of logit_bias to token ids."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if _is_number(key) else key: bias for key, bias in value.items()}
    if name == "speculation":
        fields = _object(value)
        return {key: _typed(key, each) for key, each in fields.items()} if isinstance(fields, dict) else value
    if name == "structured_outputs":
        return _object(value, _MAX_SPELT_GRAMMAR)
    if name in _TEXTS or not isinstance(value, str) or len(value) > _MAX_SPELT:
        return value
    try:
        spelt = parse(value.encode())
    except ServeError:  # not JSON: the validator rejects the string, naming the parameter
        return value
    return spelt if isinstance(spelt, int | float) else value


def _object(value: Any, most: int = _MAX_SPELT) -> Any:
    """Parse a parameter that holds a JSON object as text."""
    if not isinstance(value, str) or len(value) > most:
        return value
    try:
        return parse(value.encode())
    except ServeError:
        return value


def _is_number(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS


def _value(parameter: pb.InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _earlier(seconds: float | None, microseconds: object) -> float | None:
    """Return the earlier of the call's deadline and Triton's parameter ``timeout``, in seconds; 0 means no timeout."""
    if microseconds is None:
        return seconds
    if isinstance(microseconds, bool) or not isinstance(microseconds, int) or microseconds < 0:
        raise refuse("timeout", f"{microseconds!r:.100} must be a number of microseconds")
    if microseconds == 0:
        return seconds
    return microseconds / 1e6 if seconds is None else min(seconds, microseconds / 1e6)
