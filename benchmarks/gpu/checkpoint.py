"""A model folder to start a server with: a checkpoint of random weights, and a tokenizer with a matching vocabulary."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.models.model import abstract
from jaxinfer.types import ParamSpec, walk_specs
from jaxinfer.weights.safetensors.writer import write_tensors

_SPARE, _STRIDE = 1 << 16, 7919  # random numbers beyond the largest tensor; offset between the starts of two tensors
_SCALE = 0.02  # standard deviation of all matrices, as in the initialization of Llama
_SPACE = "\u0120"  # the space in byte-level tokenizers


def write_checkpoint(folder: pathlib.Path, config_json: Mapping[str, Any]) -> int:
    """Write bfloat16 weights, config and tokenizer into ``folder``; return the bytes of the weights."""
    specs = [spec for _, spec in walk_specs(abstract(dict(config_json), "bfloat16").specs)]
    numbers = _numbers(max(math.prod(source.shape) for spec in specs for source in spec.sources) + _SPARE)
    counter = itertools.count()
    tensors = {
        source.name: _tensor(spec, source.shape, numbers[next(counter) * _STRIDE % _SPARE :])
        for spec in specs
        for source in spec.sources
    }
    for name, content in (("config.json", dict(config_json)), ("tokenizer.json", _tokenizer(config_json))):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return write_tensors(folder / "model.safetensors", tensors)


def _numbers(count: int) -> np.ndarray:
    """Return ``count`` random numbers that repeat every 2**22, which is harmless and writes 16 GB quickly."""
    some = _SCALE * np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    return np.resize(some.astype(ml_dtypes.bfloat16), count)


def _tensor(spec: ParamSpec, shape: tuple[int, ...], numbers: np.ndarray) -> np.ndarray:
    if spec.init != "normal":
        return np.full(shape, float(spec.init == "ones"), ml_dtypes.bfloat16)
    return numbers[: math.prod(shape)].reshape(shape)


def _tokenizer(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer without merges. Most tokens are letters after a space, as in real ones."""
    letters = [_SPACE, *(chr(code) for code in range(33, 127))]
    words = (f"{_SPACE}{number:x}" for number in itertools.count())
    tokens = itertools.islice(itertools.chain(letters, words), config_json["vocab_size"])
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }
