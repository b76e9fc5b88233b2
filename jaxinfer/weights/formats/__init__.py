"""Quantised-weight formats in safetensors: one adapter per format, selected by the quantisation config.

An adapter turns the tensors of its format into `StoredWeight`s. All values from a file are checked as Python integers
before an array is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.weights.errors import CheckpointError, listed
from jaxinfer.weights.formats import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fbgemm,
    fp8,
    gptq,
    mlx,
    modelopt,
    mxfp4,
)
from jaxinfer.weights.formats.beside import PLACES, with_method
from jaxinfer.weights.formats.fields import CONFIG_FILE, Fields
from jaxinfer.weights.formats.tensors import RawTensors
from jaxinfer.weights.quantized import StoredWeight
from jaxinfer.weights.safetensors.checkpoint import Tensors

_log = logging.getLogger("jaxinfer")

_OF_FILES_BESIDE = (".qweight", ".weight_scale")  # tensor suffixes of formats described next to config.json

Adapter = Callable[[RawTensors, Fields], dict[str, StoredWeight]]

ADAPTERS: Mapping[str, Adapter] = MappingProxyType(
    {
        "auto-round": auto_round.weights,
        "awq": awq.weights,
        "bitsandbytes": bitsandbytes.weights,
        "compressed-tensors": compressed_tensors.weights,
        "fbgemm_fp8": fbgemm.weights,
        "fp8": fp8.weights,
        "gptq": gptq.weights,
        mlx.METHOD: mlx.weights,
        "modelopt": modelopt.weights,
        "modelopt_fp4": modelopt.weights,
        "mxfp4": mxfp4.weights,
    }
)


def quantized_weights(
    checkpoint: Tensors, config_json: Mapping[str, Any], file: str = CONFIG_FILE
) -> tuple[Mapping[str, StoredWeight], set[str]]:
    """Return the weights that a checkpoint stores quantised.

    Args:
        config_json: contents of its config.json.
        file: the file that the quantisation config was read from (`jaxinfer.weights.formats.beside`).

    Returns:
        The weights by their names in an unquantized checkpoint, and the names of the tensors that store them. Both are
            empty if config.json declares no quantisation.

    Raises:
        CheckpointError: the format is unknown, or the checkpoint does not match its format.
    """
    config = _config(config_json, file)
    if config is None:
        return {}, set()
    tensors = RawTensors(checkpoint)
    if file != CONFIG_FILE and not tensors.ending(*_OF_FILES_BESIDE):
        _log.warning(f"{file} of {checkpoint.folder} is passed over: no weight is stored quantised")
        return {}, set()
    method = config.choice("quant_method", tuple(ADAPTERS))
    weights = ADAPTERS[method](tensors, config)
    if not weights:
        raise CheckpointError(f"{file} says {method}, but {checkpoint.folder} holds no weight of this format")
    if twice := sorted(weights.keys() & checkpoint.tensors.keys() - tensors.taken):
        raise CheckpointError(f"{checkpoint.folder} holds weights quantised and plain as well: {listed(twice)}")
    return MappingProxyType(weights), tensors.taken


def quant_method(config_json: Mapping[str, Any], file: str = CONFIG_FILE) -> str:
    """Return the method that config.json names or implies; "": none."""
    config = _config(config_json, file)
    return "" if config is None else str(config.values.get("quant_method", ""))


def _config(config_json: Mapping[str, Any], file: str) -> Fields | None:
    """Return the quantisation fields at the top of config.json, or of ``text_config`` in a multimodal one."""
    within = config_json.get("text_config")
    for values in (config_json, within if isinstance(within, Mapping) else {}):
        for name in PLACES:
            if values.get(name):
                found = values[name]
                if not isinstance(found, Mapping):
                    raise CheckpointError(f"{name} of config.json is not an object")
                return Fields(with_method(found), name if file == CONFIG_FILE else "", file)
    return None
