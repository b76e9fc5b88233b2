"""Checkpoints: locating a model folder, reading untrusted safetensors files, loading and saving parameters.

``jaxinfer.weights.source`` (hub ids) and ``jaxinfer.weights.progress`` (progress bar) must be imported explicitly.
"""

from jaxinfer.weights.errors import CheckpointError, WeightsError
from jaxinfer.weights.init import init_params
from jaxinfer.weights.load import checkpoint_dtype, load_params, on_default_device, on_devices
from jaxinfer.weights.safetensors.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.weights.safetensors.save import save_params
from jaxinfer.weights.trainers import each_param, named_parameters, params_from

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "WeightsError",
    "checkpoint_dtype",
    "each_param",
    "init_params",
    "load_params",
    "named_parameters",
    "on_default_device",
    "on_devices",
    "open_checkpoint",
    "params_from",
    "save_params",
]
