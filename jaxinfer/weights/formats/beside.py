"""Location of the quantisation config: in config.json, or in a tool's own file next to it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.weights.formats.fields import CONFIG_FILE
from jaxinfer.weights.safetensors.checkpoint import read_json_object

PLACES = ("quantization_config", "compression_config")
# Files of AutoGPTQ and GPTQModel, of AutoAWQ, and of older ModelOpt exports, with the default method of each.
FILES: Mapping[str, str] = MappingProxyType(
    {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
)
_METHOD = "quant_method"
_SAME: Mapping[str, str] = MappingProxyType(
    {"intel/auto-round": "auto-round", "auto_round": "auto-round", "autoround": "auto-round"}
)
# Fields that identify a method if none is named.
_SIGNS: Mapping[str, str] = MappingProxyType(
    {"w_bit": "awq", "q_group_size": "awq", "zero_point": "awq", "quant_algo": "modelopt"}
)
_BITSANDBYTES = ("load_in_8bit", "load_in_4bit")


def with_quantization(config_json: Mapping[str, Any], folder: pathlib.Path) -> tuple[Mapping[str, Any], str]:
    """Return config.json, with the ``quantization_config`` of a file next to it if it has none itself.

    Returns:
        The config, and the name of the file that the quantisation is read from.

    Raises:
        CheckpointError: see `read_json_object`.
    """
    within = config_json.get("text_config")
    if any(place.get(name) for place in (config_json, within) if isinstance(place, Mapping) for name in PLACES):
        return config_json, CONFIG_FILE
    for name, method in FILES.items():
        if (folder / name).exists() and (found := _described(read_json_object(folder / name), method)):
            return {**config_json, PLACES[0]: found}, name
    return config_json, CONFIG_FILE


def with_method(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``quantization_config`` with the canonical name of its method, if it names or implies one."""
    method = quantization.get(_METHOD) or quantization.get("method")
    if any(quantization.get(name) for name in _BITSANDBYTES):
        method = "bitsandbytes"  # as in transformers, whatever method is named
    elif not method:
        method = next((shown for sign, shown in _SIGNS.items() if quantization.get(sign) is not None), None)
    if isinstance(method, str):
        others = {name: value for name, value in quantization.items() if name != "method"}
        return {**others, _METHOD: _SAME.get(method.lower(), method)}
    return quantization


def _described(values: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """Return the fields of a file next to config.json; ModelOpt nests them in an object."""
    inner = values.get("quantization")
    fields = inner if method == "modelopt" and isinstance(inner, Mapping) else values
    found = with_method(fields)
    return found if found.get(_METHOD) else {**fields, _METHOD: method}
