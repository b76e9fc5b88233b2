"""Valid and invalid checkpoint files for the tests."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxinfer.types import ParamSpec, Source
from jaxinfer.weights import CheckpointError

EVERYTHING = slice(None)


def write_raw(path: pathlib.Path, header: Any, data: bytes = b"", length: int | None = None) -> pathlib.Path:
    """Write a file with exactly this header (bytes, or a value to encode) and, if given, a false header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors with the safetensors library."""
    safetensors.numpy.save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def write_sharded(folder: pathlib.Path, shards: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        write_tensors(folder / name, tensors)
    write_index(folder, {tensor: shard for shard, tensors in shards.items() for tensor in tensors})


def write_index(folder: pathlib.Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@contextmanager
def refused(pattern: str) -> Iterator[None]:
    """Check that the block raises a matching CheckpointError of one sentence on one line."""
    with pytest.raises(CheckpointError, match=pattern) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700, message
    assert not re.search(r"Traceback|Errno|<class", message)


def tiny_specs() -> dict[str, Any]:
    """Specs of fused QKV (2 KV heads of 3, groups of 2), gate/up and bias, an untransposed embedding: d=4, f=5."""
    kv, group, dim, d, f = 2, 2, 3, 4, 5
    attention = "layers.0.attn"
    qkv = (
        Source(f"{attention}.q.weight", (12, d), True, (d, kv, group, dim), (EVERYTHING, EVERYTHING, slice(0, group))),
        Source(f"{attention}.k.weight", (6, d), True, (d, kv, dim), (EVERYTHING, EVERYTHING, group)),
        Source(f"{attention}.v.weight", (6, d), True, (d, kv, dim), (EVERYTHING, EVERYTHING, group + 1)),
    )
    biases = (
        Source(f"{attention}.q.bias", (12,), reshape=(kv, group, dim), where=(EVERYTHING, slice(0, group))),
        Source(f"{attention}.k.bias", (6,), reshape=(kv, dim), where=(EVERYTHING, group)),
        Source(f"{attention}.v.bias", (6,), reshape=(kv, dim), where=(EVERYTHING, group + 1)),
    )
    gate_up = tuple(
        Source(f"mlp.{n}.weight", (f, d), True, where=(EVERYTHING, i)) for i, n in enumerate(("gate", "up"))
    )
    axes = (None,) * 4
    return {
        "embed": ParamSpec((7, d), axes[:2], sources=(Source("embed.weight", (7, d)),)),
        "block": {
            "norm": ParamSpec((d,), axes[:1], init="ones", sources=(Source("norm.weight", (d,)),)),
            "qkv": ParamSpec((d, kv, group + 2, dim), axes, sources=qkv),
            "qkv_bias": ParamSpec((kv, group + 2, dim), axes[:3], init="zeros", sources=biases),
            "gate_up": ParamSpec((d, 2, f), axes[:3], sources=gate_up),
        },
    }


def tiny_tensors(dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random tensors for ``tiny_specs``."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embed.weight": (7, 4),
        "norm.weight": (4,),
        "layers.0.attn.q.weight": (12, 4),
        "layers.0.attn.k.weight": (6, 4),
        "layers.0.attn.v.weight": (6, 4),
        "layers.0.attn.q.bias": (12,),
        "layers.0.attn.k.bias": (6,),
        "layers.0.attn.v.bias": (6,),
        "mlp.gate.weight": (5, 4),
        "mlp.up.weight": (5, 4),
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
