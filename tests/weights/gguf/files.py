"""GGUF files for the tests, valid and invalid."""

import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer import load_model
from jaxinfer.formats.gguf import BLOCKS, PLAIN
from jaxinfer.models.model import abstract
from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint
from jaxinfer.weights.load import load_params
from jaxinfer.weights.quantized import StoredCheckpoint
from tests.models.parity import tokenizer_json
from tools.oracle.golden import write_json

NUMBERS = {name: number for number, name in (*PLAIN.items(), *BLOCKS.items())}
_SIMPLE = {"F32": np.float32, "F16": np.float16}

Blocks = tuple[str, tuple[int, ...], bytes]  # kind, [out, in], data


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    """Return the bytes of a value after its type number."""
    number, raw = _numbered(value)
    return struct.pack("<I", number) + raw


def _numbered(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<B", value)
        case int():
            return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
        case float():
            return 6, struct.pack("<f", value)
        case str() | bytes():
            return 8, text(value)
    kinds = {_numbered(item)[0] for item in value} or {4}
    number = max(kinds)
    raw = b"".join(_numbered(float(item) if number == 6 else item)[1] for item in value)
    return 9, struct.pack("<IQ", number, len(value)) + raw


def stored(tensor: "np.ndarray | Blocks") -> Blocks:
    if isinstance(tensor, tuple):
        return tensor
    kind = next(kind for kind, dtype in _SIMPLE.items() if tensor.dtype == dtype)
    return kind, tensor.shape, np.ascontiguousarray(tensor).tobytes()


def entry(name: str, shape: tuple[int, ...], number: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", number, offset)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: "Mapping[str, np.ndarray | Blocks]", alignment: int = 32, version: int = 3
) -> bytes:
    """Return the bytes of a whole file."""
    keys = dict(metadata) if alignment == 32 else {**metadata, "general.alignment": alignment}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(text(key) + typed(value) for key, value in keys.items())
    data = b""
    for name, tensor in tensors.items():
        kind, shape, raw = stored(tensor)
        data += bytes(-len(data) % alignment)
        head += entry(name, shape, NUMBERS[kind], len(data))
        data += raw
    return head + bytes(-len(head) % alignment) + data


def write_gguf(
    path: pathlib.Path, metadata: Mapping[str, Any], tensors: "Mapping[str, np.ndarray | Blocks]", **options: int
) -> pathlib.Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def q8_0(values: np.ndarray) -> Blocks:
    """Quantise to Q8_0 by round-to-nearest."""
    groups = values.astype(np.float32).reshape(-1, 32)
    scales = (np.abs(groups).max(-1, keepdims=True) / 127).astype("<f2")
    divisor = np.where(scales == 0, 1, scales).astype(np.float32)
    codes = np.clip(np.round(groups / divisor), -127, 127).astype(np.int8)
    return "Q8_0", values.shape, np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1).tobytes()


# Byte offsets of a block's float16 values, for kinds that are mixed in files of fewer than four bits a weight.
HALVES = {
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_XS": (0,),
    "Q1_0": (0,),
    "Q2_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
MIXED = ("IQ1_M", *HALVES)


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Blocks:
    """Return random blocks, with scales such that a row's product with inputs of unit size is about 1."""
    elements, size = KINDS[kind].elements, KINDS[kind].bytes
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    _set_scales(kind, blocks, 1.0)
    spread = float(jnp.std(jax.jit(KINDS[kind].dequantize)(blocks.reshape(-1, size)[:8])))
    _set_scales(kind, blocks, 1.0 / (spread * shape[-1] ** 0.5))
    return kind, shape, blocks.tobytes()


def _set_scales(kind: str, blocks: np.ndarray, scale: float) -> None:
    raw = np.array([scale], "<f2")
    for at in HALVES.get(kind, ()):
        blocks[..., at : at + 2] = raw.view(np.uint8)
    if kind == "IQ1_M":  # four bits of the scale in the highest bits of each of the last four words
        words = np.ascontiguousarray(blocks[..., 48:]).view("<u2") & 0x0FFF
        quarters = (raw.view("<u2") >> np.arange(0, 16, 4, dtype="<u2")) << 12
        blocks[..., 48:] = (words | quarters).astype("<u2").view(np.uint8)


TINY = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "c"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0, -4.0, -5.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


TOKENIZER = {key: value for key, value in TINY.items() if key.startswith("tokenizer.")}

MIXED_TINY = {**TINY, "llama.embedding_length": 256, "llama.feed_forward_length": 256}


def tiny_tensors() -> "dict[str, np.ndarray | Blocks]":
    """Return the tensors of `TINY`: one layer, with Q8_0 and float matrices."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    ones = np.ones(32, np.float32)
    return {
        "token_embd.weight": q8_0(matrix(8, 32)),
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_q.weight": q8_0(matrix(32, 32)),
        "blk.0.attn_k.weight": matrix(16, 32),
        "blk.0.attn_v.weight": matrix(16, 32).astype(np.float16),
        "blk.0.attn_output.weight": q8_0(matrix(32, 32)),
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": q8_0(matrix(64, 32)),
        "blk.0.ffn_up.weight": q8_0(matrix(64, 32)),
        "blk.0.ffn_down.weight": q8_0(matrix(32, 64)),
        "output_norm.weight": ones,
    }


def mixed_tensors(experts: int = 0) -> "dict[str, np.ndarray | Blocks]":
    """Return the tensors of `MIXED_TINY`, in many kinds of blocks, as files of few bits a weight mix them."""
    rng, width = np.random.default_rng(3), 256

    def block(kind: str, *shape: int) -> Blocks:
        return random_blocks(kind, shape, rng)

    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    ones = np.ones(width, np.float32)
    tensors: dict[str, np.ndarray | Blocks] = {
        "token_embd.weight": block("IQ3_S", 8, width),
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_q.weight": block("IQ2_XXS", width, width),
        "blk.0.attn_k.weight": block("IQ2_XS", width // 2, width),
        "blk.0.attn_v.weight": block("IQ2_S", width // 2, width),
        "blk.0.attn_output.weight": block("IQ3_XXS", width, width),
        "blk.0.ffn_norm.weight": ones,
        f"blk.0.ffn_gate{suffix}.weight": block("IQ1_S", *stack, width, width),
        f"blk.0.ffn_up{suffix}.weight": block("IQ1_M", *stack, width, width),
        f"blk.0.ffn_down{suffix}.weight": block("IQ4_XS", *stack, width, width),
        "output_norm.weight": ones,
        "output.weight": block("Q6_K", 8, width),
    }
    return {**tensors, "blk.0.ffn_gate_inp.weight": np.eye(experts, width, dtype=np.float32)} if experts else tensors


def dequantized_logits(checkpoint: GgufCheckpoint, ids: np.ndarray) -> np.ndarray:
    """Return float32 logits of a model with dequantised weights."""
    model = abstract(dict(checkpoint.config_json), "float32", "fixture")
    specs = model.specs
    stored = StoredCheckpoint(checkpoint, checkpoint.weights, frozenset(), specs)
    model = model.replace(params=load_params(stored, specs, "float32"))
    return np.asarray(model.apply(model.params, jnp.asarray(ids)))


def logits_of(path: pathlib.Path, ids: list[int]) -> np.ndarray:
    """Return float32 logits [T, V] of a model loaded through the public API."""
    model = load_model(str(path), "float32", show_progress=False)
    return np.asarray(model.apply(model.params, jnp.asarray(ids)))


def saved(folder: pathlib.Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Save a Hugging Face folder and return it."""
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer_json(config["vocab_size"]))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
