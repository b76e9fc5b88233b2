"""From the parameters of a model to the tensors of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxinfer.types import ParamSpec, Source, walk_specs
from jaxinfer.weights.trainers.candidates import Specified, grouped
from jaxinfer.weights.trainers.fuse import is_host
from jaxinfer.weights.tree import as_stored, leaf_of


def named_parameters(model: Specified) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a model as tensors of Hugging Face, by name, one at a time; `params_from` reads them.

    Tensors are numpy arrays if the parameters are on the host or on CPUs, and JAX arrays on their devices if not.

    Raises:
        ValueError: a parameter is missing, has another shape than its spec, or is no plain array (`grouped`).
    """
    for path in grouped(model.specs):
        raise ValueError(
            f"{'/'.join(path)} is quantised or in a layout for kernels, and tensors of Hugging Face are not"
        )
    wanted: dict[str, list[tuple[tuple[str, ...], ParamSpec, Source]]] = {}
    for path, spec in walk_specs(model.specs):
        for source in spec.sources:
            wanted.setdefault(source.name, []).append((path, spec, source))
    for name, places in wanted.items():
        yield name, _tensor([(leaf_of(model.params, path, spec), source) for path, spec, source in places])


def _tensor(places: list[tuple[Any, Source]]) -> Any:
    stored = {source.part: as_stored(_readable(value)[source.where], source) for value, source in places}
    if () in stored:
        return stored[()]
    first = next(iter(stored.values()))
    whole = np.empty(places[0][1].shape, first.dtype)
    for part, value in stored.items():
        whole[part] = value
    return whole


def _readable(value: Any) -> Any:
    return np.asarray(value) if is_host(value) else value
