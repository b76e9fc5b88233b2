"""Loading of draft heads (Medusa, EAGLE, MTP): checks that a head fits its target model, and reads its parameters."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config.aliases import demo_folder
from jaxinfer.engine.execution.placement import shardable_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.head import HeadFiles
from jaxinfer.models.heads.eagle import MAP
from jaxinfer.models.model import Model
from jaxinfer.models.registry import HEADS
from jaxinfer.parallel.mesh import param_sharding, replicated
from jaxinfer.parallel.processes import put_whole
from jaxinfer.types import ParamSpec
from jaxinfer.weights import CheckpointError, load_params, on_devices
from jaxinfer.weights.errors import quoted
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.open import open_model_files
from jaxinfer.weights.source import locate
from jaxinfer.weights.tree import Fill

OFFSETS = "d2t"  # tensor of a reduced draft vocabulary: target token id minus draft token id


def describe_head(name: str, method: str, target: Model) -> Model:
    """Return the head without its weights: the parameters are `jax.ShapeDtypeStruct`, in the dtype of the model.

    Args:
        name: a folder or a hub id.
        method: one of `jaxinfer.models.registry.HEADS`.
        target: the model that it drafts for, whose parameters may be abstract.

    Raises:
        CheckpointError, ConfigError: one sentence with the reason.
    """
    return _described(name, method, target)[1]


def load_head(name: str, method: str, target: Model, mesh: Mesh) -> Model:
    """Load a head to the devices of a mesh, in the model's dtype. Arguments and errors as in `describe_head`."""
    files, head = _described(name, method, target)
    head = shardable_model(head, mesh)

    def place(path: tuple[str, ...], spec: ParamSpec, fill: Fill) -> jax.Array:
        del path
        return on_devices(param_sharding(mesh, spec), spec, fill)

    filled = {name: spec for name, spec in head.specs.items() if name != MAP}
    params: dict[str, Any] = load_params(
        files.checkpoint(filled), filled, str(target.dtype), place, ignore=head.family.ignore
    )
    if MAP in head.specs:
        params[MAP] = put_whole(_inverse(files, head.config.vocab_size), replicated(mesh))
    return head.replace(params=params)


def _described(name: str, method: str, target: Model) -> tuple[ModelFiles, Model]:
    folder = demo_folder(name) or locate(name)
    _refuse_pickles(folder)
    files = open_model_files(folder)
    described = HeadFiles(files.config_json, files.tensors.tensors.keys(), target.config, target.cache_spec.windows)
    dtype = str(target.dtype)
    try:
        model = abstract_head(method, described, name, dtype)
    except ConfigError as error:
        raise ConfigError(f"speculative = {method}: {error} ({files.path})") from None
    return files, model.with_specs(files.stored(model.specs, dtype), dtype) if files.quantized else model


def abstract_head(method: str, files: HeadFiles, name: str, dtype: str) -> Model:
    """Return the head that ``files`` describe, without its weights.

    Raises:
        ConfigError: see `jaxinfer.models.registry.HeadFamily`.
    """
    family = HEADS[method].family(files)
    config = family.config(files.config_json)
    model = Model(family.module(config), {}, config, family, name)
    reduced = config.vocab_size != getattr(config, "draft_vocab", 0) > 0
    inverse = {MAP: ParamSpec((config.vocab_size,), (None,), dtype="int32")} if reduced else {}
    return model.with_specs({**model.specs, **inverse}, dtype)


def _refuse_pickles(folder: pathlib.Path) -> None:
    """Reject pickled heads, the form in which many are published, and name the tool that converts them."""
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickles and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds {pickles[0]}, a pickle, which is never loaded: .venv-oracle/bin/python -m "
            f"tools.oracle.unpickle {folder} converts it (tools/oracle/make_venv.sh makes that environment)"
        )


def _inverse(files: ModelFiles, vocab: int) -> np.ndarray:
    """Return the draft token id of each token of the model, -1 if the head has none.

    Raises:
        CheckpointError: the offsets are missing, or they name a token twice or out of range.
    """
    if OFFSETS not in files.tensors.tensors:
        raise CheckpointError(f"{files.path} lacks the tensor {quoted(OFFSETS)} that draft_vocab_size asks for")
    offsets = np.asarray(files.tensors.read(OFFSETS), np.int64).reshape(-1)
    ids = np.arange(len(offsets)) + offsets
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab or len(np.unique(ids)) < len(ids):
        raise CheckpointError(f"tensor {quoted(OFFSETS)} of {files.path} names tokens twice, or beyond {vocab}")
    inverse = np.full(vocab, -1, np.int32)
    inverse[ids] = np.arange(len(ids))
    return inverse
