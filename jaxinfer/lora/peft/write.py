"""Writer of adapter folders in PEFT's format."""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.folders import CONFIG_FILE, TENSORS_FILE
from jaxinfer.lora.peft.module_paths import Path, Place, Places, find_places
from jaxinfer.types import EMBEDDING, ParamTree
from jaxinfer.weights.safetensors.writer import write_tensors

DTYPES = ("float32", "bfloat16")

Product = tuple[np.ndarray, np.ndarray]  # A [rank, in], B [out, rank]


def save_adapter(
    folder: str | os.PathLike[str], adapter: Adapter, specs: ParamTree, *, dtype: str = "float32"
) -> pathlib.Path:
    """Write adapter_config.json and adapter_model.safetensors, which PEFT and `read_adapter` read.

    Each checkpoint tensor has a separate product, without ranks that only change other tensors of the same parameter.
    The scale is 1, as B includes it.

    Args:
        specs: specs of the model, as its family declares them (`jaxinfer.lora.merge.declared`).
        dtype: dtype of the file: float32 or bfloat16.

    Returns:
        The folder.

    Raises:
        ValueError: the adapter does not fit this model, holds NaN or infinite values, or has parts that cannot be
            written: products of experts and of embeddings, magnitudes (DoRA) and biases.
        OSError: the folder cannot be written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r} and must be one of {', '.join(DTYPES)}")
    places = find_places(specs)
    products = {name: _joined(parts) for name, parts in _products(adapter, places).items()}
    written = pathlib.Path(folder)
    written.mkdir(parents=True, exist_ok=True)
    write_tensors(written / TENSORS_FILE, dict(_tensors(products, jnp.dtype(dtype))))
    config = _config({name: a.shape[0] for name, (a, _) in products.items()}, places)
    (written / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return written


def _products(adapter: Adapter, places: Places) -> dict[str, list[Product]]:
    """Return the products of each module, one for each parameter that contains it."""
    found: dict[str, list[Product]] = collections.defaultdict(list)
    for path, delta in adapter.deltas.items():
        _require_plain(path, delta, places)
        a, b = np.asarray(delta.a, np.float32), np.asarray(delta.b, np.float32)
        for name, columns, outputs in _modules(path, b, places):
            found[name].append((a[columns], outputs))
    return found


def _modules(path: Path, b: np.ndarray, places: Places) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the modules in a parameter with their ranks and rows of B, except unchanged modules.

    A rank that changes nothing belongs to every module: a new adapter has only such ranks.
    """
    modules = {name: at for name, at in places.modules.items() if any(place.path == path for place in at)}
    outputs = {name: _outputs([place for place in at if place.path == path], b) for name, at in modules.items()}
    idle = ~np.any([one.any(axis=0) for one in outputs.values()], axis=0)
    for name, one in outputs.items():
        columns = one.any(axis=0) | idle
        if columns.any():
            yield name, columns, one[:, columns]


def _outputs(places: list[Place], b: Float32[np.ndarray, "*form rank"]) -> Float32[np.ndarray, "out rank"]:
    """Return a module's rows of a parameter's B, located by placing their indices."""
    count = places[0].sizes[1]
    found = np.zeros((count, b.shape[-1]), np.float32)
    for place in places:
        numbers = np.full((*place.form, 1), -1, np.float32)
        place.put(np.arange(count, dtype=np.float32)[:, None], numbers)
        rows = numbers[..., 0].astype(int)
        found[rows[rows >= 0]] = b[rows >= 0]
    return found


def _require_plain(path: Path, delta: Delta, places: Places) -> None:
    name, place = "/".join(path), places.of_paths.get(path)
    if place is None:
        raise ValueError(f"adapter: the model has no parameter {name}")
    if path == EMBEDDING or place.expert is not None:
        raise ValueError(f"adapter: {name} is of {'embeddings' if path == EMBEDDING else 'experts'}: not written")
    if delta.magnitude is not None or delta.bias is not None:
        raise ValueError(f"adapter: {name} has a {'bias' if delta.magnitude is None else 'magnitude'}: not written")
    given, wanted = (*delta.a.shape[1:], *delta.b.shape[:-1]), (place.sizes[0], *place.form)
    if given != wanted or delta.a.shape[0] != delta.b.shape[-1]:
        raise ValueError(f"adapter: {name} has inputs and outputs {given} and must have {wanted}")
    if not (np.isfinite(delta.a).all() and np.isfinite(delta.b).all()):
        raise ValueError(f"adapter: {name} holds NaN or infinite values")


def _joined(parts: list[Product]) -> Product:
    """Return one product for the sum of several."""
    return np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts], axis=1)


def _tensors(products: Mapping[str, Product], dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    for name, (a, b) in products.items():
        yield f"base_model.model.{name}.lora_A.weight", np.ascontiguousarray(a, dtype)
        yield f"base_model.model.{name}.lora_B.weight", np.ascontiguousarray(b, dtype)


def _config(ranks: Mapping[str, int], places: Places) -> dict[str, Any]:
    rank = max(ranks.values())
    others = {name.replace(".", r"\."): one for name, one in ranks.items() if one != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(_fans_in(place) for name in ranks for place in places.modules[name]),
        "target_modules": _target_modules(ranks, places),
        "rank_pattern": others,
        "alpha_pattern": others,
        "inference_mode": True,
    }


def _fans_in(place: Place) -> bool:
    """Return whether the module's own matrix is [in, out], as in GPT-2."""
    return place.inputs_first != place.source.transpose


def _target_modules(adapted: Mapping[str, int], places: Places) -> list[str]:
    """Return the last components of module names, or whole names where an unadapted module shares the component."""
    left = {_last(name) for name in places.modules if name not in adapted}
    return sorted({name if _last(name) in left else _last(name) for name in adapted})


def _last(name: str) -> str:
    return name.rpartition(".")[2]
