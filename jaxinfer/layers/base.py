"""The base class of layers: reads parameters by name."""

from __future__ import annotations

from typing import Any

import flax.linen as nn


class Layer(nn.Module):
    """A Flax module whose parameters are declared by its family's parameter tree, not by itself.

    Shapes, sharding and initialisation stand in one place (`types.ParamSpec`); a layer only reads.
    """

    def weight(self, name: str) -> Any:
        """The array (or quantised storage) called ``name`` in this layer's part of the parameters."""
        value: Any = self.get_variable("params", name)
        if value is None:
            raise KeyError(f"parameter {'/'.join((*self.path, name))} is missing from the given parameters")
        return value
