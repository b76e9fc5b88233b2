"""Adapters as device uploads: layer by layer, in the shapes of the banks. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.types import LoRATarget

Path = tuple[str, ...]
_SPREAD = np.float32(0.05)  # standard deviation of random values


def parts(
    adapter: Adapter, targets: Mapping[Path, LoRATarget], numbers: Any = np
) -> list[dict[str, Float32[Any, "..."]]]:
    """Return all arrays of a bank slot: those of the adapter, padded, and zeros (magnitudes: ones) elsewhere.

    A part has the parameters whose paths have the same first key; parts are in the order of ``targets``. Arrays are
    named "path/of/parameter:a", "...:b", "...:magnitude" and "...:bias".

    Args:
        numbers: `numpy`, or `jax.numpy` for arrays that are traced.

    Raises:
        ValueError: see `require_fit`.
    """
    require_fit(adapter, targets)
    found = dict[str, dict[str, Any]]()
    for path, target in targets.items():
        arrays, name = _arrays(adapter.deltas.get(path), target, numbers), "/".join(path)
        found.setdefault(path[0], {}).update({f"{name}:{kind}": array for kind, array in arrays.items()})
    return list(found.values())


def random_parts(targets: Mapping[Path, LoRATarget], seed: int) -> Iterator[dict[str, Float32[np.ndarray, "..."]]]:
    """Yield the parts of a random adapter that covers every adaptable weight."""
    rng = np.random.default_rng(seed)
    for _, paths in itertools.groupby(targets, key=lambda path: path[0]):
        yield {
            f"{'/'.join(path)}:{name}": array for path in paths for name, array in _random(targets[path], rng).items()
        }


def random_adapter(targets: Mapping[Path, LoRATarget], seed: int) -> Adapter:
    """Return a random adapter that covers every adaptable weight."""
    rng = np.random.default_rng(seed)
    return Adapter("", 0, {path: Delta(**_random(target, rng)) for path, target in targets.items()}).on_host()


def _random(target: LoRATarget, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, "..."]]:
    return {
        name: rng.standard_normal(shape, np.float32) * _SPREAD + np.float32(name == "magnitude")
        for name, shape in target.shapes.items()
    }


def require_fit(adapter: Adapter, targets: Mapping[Path, LoRATarget]) -> None:
    """Raise ValueError if a parameter of the adapter has no bank, or its arrays do not fit."""
    for path, delta in adapter.deltas.items():
        if path not in targets:
            raise ValueError(f"{'.'.join(path)}: there is no bank for an adapter of it")
        _require_fit(path, delta, targets[path])


def _arrays(delta: Delta | None, target: LoRATarget, numbers: Any) -> dict[str, Any]:
    whole, outputs = target.a[-2], target.b[:-1]
    if delta is None:
        delta = Delta(numbers.zeros(target.a, np.float32), numbers.zeros(target.b, np.float32))
    missing, kept = (0, whole - delta.rank), [(0, 0)] * len(outputs)
    magnitude, bias = delta.magnitude, delta.bias
    return {
        "a": numbers.pad(delta.a, [*kept[: len(target.a) - 2], missing, (0, 0)]),
        "b": numbers.pad(delta.b, [*kept, missing]),
        "magnitude": numbers.ones(outputs, np.float32) if magnitude is None else magnitude,
        "bias": numbers.zeros(outputs, np.float32) if bias is None else bias,
    }


def _require_fit(path: Path, delta: Delta, target: LoRATarget) -> None:
    rank, most, name = delta.rank, target.a[-2], ".".join(path)
    if rank > most:
        raise ValueError(f"{name} has an adapter of rank {rank}, and max_lora_rank has room for {most}")
    wanted = {"a": (*target.a[:-2], rank, target.a[-1]), "b": (*target.b[:-1], rank)}
    wanted |= {"magnitude": target.b[:-1], "bias": target.b[:-1]}
    for kind, shape in wanted.items():
        value = getattr(delta, kind)
        if value is not None and np.shape(value) != shape:
            raise ValueError(f"{name}: {kind} of the adapter is {np.shape(value)} and must be {shape}")
