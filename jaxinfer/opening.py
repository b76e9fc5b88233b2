"""Opening of a model by name: its files, and its description without weights."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.config.aliases import DTYPES, demo_folder, known_dtype
from jaxinfer.formats.multimodal import is_wrapper, wrapped_name
from jaxinfer.images.processor import PROCESSOR_FILES
from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model, describe, with_vision
from jaxinfer.models.plugins import find_families
from jaxinfer.models.registry import Family, family_for
from jaxinfer.models.vision.registry import vision_family_for
from jaxinfer.models.vision.tower import Vision
from jaxinfer.text import TemplateError, TokenizerError, gguf_files
from jaxinfer.types import HEAD, ParamTree, walk_specs
from jaxinfer.weights import CheckpointError, load_params
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.load import Progress, auto_dtype, deferred
from jaxinfer.weights.open import open_model_files
from jaxinfer.weights.safetensors.checkpoint import read_json_object
from jaxinfer.weights.sidecar import copy_companions
from jaxinfer.weights.source import locate
from jaxinfer.weights.ties import with_stored_head
from jaxinfer.weights.tree import Place, with_names

_log = logging.getLogger("jaxinfer")

# Errors of an invalid model folder; each has a one-sentence message for the user.
LOADING_ERRORS = (CheckpointError, ConfigError, TokenizerError, TemplateError)


def model_folder(name: str) -> pathlib.Path:
    """Return the folder of ``name``: "demo", "demo-draft", a path, or a hub id when the network allows.

    Raises:
        CheckpointError: the model is not available; the message says what to do.
    """
    return demo_folder(name) or locate(name)


def describe_model(
    name: str,
    dtype: str,
    family: str = "auto",
    families: Mapping[str, Family] = MappingProxyType({}),
    vision: bool = True,
    parts: tuple[pathlib.Path, ...] = (),
) -> tuple[ModelFiles, Model]:
    dtype = checked_dtype(dtype)
    files = dataclasses.replace(open_model_files(model_folder(name)), parts=parts)
    resolved = auto_dtype(files.config_json, files.tensors) if dtype == "auto" else dtype
    known = {**find_families(files.config_json, family), **families}
    its = family_for(files.config_json, known)
    model = describe(its, files.config_json, resolved, name)
    if model.config.tied:
        files = with_stored_head(files, _untied(model), its.prefix)
        model = describe(its, files.config_json, resolved, name)
    if vision:
        model = with_vision(model, _vision(files, its, model), resolved)
    if files.quantized:
        model = model.with_specs(files.stored(files.named(model.specs, its.prefix), resolved), resolved)
    return files, model


def _vision(files: ModelFiles, family: Family, model: Model) -> Vision | None:
    """Return the vision tower of a checkpoint; None: it has none, one that is not supported, or no image processor."""
    its = family.vision or vision_family_for(files.whole_json)
    jsons = {name: read_json_object(path) for name in PROCESSOR_FILES if (path := files.path / name).exists()}
    if its is None or not (family.vision or (files.left_out and jsons)):
        return None
    config = its.config(files.whole_json)
    width, hidden = config.width // (1 + config.deep), model.config.hidden_size
    if width != hidden:
        raise ConfigError(f"config.json: vision_config has outputs of {width} numbers, and hidden_size is {hidden}")
    try:
        processor = its.processor(files.whole_json, jsons)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Vision(its.module(config), config, its, processor)


def _untied(model: Model) -> ParamTree:
    """Return the parameter specs of the model with an untied LM head."""
    specs: ParamTree = model.family.param_specs(dataclasses.replace(model.config, tied=False))
    return specs


def checked_dtype(name: str) -> str:
    if (found := known_dtype(name)) is None:
        raise CheckpointError(f"dtype = {name!r} must be one of {', '.join(DTYPES)}")
    return found


def warn_of_others(files: ModelFiles, model: Model) -> None:
    if model.vision is None and (others := files.left_out):
        what = ", ".join(f"{name}: {count}" for name, count in others.items())
        _log.warning(f"{model.name} is read as a text model, without images: tensors that are not read ({what})")


def described_by(files: ModelFiles, model: Model) -> Mapping[str, Any]:
    """Return the config.json of a model that was read from files: that of the text model alone, or with its tower."""
    return files.config_json if model.vision is None else files.whole_json


def saved_specs(model: Model, config_json: Mapping[str, Any]) -> ParamTree:
    """Return the specs of a model with the tensor names of a checkpoint with this config.json."""
    spell = functools.partial(wrapped_name, config_json)
    return with_names(model.specs, spell) if is_wrapper(config_json) else model.specs


def write_companions(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the files that accompany a model's weights, such as its tokenizer, into another folder.

    Args:
        source: a model folder, whose small files are copied, or a GGUF file, whose metadata have the same content.

    Raises:
        TokenizerError, TemplateError: the tokenizer or template of a GGUF file is not supported.
        OSError: a file cannot be written.
    """
    if not source.is_file():
        copy_companions(source, folder)
        return
    for name, text in gguf_files(source).items():
        (folder / name).write_text(text, encoding="utf-8")


def open_model(
    name: str, dtype: str = "auto", *, check_finite: bool = False, progress: Progress | None = None
) -> tuple[ModelFiles, Model]:
    """Return the files of a named model, and the model with lazily read parameters (`jaxinfer.weights.load.Deferred`),
    for conversion one by one. Arguments are those of `load_model`.

    Raises:
        CheckpointError, ConfigError: one sentence with the reason; for values, when they are read.
    """
    files, model = describe_model(name, dtype)
    warn_of_others(files, model)
    params = filled_params(files, model, deferred(model.dtype), progress, check_finite)
    return files, model.replace(params=params)


def filled_params(
    files: ModelFiles, model: Model, place: Place, progress: Progress | None, check_finite: bool
) -> dict[str, Any]:
    tied = dict(walk_specs(_untied(model))).get(HEAD) if model.config.tied else None
    heads = (source.name for source in tied.sources) if tied else ()
    patterns = (*model.family.ignore, *getattr(model.config, "ignored", ()), *heads)
    ignore = files.ignored(patterns, model.family.prefix)
    specs = model.specs if files.quantized else files.named(model.specs, model.family.prefix)
    return load_params(files.checkpoint(specs), specs, str(model.dtype), place, progress, check_finite, ignore)
