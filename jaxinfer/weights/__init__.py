"""Checkpoints: locating a model folder, reading untrusted safetensors files, loading and saving parameters.

``jaxinfer.weights.source`` (hub ids) and ``jaxinfer.weights.progress`` (progress bar) must be imported explicitly.
"""

from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.init import init_params
from jaxinfer.weights.load import checkpoint_dtype, load_params, on_default_device, on_devices
from jaxinfer.weights.safetensors.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.weights.safetensors.save import save_params

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "checkpoint_dtype",
    "init_params",
    "load_params",
    "on_default_device",
    "on_devices",
    "open_checkpoint",
    "save_params",
]
