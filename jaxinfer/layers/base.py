"""Base class of layers, which reads parameters by name."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxinfer.layers.rope import AxisPositions

Tokens = Int[Array, "*batch"]
"""Token ids."""

Positions = Int[Array, "*batch"] | AxisPositions
"""Positions of tokens in their sequences; -1: padding. With images, those of rotary embeddings, too."""

Hidden = Float[Array, "*batch d"]
"""Hidden states of tokens."""

HiddenAndCache = tuple[Hidden, Any]
"""Hidden states, and the cache of a layer with the new keys and values."""


class Layer(nn.Module):
    """A Flax module whose parameters are declared by the parameter tree of its family.

    Shapes, sharding and initialisation are declared in one place (`types.ParamSpec`); a layer only reads parameters.
    """

    def weight(self, name: str) -> Any:
        """Return the array (or quantised storage) ``name`` from this layer's parameters."""
        value: Any = self.get_variable("params", name)
        if value is None:
            raise KeyError(f"parameter {'/'.join((*self.path, name))} is missing from the given parameters")
        return value
