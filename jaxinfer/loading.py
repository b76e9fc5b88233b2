"""From a name to a model: the demo, a folder or a hub id."""

from __future__ import annotations

import contextlib
import importlib.resources
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.registry import family_for
from jaxinfer.parallel.mesh import make_mesh, param_sharding
from jaxinfer.text import ChatTemplate, TemplateError, Tokenizer, TokenizerError
from jaxinfer.types import ParamSpec, ParamTree
from jaxinfer.weights import CheckpointError, load_params, refuse_quantised
from jaxinfer.weights.checkpoint import read_json_object
from jaxinfer.weights.load import Progress, checkpoint_dtype
from jaxinfer.weights.progress import loading_bar
from jaxinfer.weights.source import locate

DEMO_FOLDERS = {"demo": "target", "demo-draft": "draft"}

DTYPES = ("auto", "float32", "bfloat16", "float16")

# What a bad model folder raises: each carries one sentence for a person.
LOADING_ERRORS = (CheckpointError, ConfigError, TokenizerError, TemplateError)


def model_folder(name: str) -> pathlib.Path:
    """The folder that ``name`` means: "demo", "demo-draft", a path, or a hub id when the network allows.

    Raises:
        CheckpointError: nothing of that name can be had; the message says what to do.
    """
    if name in DEMO_FOLDERS:
        return pathlib.Path(str(importlib.resources.files("jaxinfer"))) / "demo" / DEMO_FOLDERS[name]
    return locate(name)


def load_model(name: str, dtype: str = "auto", *, check_finite: bool = False, show_progress: bool = True) -> Model:
    """Load config, tokenizer and weights; weights go tensor by tensor straight to the device.

    Args:
        name: see `model_folder`.
        dtype: of the parameters: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        check_finite: refuse NaN and infinite weights.
        show_progress: draw a bar on stderr where that is a terminal.

    Raises:
        CheckpointError, ConfigError, TokenizerError, TemplateError: one sentence that says what is wrong.
    """
    folder, abstract = _describe(name, dtype)
    specs = abstract.family.param_specs(abstract.config)
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    with loading_bar() if show_progress else contextlib.nullcontext() as progress:
        params = _load(folder, specs, str(abstract.dtype), progress, check_finite, tied=abstract.config.tied)
    generation = folder / "generation_config.json"
    return abstract.replace(
        params=params,
        tokenizer=tokenizer,
        chat_template=template,
        generation_config=read_json_object(generation) if generation.exists() else {},
    )


def abstract_model(name: str, dtype: str = "auto") -> Model:
    """The model without its weights, from config.json: the parameters are `jax.ShapeDtypeStruct`.

    Args:
        name, dtype: see `load_model`.

    Raises:
        CheckpointError, ConfigError: one sentence that says what is wrong.
    """
    return _describe(name, dtype)[1]


def _describe(name: str, dtype: str) -> tuple[pathlib.Path, Model]:
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
    folder = model_folder(name)
    config_json = read_json_object(folder / "config.json")
    refuse_quantised(config_json)
    family = family_for(config_json)
    config = family.config(config_json)
    stored = jnp.dtype(checkpoint_dtype(folder) if dtype == "auto" else dtype)
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, stored),
        family.param_specs(config),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )
    return folder, Model(module=family.module(config), params=params, config=config, family=family, name=name)


def _load(
    folder: pathlib.Path, specs: ParamTree, dtype: str, progress: Progress | None, check_finite: bool, *, tied: bool
) -> dict[str, Any]:
    mesh = make_mesh()

    def place(path: tuple[str, ...], buffer: np.ndarray) -> jax.Array:
        spec: Any = specs
        for key in path:
            spec = spec[key]
        assert isinstance(spec, ParamSpec)
        return jax.device_put(buffer, param_sharding(mesh, spec))

    ignore = ("lm_head.weight",) if tied else ()
    return load_params(folder, specs, dtype, place, progress, check_finite, ignore)
