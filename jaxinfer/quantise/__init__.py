"""A model's weights quantised layer by layer: what `python -m jaxinfer.convert --quantize` does."""

from jaxinfer.quant.make.recipe import METHODS, Recipe, RecipeError
from jaxinfer.quantise.calibration import BUILT_IN, Calibration, read_calibration
from jaxinfer.quantise.driver import quantise

__all__ = ["BUILT_IN", "METHODS", "Calibration", "Recipe", "RecipeError", "quantise", "read_calibration"]
