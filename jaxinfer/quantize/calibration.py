"""Calibration: runs a model layer by layer over sample text and collects statistics of the inputs of its weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.base import Layer
from jaxinfer.models.decoder import Decoder
from jaxinfer.quant.activation_hooks import InputStatistics, Observed, Orientation
from jaxinfer.quant.make.recipe import RecipeError
from jaxinfer.weights.tree import Path

_log = logging.getLogger("jaxinfer")

BUILT_IN = "built-in"
"""Name of the package's own text of 20 kB: prose, dialogue, facts, code, tables and several languages."""

_OWN_TEXT = pathlib.Path(__file__).with_name("calibration.txt")

_MOST_BYTES = 1 << 28  # bytes of a calibration file


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Token ids of samples of equal length, and the batch size."""

    tokens: Int[np.ndarray, "samples length"]
    batch: int = 8

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens, np.int64).tobytes()).hexdigest()

    def batches(self) -> Iterator[slice]:
        for first in range(0, len(self.tokens), self.batch):
            yield slice(first, first + self.batch)


@runtime_checkable
class Encoder(Protocol):
    """Protocol of the tokenizer used for calibration."""

    def encode(self, text: str) -> list[int]: ...


def read_calibration(text: str, tokenizer: Encoder, samples: int = 512, length: int = 512) -> Calibration:
    """Return samples of ``length`` tokens, evenly spaced over a text; with a warning fewer, if the text is short.

    Args:
        text: a file of UTF-8 text, or with the suffix ``.jsonl`` of an object with a ``text`` on each line; or
            `BUILT_IN`.

    Raises:
        RecipeError: the file cannot be read, is larger than 256 MB, or is shorter than one sample.
    """
    ids: list[int] = []
    for part in _texts(_OWN_TEXT if text == BUILT_IN else pathlib.Path(text)):
        ids += tokenizer.encode(part)
    whole = len(ids) // length
    if not whole:
        raise RecipeError(f"{text} has {len(ids)} tokens, less than one sample of {length}: use a longer text")
    if whole < samples:
        _log.warning(f"calibration text {text} has {whole} samples of {length} tokens, not {samples}: use more text")
    taken = np.unique(np.linspace(0, whole - 1, min(samples, whole)).round().astype(int))
    return Calibration(np.asarray(ids[: whole * length], np.int32).reshape(whole, length)[taken])


def _texts(path: pathlib.Path) -> list[str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RecipeError(f"{path} is larger than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return [text]
        found = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(f"{path} is not UTF-8 text, or not an object with a text on each line ({error})") from error
    if not all(isinstance(text, str) for text in found):
        raise RecipeError(f"{path} has a text that is not a string")
    return found


def embedded(module: Decoder, params: Any, calibration: Calibration, dtype: str) -> Float[np.ndarray, "samples t d"]:
    """Return the hidden states before the first layer."""
    run: Any = jax.jit(functools.partial(module.apply, method="embed"))
    positions = jnp.arange(calibration.tokens.shape[1])
    parts = []
    for batch in calibration.batches():
        tokens = jnp.asarray(calibration.tokens[batch])
        parts.append(np.asarray(run({"params": params}, tokens, jnp.broadcast_to(positions, tokens.shape))))
    return np.concatenate(parts).astype(jnp.dtype(dtype))


def context(module: Decoder, samples: int, length: int) -> Any:
    """Return what each layer reads besides its input (RoPE angles), for samples of ``length`` tokens."""
    positions = jnp.broadcast_to(jnp.arange(length), (samples, length))
    run: Any = module.apply
    return run({"params": {}}, positions, method="context")


def observed(
    module: Decoder,
    block: Layer,
    values: Mapping[Path, np.ndarray],
    paths: tuple[Path, ...],
    hidden: Float[np.ndarray, "samples t d"],
    calibration: Calibration,
    gram: bool,
) -> dict[Path, InputStatistics]:
    """Return statistics of the inputs of the parameters ``paths`` of a layer; ``gram`` is empty unless requested.

    Parameters that no observable product reads are left out.
    """
    params = _nested(values)
    total: dict[Path, InputStatistics] = {}
    for batch in calibration.batches():
        x = jnp.asarray(hidden[batch])
        found = _observe(block, paths, gram, params, x, context(module, *x.shape[:2]))
        total = {path: total[path].merged(seen) if path in total else seen for path, seen in found.items()}
    return total


def passed(
    module: Decoder,
    block: Layer,
    values: Mapping[Path, np.ndarray],
    hidden: Float[np.ndarray, "samples t d"],
    calibration: Calibration,
) -> None:
    """Replace hidden states by those after the layer, a batch at a time."""
    params = _nested(values)
    for batch in calibration.batches():
        x = jnp.asarray(hidden[batch])
        hidden[batch] = np.asarray(_run(block, params, x, context(module, *x.shape[:2])))


def _nested(values: Mapping[Path, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(value)
    return tree


@functools.partial(jax.jit, static_argnames=("block",))
def _run(block: Layer, params: Any, x: Array, extra: Any) -> Array:
    return block.apply({"params": params}, x, extra, causal_attend, None)[0]


@functools.partial(jax.jit, static_argnames=("block", "paths", "gram"))
def _observe(
    block: Layer, paths: tuple[Path, ...], gram: bool, params: Any, x: Array, extra: Any
) -> dict[Path, InputStatistics]:
    notes: dict[Path, InputStatistics] = {}

    def observer(path: Path) -> Any:
        def note(lies: Orientation, seen: InputStatistics) -> None:
            del lies
            statistics = seen if gram else seen._replace(gram=jnp.zeros(()))
            notes[path] = notes[path].merged(statistics) if path in notes else statistics

        return note

    tree = _with(params, {path: observer(path) for path in paths})
    block.apply({"params": tree}, x, extra, causal_attend, None)
    return notes


def _with(params: Any, observers: Mapping[Path, Any], path: Path = ()) -> Any:
    if not isinstance(params, Mapping):
        return Observed(params, observers[path]) if path in observers else params
    return {key: _with(value, observers, (*path, key)) for key, value in params.items()}
