"""Quantisation driver: memory holds one layer, statistics of its inputs, and the hidden states of the samples.

The folder is written as ``<destination>.unfinished`` and renamed when complete. An interrupted run resumes after the
last layer that it finished.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.opening import open_model
from jaxinfer.quant.make import Made, MadeCodebook
from jaxinfer.quant.make.formats import tensors_of
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quantize.calibration import Batch, Calibration, passed
from jaxinfer.quantize.folder import TARGETS, Target
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.quantize.layerwise import first_batches, quantized, require_layers
from jaxinfer.quantize.summary import Summary
from jaxinfer.quantize.work import Work
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.load import Progress
from jaxinfer.weights.native.writer import Unfinished, unfinished
from jaxinfer.weights.safetensors.reader import SafetensorsFile
from jaxinfer.weights.safetensors.writer import write_tensors

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
    if recipe.calibrated and calibration is None:
        raise RecipeError(f"{recipe.method} needs samples of text")
    work = Work(files, model, recipe, calibration if recipe.calibrated else None)
    require_layers(work)
    with unfinished(destination, _identity(work, output_format, check_finite)) as started:
        target = TARGETS[output_format](work, started)
        _write_layers(work, started, target, progress)
        (started.folder / _HIDDEN.format(work.layers)).unlink(missing_ok=True)
        target.finish()
    return work.summary


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
    first, batches = _start(work, started, target)
    for index in range(first, work.layers):
        layer = work.layer(index)
        target.write(index, _exported(work, layer, quantized(work, layer, batches)))
        if batches is not None:
            passed(work.module, layer, batches)
            _save_hidden(work, started, index + 1, batches)
        if progress is not None:
            progress(index + 1, work.layers, f"layer {index}")


def _save_hidden(work: Work, started: Unfinished, layers: int, batches: Sequence[Batch]) -> None:
    """Save the hidden states after ``layers`` layers: this marks these layers as finished. A run whose layers read more
    begins anew."""
    if not _resumes(work):
        return
    name = _HIDDEN.format(layers)
    write_tensors(started.folder / name, {"hidden": np.concatenate([batch.carried for batch in batches])})
    started.keep(name)
    (started.folder / _HIDDEN.format(layers - 1)).unlink(missing_ok=True)


def _resumes(work: Work) -> bool:
    return work.module.bound is None and not any(layer.index_topk for layer in work.module.config.layers)


def _start(work: Work, started: Unfinished, target: Target) -> tuple[int, list[Batch] | None]:
    """Return the first unfinished layer, and what it reads."""
    if work.calibration is None:
        return next((index for index in range(work.layers) if not target.has(index)), work.layers), None
    batches = first_batches(work)
    for index in range(work.layers, 0, -1):
        saved = started.folder / _HIDDEN.format(index)
        if saved.exists():
            hidden = np.array(SafetensorsFile(saved).read("hidden"))
            for batch, samples in zip(batches, work.calibration.batches(), strict=True):
                batch.carried = hidden[samples]
            return index, batches
    return 0, batches


def _exported(work: Work, layer: LayerWeights, made: Mapping[str, Made | MadeCodebook]) -> dict[str, np.ndarray]:
    """Return the layer's tensors by name, in the recipe's format."""
    tensors: dict[str, np.ndarray] = {}
    for name, weight in made.items():
        tensors |= tensors_of(name.removesuffix(".weight"), weight, work.stored)
    for name in (name for name in layer.places if name not in made):
        tensors[name] = layer.tensor(name).astype(layer.dtype(name, work.dtype))
    return tensors
