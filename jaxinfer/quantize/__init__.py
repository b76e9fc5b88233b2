"""Layer-by-layer quantisation of a model, for `jaxinfer convert --quantize`."""

from jaxinfer.quant.make.recipe import METHODS, Recipe, RecipeError
from jaxinfer.quantize.calibration import BUILT_IN, Calibration, read_calibration
from jaxinfer.quantize.driver import quantize

__all__ = ["BUILT_IN", "METHODS", "Calibration", "Recipe", "RecipeError", "quantize", "read_calibration"]
