"""Quantisation driver: memory holds one layer, statistics of its inputs, and the hidden states of the samples.

The folder is written as ``<destination>.unfinished`` and renamed when complete. An interrupted run resumes after the
last layer that it finished.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder
from jaxinfer.opening import open_model
from jaxinfer.quant.activation_hooks import InputStatistics
from jaxinfer.quant.make.formats import tensors_of
from jaxinfer.quant.make.gptq import enough_tokens
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quantize.calibration import Calibration, embedded, observed, passed
from jaxinfer.quantize.fold import Folder, Statistics, can_fold
from jaxinfer.quantize.folder import TARGETS, Target
from jaxinfer.quantize.layer import LayerWeights, Linear, linears, tensors
from jaxinfer.quantize.summary import Summary
from jaxinfer.quantize.work import Work
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.load import Progress
from jaxinfer.weights.native.writer import Unfinished, unfinished
from jaxinfer.weights.safetensors.reader import SafetensorsFile
from jaxinfer.weights.safetensors.writer import write_tensors
from jaxinfer.weights.tree import target_dtype

_HIDDEN = "hidden-{:05}.safetensors"


def quantize(
    source: str,
    destination: pathlib.Path,
    recipe: Recipe,
    calibration: Calibration | None = None,
    dtype: str = "auto",
    progress: Progress | None = None,
    check_finite: bool = False,
    output_format: str = "safetensors",
) -> Summary:
    """Write a folder with quantised weights, which ``--model`` accepts; return a summary of the weights.

    Args:
        source: "demo", a folder or a hub id of a model that is not quantised.
        destination: a folder that does not exist.
        calibration: samples to run the model on; required if the recipe is ``calibrated``.
        dtype: dtype of unquantized tensors; "auto": the source's dtype.
        progress: called with layers done, total layers, and a name.
        check_finite: reject NaN and infinite weights.
        output_format: "safetensors": a Hugging Face folder in the recipe's format, which other tools can read; "orbax":
            the folder that converting that one would give.

    Raises:
        CheckpointError, ConfigError, RecipeError: one sentence with the cause.
        OSError: the destination cannot be written.
    """
    files, model = open_model(source, dtype, check_finite=check_finite)
    if files.quantized:
        raise CheckpointError(f"{source} is quantised already")
    if not isinstance(model.module, Decoder):
        raise RecipeError(f"{type(model.module).__name__} has no layers that can be run one by one")
    if recipe.calibrated and model.module.bound is not None:
        raise RecipeError(f"{recipe.method} runs layers one by one, and those of this model read {model.module.bound}")
    if recipe.calibrated and calibration is None:
        raise RecipeError(f"{recipe.method} needs samples of text")
    work = Work(files, model, recipe, calibration if recipe.calibrated else None)
    _require_foldable(work)
    with unfinished(destination, _identity(work, output_format, check_finite)) as started:
        target = TARGETS[output_format](work, started)
        _write_layers(work, started, target, progress)
        (started.folder / _HIDDEN.format(work.layers)).unlink(missing_ok=True)
        target.finish()
    return work.summary


def _require_foldable(work: Work) -> None:
    for block in map(work.block, range(work.layers)):
        if work.recipe.folded and not can_fold(block):
            raise RecipeError(
                f"{work.recipe.method} scales the inputs of layers, which is not known of {type(block).__name__}"
            )


def _identity(work: Work, output_format: str, check_finite: bool) -> dict[str, Any]:
    """Return the identity of a run: a run may resume an interrupted one of equal identity."""
    calibration = work.calibration
    return {
        "source": str(work.files.path.resolve()),
        "files": work.files.state,
        "recipe": dataclasses.asdict(work.recipe),
        "config": work.config_json,
        "format": output_format,
        "check_finite": check_finite,
        "calibration": None if calibration is None else calibration.digest,
    }


# --------------------------------------------------------------------------------------------------------------
# Layers


def _write_layers(work: Work, started: Unfinished, target: Target, progress: Progress | None) -> None:
    first, hidden = _start(work, started, target)
    for index in range(first, work.layers):
        layer = work.layer(index)
        target.write(index, _quantized(work, layer, hidden))
        if hidden is not None and work.calibration is not None:
            passed(work.module, layer.block, layer.values, hidden, work.calibration)
            _save_hidden(started, index + 1, hidden)
        if progress is not None:
            progress(index + 1, work.layers, f"layer {index}")


def _save_hidden(started: Unfinished, layers: int, hidden: np.ndarray) -> None:
    """Save the hidden states after ``layers`` layers: this marks these layers as finished."""
    name = _HIDDEN.format(layers)
    write_tensors(started.folder / name, {"hidden": hidden})
    started.keep(name)
    (started.folder / _HIDDEN.format(layers - 1)).unlink(missing_ok=True)


def _start(work: Work, started: Unfinished, target: Target) -> tuple[int, np.ndarray | None]:
    """Return the first unfinished layer, and the hidden states before it."""
    if work.calibration is None:
        return next((index for index in range(work.layers) if not target.has(index)), work.layers), None
    for index in range(work.layers, 0, -1):
        saved = started.folder / _HIDDEN.format(index)
        if saved.exists():
            return index, np.array(SafetensorsFile(saved).read("hidden"))
    names = work.module.embeddings
    params = jax.tree.map(jnp.asarray, {name: _arrays(work.model.params[name]) for name in names})
    return 0, embedded(work.module, params, work.calibration, work.dtype)


def _arrays(tree: Any) -> Any:
    return {key: _arrays(node) if isinstance(node, Mapping) else np.asarray(node) for key, node in tree.items()}


def _quantized(work: Work, layer: LayerWeights, hidden: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the layer's tensors as written; the layer itself is left with the dequantized values."""
    statistics = Statistics()
    if hidden is not None and work.calibration is not None:
        paths = tuple(path for path, spec in layer.specs.items() if spec.inputs is not None or path[-1] == "router")
        gram = work.recipe.gram
        statistics = observed(work.module, layer.block, layer.values, paths, hidden, work.calibration, gram)
    if work.recipe.folded:
        Folder(layer, statistics, work.recipe, work.recipe.grid(work.dtype)).fold()
    made: dict[str, np.ndarray] = {}
    done = set()
    for linear in linears(layer.specs):
        if not work.summary.kind(linear).reason:
            made |= _make(work, layer, linear, statistics)
            done.add(linear.name)
    for name, (value, dtype) in tensors(layer.specs, layer.values).items():
        if name not in done:
            made[name] = value.astype(target_dtype(dtype or work.dtype))
    return made


def _make(work: Work, layer: LayerWeights, linear: Linear, statistics: Statistics) -> dict[str, np.ndarray]:
    weight = layer.weight(linear)
    made = work.recipe.made(jnp.asarray(weight), _gram(work, linear, statistics), work.dtype)
    values = np.asarray(made.dequantize())
    work.summary.kind(linear).add(weight, values)
    layer.replace(linear, values)
    return tensors_of(linear.module, made, work.stored)


def _gram(work: Work, linear: Linear, statistics: Statistics) -> jax.Array | None:
    """Return the Gram matrix of a weight's inputs; None if not needed, or for an expert that saw too few tokens."""
    seen = statistics.get(linear.path)
    if seen is None or not work.recipe.gram:
        return None
    if linear.expert is not None:
        seen = InputStatistics(*(part[linear.expert] for part in seen))
    if not enough_tokens(float(seen.rows), linear.shape[1]):
        work.summary.kind(linear).starved += 1
        return None
    return jnp.asarray(seen.gram)
