"""Layer-by-layer quantisation of a model: into a folder, for `jaxinfer convert --quantize` (`driver`), or while it is
loaded (`on_load`)."""

from jaxinfer.quant.make.recipe import METHODS, Recipe, RecipeError
from jaxinfer.quantize.calibration import BUILT_IN, Calibration, read_calibration

__all__ = ["BUILT_IN", "METHODS", "Calibration", "Recipe", "RecipeError", "read_calibration"]
