"""Calibration: runs a model layer by layer over sample text and collects statistics of the inputs of its weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.base import Layer
from jaxinfer.models.decoder import Decoder
from jaxinfer.quant.activation_hooks import InputStatistics, Observed, Orientation
from jaxinfer.quant.make.recipe import RecipeError
from jaxinfer.quantize.layer import LayerWeights
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


@dataclasses.dataclass
class Batch:
    """What layers read for some samples, on the host.

    Attributes:
        carried: what the layer before gave (`Decoder.carried`): hidden states, and for some families more.
        context: what all layers read (`Decoder.entered`).
        kept: keys and values of earlier layers that later ones read.
    """

    carried: Any
    context: Any
    kept: dict[int, Any] = dataclasses.field(default_factory=dict)

    def first(self) -> Batch:
        """Return a batch of the first sample."""
        return Batch(*jax.tree.map(lambda leaf: leaf[:1], (self.carried, self.context, self.kept)))


def entered(module: Decoder, params: Any, calibration: Calibration, dtype: str) -> list[Batch]:
    """Return what the first layer reads. ``params``: the parameters of `Decoder.embeddings`."""
    run: Any = jax.jit(functools.partial(module.apply, method=_enter))
    positions = np.arange(calibration.tokens.shape[1])
    found = []
    for batch in calibration.batches():
        tokens = calibration.tokens[batch]
        carried, context = run({"params": params}, tokens, np.broadcast_to(positions, tokens.shape))
        found.append(Batch(_on_host(carried, jnp.dtype(dtype)), _on_host(context)))
    return found


def _enter(module: Decoder, tokens: Array, positions: Array) -> tuple[Any, Any]:
    x, context = module.entered(module.embed(tokens, positions), positions)
    return module.carried(x), context


def _on_host(tree: Any, dtype: Any = None) -> Any:
    """Copy arrays to the host; ``dtype``: of those of floating-point numbers (None: their own)."""

    def copied(leaf: Array) -> np.ndarray:
        whole = np.asarray(leaf)
        return whole.astype(dtype) if dtype is not None and jnp.issubdtype(whole.dtype, jnp.floating) else whole

    return jax.tree.map(copied, tree)


def observed(
    module: Decoder, layer: LayerWeights, paths: tuple[Path, ...], batches: Sequence[Batch], gram: bool
) -> dict[Path, InputStatistics]:
    """Return statistics of the inputs of the parameters ``paths`` of a layer; ``gram`` is empty unless requested.

    Parameters that no observable product reads are left out.
    """
    params = _nested(layer.values)
    total: dict[Path, InputStatistics] = {}
    for batch in batches:
        found = _observe(layer.block, paths, gram, params, *_inputs(module, layer.index, batch))
        total = {path: total[path].merged(seen) if path in total else seen for path, seen in found.items()}
    return total


def after(module: Decoder, layer: LayerWeights, batch: Batch) -> tuple[Any, Any]:
    """Return what a layer gives to the next one for a batch, and its keys and values."""
    found: tuple[Any, Any] = _run(layer.block, _nested(layer.values), *_inputs(module, layer.index, batch))
    return found


def passed(module: Decoder, layer: LayerWeights, batches: Sequence[Batch]) -> None:
    """Replace what a layer read by what it gives to the next one, a batch at a time."""
    for batch in batches:
        carried, cache = after(module, layer, batch)
        batch.carried = _on_host(carried, jax.tree.leaves(batch.carried)[0].dtype)
        if is_source(module, layer.index):
            batch.kept[layer.index] = _on_host(cache)


def is_source(module: Decoder, index: int) -> bool:
    """Return whether other layers read the keys and values of layer ``index``."""
    return any(spec.source == index for spec in module.config.layers)


def _inputs(module: Decoder, index: int, batch: Batch) -> tuple[Any, Any, Any]:
    """Return what the block of a layer takes besides its parameters: carried, context and cache."""
    source = module.config.layers[index].source
    return batch.carried, module.told(batch.context, index), None if source is None else batch.kept[source]


def _nested(values: Mapping[Path, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(value)
    return tree


@functools.partial(jax.jit, static_argnames=("block",))
def _run(block: Layer, params: Any, carried: Any, context: Any, cache: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = block.apply({"params": params}, carried, context, causal_attend, cache)
    return found


@functools.partial(jax.jit, static_argnames=("block", "paths", "gram"))
def _observe(
    block: Layer, paths: tuple[Path, ...], gram: bool, params: Any, carried: Any, context: Any, cache: Any
) -> dict[Path, InputStatistics]:
    notes: dict[Path, InputStatistics] = {}

    def observer(path: Path) -> Any:
        def note(lies: Orientation, seen: InputStatistics) -> None:
            del lies
            statistics = seen if gram else seen._replace(gram=jnp.zeros(()))
            notes[path] = notes[path].merged(statistics) if path in notes else statistics

        return note

    tree = _with(params, {path: observer(path) for path in paths})
    block.apply({"params": tree}, carried, context, causal_attend, cache)
    return notes


def _with(params: Any, observers: Mapping[Path, Any], path: Path = ()) -> Any:
    if not isinstance(params, Mapping):
        return Observed(params, observers[path]) if path in observers else params
    return {key: _with(value, observers, (*path, key)) for key, value in params.items()}
