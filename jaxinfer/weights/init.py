"""Random weights from the parameter specs, for benchmarks, training and tests."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from jaxinfer.types import ParamSpec, ParamTree, map_specs
from jaxinfer.weights.load import on_default_device
from jaxinfer.weights.tree import Path, Place, dtype_of, target_dtype

_DRAWN_AT_ONCE = 1 << 20


def init_params(
    specs: ParamTree, seed: int, dtype: str = "float32", place: Place = on_default_device
) -> dict[str, Any]:
    """Return a parameter tree of random weights.

    A parameter depends only on the seed, its path and its spec, not on the rest of the tree; ``dtype`` only affects
    rounding. A new numpy may change the stream: save weights that must outlive it.

    Args:
        specs: ``init`` "normal" draws with standard deviation ``scale``; "ones" and "zeros" are constant.
        seed: any integer >= 0.
        dtype: "float32", "bfloat16" or "float16".
        place: called with the path, the spec and a function that fills a buffer (see `load_params`); its result becomes
            the leaf. The whole parameter is drawn, whichever slice is requested.

    Raises:
        ValueError: ``dtype`` or a spec's ``init`` is unknown, or ``seed`` is negative.
    """
    target = target_dtype(dtype)

    def make(path: Path, spec: ParamSpec) -> Any:
        whole = _draw(path, spec, seed, dtype_of(spec, target))
        return place(path, spec, lambda index: whole[index])

    return map_specs(make, specs)


def _draw(path: Path, spec: ParamSpec, seed: int, target: np.dtype[Any]) -> np.ndarray:
    match spec.init:
        case "ones":
            return np.ones(spec.shape, target)
        case "zeros":
            return np.zeros(spec.shape, target)
        case "normal":
            return _normal(_generator(seed, path), spec, target)
    raise ValueError(f"{'/'.join(path)}: init must be normal, ones or zeros, got {spec.init!r}")


def _generator(seed: int, path: Path) -> np.random.Generator:
    digest = hashlib.sha256("/".join(path).encode()).digest()
    words = np.random.SeedSequence([seed, int.from_bytes(digest[:16], "little")])
    return np.random.Generator(np.random.SFC64(words))


def _normal(generator: np.random.Generator, spec: ParamSpec, target: np.dtype[Any]) -> np.ndarray:
    buffer = np.empty(spec.shape, target)
    flat = buffer.reshape(-1)
    for begin in range(0, flat.size, _DRAWN_AT_ONCE):
        part = flat[begin : begin + _DRAWN_AT_ONCE]
        part[...] = generator.standard_normal(part.size, np.float32) * np.float32(spec.scale)
    return buffer
