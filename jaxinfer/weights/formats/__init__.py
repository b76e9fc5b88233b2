"""Formats of quantised weights in safetensors: an adapter each, picked by what config.json says.

An adapter turns the tensors of its format into `StoredWeight`s. All that a file says is checked, in Python's own
integers, before an array is made of it.
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

_OF_FILES_BESIDE = (".qweight", ".weight_scale")  # what the formats have that a file beside config.json describes

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
    """The weights that a checkpoint stores quantised.

    Args:
        config_json: its config.json.
        file: the one that its quantisation was read of (`jaxinfer.weights.formats.beside`).

    Returns:
        the weights by their names in a plain checkpoint, and the names of the tensors that they are made of. Both are
        empty where config.json says nothing of a quantisation.

    Raises:
        CheckpointError: the format is not known, or the checkpoint is not as its format has it.
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


def _config(config_json: Mapping[str, Any], file: str) -> Fields | None:
    """Read the quantisation's fields at the top of config.json, or of ``text_config`` within one for images."""
    within = config_json.get("text_config")
    for values in (config_json, within if isinstance(within, Mapping) else {}):
        for name in PLACES:
            if values.get(name):
                found = values[name]
                if not isinstance(found, Mapping):
                    raise CheckpointError(f"{name} of config.json is not an object")
                return Fields(with_method(found), name if file == CONFIG_FILE else "", file)
    return None
