"""Weights from trainers: name maps between a model's own parameters and the names of other libraries.

A `ParamSpec` declares the tensors of Hugging Face that fill a parameter; that is the map of the names "hf". The other
conventions (`tunix`, `maxtext`, `levanter`) are tables from their names to those tensors.
"""

from jaxinfer.weights.errors import WeightsError
from jaxinfer.weights.trainers.candidates import NAMES
from jaxinfer.weights.trainers.intake import each_param, params_from
from jaxinfer.weights.trainers.outlet import named_parameters

__all__ = ["NAMES", "WeightsError", "each_param", "named_parameters", "params_from"]
