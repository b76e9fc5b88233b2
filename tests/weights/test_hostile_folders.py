"""Malformed model folders: each is loaded or rejected with one sentence, in little memory and time."""

import copy
import json
import math
import pathlib
import random
import resource
import shutil
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import abstract, describe
from jaxinfer.models.registry import family_for
from jaxinfer.weights import CheckpointError, load_params
from jaxinfer.weights.load import auto_dtype
from jaxinfer.weights.open import open_model_files
from tests.weights.formats.checkpoints import save

FAST, SLOW = 250, 10_000
D, VOCAB, HEADS, KV_HEADS = 64, 32, 4, 2
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
MODULES = {
    **{f"self_attn.{name}_proj": (D, D) for name in ("q", "o")},
    **{f"self_attn.{name}_proj": (D * KV_HEADS // HEADS, D) for name in ("k", "v")},
    **{f"mlp.{name}_proj": (D, D) for name in ("gate", "up", "down")},
}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "auto_round": {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32}, "visual": {"bits": 16}},
    },
    "dynamic": {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": 64,
        "sym": False,
        "dynamic": {r"-:.*visual\..*": {}, r"+:.*layers\..*proj": {"bits": 4, "group_size": 32, "sym": False}},
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
        "ignore": ["lm_head"],
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "mlx": {"quant_method": "mlx", "group_size": 32, "bits": 4, "mode": "affine", "lm_head": {"bits": 8}},
}
NUMBERS = [0, -1, 1, 2, 3, 7, 64, 2**31, 2**32 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e-300, 1e308, math.inf]
ODD = [math.nan, True, False, None, "", "a", "x" * 5000, [], {}, [1], {"a": 1}, ["a"] * 50, [[[]]], "\x1b[2J"]


def module(kind: str, name: str, out: int, inputs: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the tensors of a linear layer."""
    words, groups = rng.integers(-(2**31), 2**31, (out * inputs // 8,), np.int32), inputs // 32
    scales = rng.random((groups, out), np.float32).astype(np.float16)
    match kind:
        case "gptq" | "auto_round" | "dynamic":
            zeros = rng.integers(0, 2**31, (groups, out // 8), np.int32)
            order = rng.permutation(np.arange(inputs, dtype=np.int32) // 32)
            parts = {"qweight": words.reshape(-1, out), "qzeros": zeros, "scales": scales, "g_idx": order}
        case "awq":
            zeros = rng.integers(0, 2**31, (groups, out // 8), np.int32)
            parts = {"qweight": words.reshape(inputs, -1), "qzeros": zeros, "scales": scales}
        case "packed":
            shape = np.asarray([out, inputs], np.int64)
            parts = {"weight_packed": words.reshape(out, -1), "weight_scale": scales.T, "weight_shape": shape}
        case "fp8":
            weight = rng.standard_normal((out, inputs)).astype(ml_dtypes.float8_e4m3fn)
            parts = {"weight": weight, "weight_scale_inv": np.ones((out // 32, inputs // 32), np.float32)}
        case "fbgemm":
            weight = rng.standard_normal((out, inputs)).astype(ml_dtypes.float8_e4m3fn)
            parts = {"weight": weight, "weight_scale": np.ones((out, 1), np.float32)}
        case "mlx":
            parts = {"weight": words.reshape(out, -1).view(np.uint32), "scales": scales.T, "biases": scales.T}
        case "int8":
            weight = rng.integers(-127, 128, (out, inputs)).astype(np.int8)
            parts = {"weight": weight, "SCB": np.ones(out, np.float32)}
        case _:
            parts = {"weight": rng.standard_normal((out, inputs)).astype(np.float32)}
    return {f"{name}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}


def write_model(folder: pathlib.Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    ones = np.ones(D, np.float32)
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, D)).astype(np.float32),
        "model.norm.weight": ones,
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        for name, shape in MODULES.items():
            tensors |= module(kind, f"{prefix}.{name}", *shape, rng)
    folder.mkdir()
    save(folder, tensors)
    named = {"quantization" if kind == "mlx" else "quantization_config": FORMATS[kind]} if FORMATS[kind] else {}
    if kind == "awq":
        (folder / "quant_config.json").write_text(json.dumps(FORMATS[kind]))
        named = {}
    (folder / "config.json").write_text(json.dumps({**LLAMA, **named}))
    if kind == "plain":
        index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(folder: pathlib.Path) -> Mapping[str, Any]:
    """Load as `jaxinfer.load_model` does, but keep values on the host."""
    files = open_model_files(folder)
    dtype = auto_dtype(files.config_json, files.tensors)
    family = family_for(files.config_json)
    config = family.config(files.config_json)
    specs = files.stored(files.named(family.param_specs(config), family.prefix), dtype)
    describe(family, files.config_json, dtype)
    return load_params(files.checkpoint(specs), specs, dtype, lambda path, spec, fill: fill(()), ignore=("lm_head.*",))


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("hostile") / request.param
    write_model(made, request.param)
    return made


def test_the_folders_are_good_ones(folder: pathlib.Path):
    assert len(load(folder)["layers_1"]) == 4


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def mutated_json(text: str, rng: random.Random) -> str:
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        path = rng.choice(places(value))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        match rng.randrange(5):
            case 0:
                del parent[path[-1]]
            case 1 if isinstance(parent, dict):
                name = rng.choice([str(path[-1]) + "x", "", "weight", *map(str, parent)])
                parent[name] = copy.deepcopy(parent[path[-1]])
            case 2 if isinstance(parent[path[-1]], int):
                parent[path[-1]] += rng.choice([-64, -1, 1, 64])
            case _:
                parent[path[-1]] = copy.deepcopy(rng.choice([*NUMBERS, *ODD]))
    return json.dumps(value)


def mutated_bytes(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(3):
            case 0:
                data[at : at + rng.randrange(1, 9)] = b""
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                data[at : at + 1] = rng.randbytes(1)
    return bytes(data)


def mutated_tensors(raw: bytes, rng: random.Random) -> bytes:
    """Mutate the header as JSON, or its raw bytes."""
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    if rng.random() < 0.7:
        changed = mutated_json(header.decode(), rng).encode()
        return len(changed).to_bytes(8, "little") + changed + data
    return mutated_bytes(raw[: 8 + length], rng) + data


def mutate(folder: pathlib.Path, rng: random.Random) -> tuple[pathlib.Path, bytes]:
    """Return a file and its mutated content."""
    file = rng.choice(sorted(folder.iterdir()))
    raw = file.read_bytes()
    if file.suffix == ".safetensors":
        return file, mutated_tensors(raw, rng)
    return file, mutated_json(raw.decode(), rng).encode() if rng.random() < 0.8 else mutated_bytes(raw, rng)


def attempt(folder: pathlib.Path) -> bool:
    """Return whether it was loaded; else it was rejected with one sentence."""
    begin = time.monotonic()
    try:
        load(folder)
        return True
    except (CheckpointError, ConfigError) as error:
        said = str(error)
    finally:
        assert time.monotonic() - begin < 30
    assert 0 < len(said) < 3000, said
    assert said.isprintable(), said
    return False


@pytest.mark.parametrize("count", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_mutated_folders_load_or_are_refused(folder: pathlib.Path, tmp_path: pathlib.Path, count: int, seed: int):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    attempt(spoilt)
    begin, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for number in range(seed, seed + count // len(FORMATS)):
        file, content = mutate(folder, random.Random(number))
        (spoilt / file.name).write_bytes(content)
        try:
            loaded += attempt(spoilt)
        except Exception as error:
            error.add_note(f"--seed {number}, {file.name}: {content[:4000]!r}")
            raise
        (spoilt / file.name).write_bytes(file.read_bytes())
    assert 0 < loaded < count // len(FORMATS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin < 300_000  # KiB


def test_files_cut_short_at_every_power_of_two(folder: pathlib.Path, tmp_path: pathlib.Path):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        for size in (0, *(2**power for power in range(len(raw).bit_length()))):
            (spoilt / file.name).write_bytes(raw[:size])
            assert not attempt(spoilt) or size == len(raw), (file.name, size)
        (spoilt / file.name).write_bytes(raw)


def test_what_config_json_says_costs_nothing_before_it_is_checked():
    """A layer count beyond any checkpoint would build a tree with that many parameters."""
    with pytest.raises(ConfigError, match="num_hidden_layers = 2147483647 must be at most 1024"):
        abstract({**LLAMA, "num_hidden_layers": 2**31 - 1}, "float32")
