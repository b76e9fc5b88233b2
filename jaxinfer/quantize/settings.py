"""Recipe and samples of text from the settings of an engine, for quantisation while a model is loaded."""

from __future__ import annotations

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.config.quantization import ON_LOAD, QuantizationConfig
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quantize.calibration import Calibration, Encoder, read_calibration
from jaxinfer.weights.files import ModelFiles


def recipe_for(files: ModelFiles, config: QuantizationConfig) -> Recipe | None:
    """Return how a checkpoint is quantised while it is loaded; None: it is not, or is quantised already.

    Raises:
        EngineConfigError: a setting is invalid; or the checkpoint is quantised by another method, or the method does
            not apply to one that is not, or to adapters, or lacks a text.
    """
    for name, value, what in config.faults():
        raise EngineConfigError(f"{name} = {value} {what}")
    if config.quantization is None:
        return None
    if files.quantized:
        if not config.is_of(files.quant_method):
            raise refused(config, f"{files.path} is quantised already, by quant_method = {files.quant_method!r}")
        return None
    method = config.method_on_load
    if method not in ON_LOAD:
        raise refused(config, f"{files.path} is not quantised; while it is loaded it can be by {', '.join(ON_LOAD)}")
    rounded, size = method == "w8a8", config.quantization_group_size
    recipe = Recipe("int8" if rounded else method, activations=rounded, group_size=size)
    if recipe.folded and isinstance(config, EngineConfig) and config.enable_lora:
        raise refused(config, "and enable_lora = True exclude each other: adapters do not fit inputs that are scaled")
    if recipe.calibrated and config.calibration_data is None:
        text = f"{config.calibration_samples} samples of {config.calibration_length} tokens or more"
        why = f"must name a text for {method}, of {text}, like that which will be served"
        raise EngineConfigError(f"calibration_data = None {why}")
    return recipe


def samples_for(recipe: Recipe, config: QuantizationConfig, tokenizer: Encoder | None) -> Calibration | None:
    """Return the samples of text on which a recipe runs the model; None: it needs none.

    Raises:
        EngineConfigError: there is no tokenizer, or the text cannot be read or is too short.
    """
    if not recipe.calibrated:
        return None
    data = str(config.calibration_data)
    if tokenizer is None:
        raise EngineConfigError(f"calibration_data = {data} cannot be read as tokens: the model has no tokenizer")
    try:
        return read_calibration(data, tokenizer, config.calibration_samples, config.calibration_length)
    except RecipeError as error:
        raise EngineConfigError(f"calibration_data = {data}: {error}") from error


def refused(config: QuantizationConfig, why: object) -> EngineConfigError:
    """Return the error for a ``quantization`` that does not fit the model."""
    return EngineConfigError(f"quantization = {config.quantization!r}: {why}")
