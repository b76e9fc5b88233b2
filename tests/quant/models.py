"""Models with quantised weights, each paired with a model of the same dequantised weights."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxinfer.models.model import Model
from jaxinfer.quant.layouts import Layout
from jaxinfer.types import ParamSpec, Source, walk_specs
from jaxinfer.weights import load_params, open_checkpoint, save_params
from jaxinfer.weights.load import on_default_device
from jaxinfer.weights.quantized import StoredCheckpoint, StoredWeight, storages
from jaxinfer.weights.tree import Place
from tests.quant.examples import arrays_of

GAIN = 0.02
Chooses = Callable[[str, int], Layout | None]


def stored_and_plain(
    model: Model, folder: pathlib.Path, choose: Chooses, place: Place = on_default_device
) -> tuple[Model, Model]:
    """Return a model with random stored weights and one with the same weights dequantised; all else is from ``model``.

    Args:
        folder: a checkpoint is written there.
        choose: returns the layout of a weight by its checkpoint name and input count; None: unquantised.
    """
    specs, dtype = model.specs, str(model.dtype)
    save_params(folder, model.params, specs, {"architectures": ["Any"]})
    (folder / "config.json").write_text(json.dumps({}))
    weights = _weights(specs, choose)
    changed = storages(specs, weights, dtype)

    def load(tree: Any) -> Any:
        plain = open_checkpoint(folder)
        return load_params(StoredCheckpoint(plain, weights, frozenset(weights), tree), tree, dtype, place)

    return model.replace(specs=changed, params=load(changed)), model.replace(params=load(specs))


def _weights(specs: Any, choose: Chooses) -> Mapping[str, StoredWeight]:
    rng, weights = np.random.default_rng(5), {}
    for _, spec in walk_specs(specs):
        for source in spec.sources:
            if spec.inputs is not None and source.name not in weights:
                shape = _upright(spec, source)
                layout = choose(source.name, shape[-1])
                if layout is not None:
                    arrays = arrays_of(layout, shape[:-1], shape[-1], rng, GAIN)
                    weights[source.name] = StoredWeight(shape, layout, arrays.__getitem__, 1, _digest(arrays))
    return weights


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    return str(arrays["order"].tolist()) if "order" in arrays else ""


def _upright(spec: ParamSpec, source: Source) -> tuple[int, ...]:
    """Return the shape ``[*stack, out, in]``."""
    *stack, rows, columns = source.shape
    return (*stack, rows, columns) if source.transpose == (spec.inputs == 0) else (*stack, columns, rows)
