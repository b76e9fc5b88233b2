"""GGUF files: those of llama.cpp are read exactly, and weights keep exact layouts."""

import hashlib
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.quant.ggml import KINDS
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped
from jaxinfer.weights.gguf.blocks import layout_of, numbers, part_of
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from jaxinfer.weights.gguf.tensors import GgufFile
from tests.weights.files import refused
from tests.weights.gguf.files import TINY, dequantized_logits, q8_0, tiny_tensors, write_gguf

FIXTURES = ("gguf-A1-ZOO2", "gguf-B-F16", "gguf-B-Q4_1")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "model.gguf"


def opened(path: pathlib.Path, *leave_out: str, **changes: Any) -> GgufCheckpoint:
    metadata = {key: value for key, value in TINY.items() if key not in leave_out}
    return open_gguf(write_gguf(path, metadata, {**tiny_tensors(), **changes}))


# --------------------------------------------------------------------------------------------------------------
# Files of llama.cpp


def agrees(folder: pathlib.Path) -> None:
    """Check the logits of the stored weights against those of transformers with dequantised weights."""
    with np.load(folder / "expected.npz") as expected:
        ids, exact = expected["input_ids"].reshape(-1), expected["logits_dequant_f32"]
    model = load_model(str(folder / "model.gguf"), "float32", show_progress=False)
    ours = np.asarray(model.apply(model.params, jnp.asarray(ids)))
    assert np.abs(ours - exact.reshape(ours.shape)).max() <= 1e-4


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_of_the_dequantized_weights(test_data: pathlib.Path, name: str) -> None:
    agrees(test_data / "models" / "quantised" / name)


@pytest.mark.slow
def test_logits_of_all(test_data: pathlib.Path) -> None:
    folders = sorted((test_data / "models" / "quantised").glob("gguf-*"))
    assert len(folders) >= 15
    for folder in folders:
        agrees(folder)


def test_stored_weights_are_the_files_own(test_data: pathlib.Path) -> None:
    """Every layout matches the hashes of the fixture's maker, after reordering the rows of queries and keys."""
    folder = test_data / "models" / "quantised" / "gguf-A1-ZOO2"
    sums = json.loads((folder / "MADE_BY.json").read_text())["sha256_of_dequantised_f32_le_bytes"]
    weights = open_gguf(folder / "model.gguf").weights
    names = {
        "token_embd": "model.embed_tokens",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    }
    for ours, theirs in names.items():
        values = weights[f"{theirs}.weight"].dense() + np.float32(0)
        assert hashlib.sha256(values.tobytes()).hexdigest() == sums[f"{ours}.weight"]["sha256"], ours
    for stem, heads in (("q", 4), ("k", 2)):
        values = weights[f"model.layers.0.self_attn.{stem}_proj.weight"].dense() + np.float32(0)
        turned = values.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(values.shape)
        assert hashlib.sha256(turned.tobytes()).hexdigest() == sums[f"blk.0.attn_{stem}.weight"]["sha256"]


def test_what_the_metadata_says(test_data: pathlib.Path) -> None:
    checkpoint = open_gguf(test_data / "models" / "quantised" / "gguf-B-F16" / "model.gguf")
    base = json.loads((test_data / "models" / "stories260K" / "hf" / "config.json").read_text())
    told = {**checkpoint.config_json, "torch_dtype": "float32"}
    assert {name: told.get(name) for name in base} == {**base, "initializer_range": None, "use_cache": None}
    assert not checkpoint.weights


# --------------------------------------------------------------------------------------------------------------
# Layouts


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_layout_has_the_values_of_its_blocks(kind: str) -> None:
    rng = np.random.default_rng(1)
    elements, size = KINDS[kind].elements, KINDS[kind].bytes
    blocks = rng.integers(0, 256, (6, 2, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(30, 200, (6, 2))
    elif kind == "NVFP4":
        blocks[..., :4] = rng.integers(0, 128, (6, 2, 4))
    else:
        blocks = with_halves(blocks, rng)
    layout = layout_of(kind)
    parts = {name: part_of(kind, name, blocks) for name in layout.parts(2 * elements)}
    for name, form in layout.parts(2 * elements).items():
        assert parts[name].shape == (6, *form.shape)
        assert parts[name].dtype.name == form.dtype
        assert parts[name].flags.owndata or parts[name].base.flags.owndata
    values = np.asarray(layout.dequantize({name: jnp.asarray(part) for name, part in parts.items()}))
    np.testing.assert_array_equal(values + np.float32(0), numbers(kind, blocks) + np.float32(0))


def with_halves(blocks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return blocks with a small value in every two bytes that could be a float16, for any kind."""
    small = rng.integers(0, 0x30, blocks.shape, dtype=np.uint8)
    at = np.arange(blocks.shape[-1]) % 2 == 1
    return np.where(at, small, blocks)


def test_layouts_of_codes_and_scales() -> None:
    assert layout_of("Q8_0") == Grouped("int8", 32, "float16")
    assert layout_of("Q4_0") == Grouped("int4", 32, "float16")
    assert isinstance(layout_of("IQ4_NL"), Codebook)
    assert layout_of("Q4_K") == Blocks("Q4_K")


def test_scales_that_are_no_numbers(path: pathlib.Path) -> None:
    blocks = np.zeros((32, 17), np.uint8)
    blocks[3, 0] = 255
    down = ("MXFP4", (32, 32), blocks.tobytes())
    weight = opened(path, **{"blk.0.attn_output.weight": down}).weights["model.layers.0.self_attn.o_proj.weight"]
    with refused("tensor 'blk.0.attn_output.weight' of .* has scales of MXFP4 that are no numbers"):
        weight.read("scales")


# --------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_a_small_file(path: pathlib.Path) -> None:
    checkpoint = opened(path)
    assert checkpoint.config_json["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config_json["torch_dtype"] == "bfloat16"
    assert checkpoint.config_json["tie_word_embeddings"] is True
    assert len(checkpoint.tensors) + len(checkpoint.weights) == len(tiny_tensors())
    keys = checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"]
    assert (keys.dtype, keys.shape, keys.nbytes) == ("F32", (16, 32), 16 * 32 * 4)
    stored = tiny_tensors()["blk.0.attn_k.weight"]
    assert isinstance(stored, np.ndarray)
    turned = stored.reshape(2, 4, 2, 32).swapaxes(1, 2).reshape(16, 32)
    np.testing.assert_array_equal(checkpoint.read(keys.name), turned)
    values = checkpoint.read("model.layers.0.self_attn.v_proj.weight")
    assert not values.flags.writeable
    checkpoint.expect("model.layers.0.self_attn.v_proj.weight", values[4:])
    checkpoint.release("model.layers.0.self_attn.v_proj.weight")
    assert values.dtype == np.float16


@pytest.mark.parametrize(("kind", "told"), [(np.float16, "float16"), (np.float32, "float32")])
def test_the_usual_dtype(path: pathlib.Path, kind: Any, told: str) -> None:
    matrices = {name: 1 for name, tensor in tiny_tensors().items() if not name.endswith("norm.weight")}
    shapes = {name: GgufFile(write_gguf(path, TINY, tiny_tensors())).tensors[name].shape for name in matrices}
    plain = {name: np.zeros(shape, kind) for name, shape in shapes.items()}
    assert opened(path, **plain).config_json["torch_dtype"] == told


def test_alignment_and_version_2(path: pathlib.Path) -> None:
    plain = {name: opened(path).weights[name].dense() for name in opened(path).weights}
    for options in ({"alignment": 8}, {"alignment": 4096}, {"version": 2}):
        other = open_gguf(write_gguf(path, TINY, tiny_tensors(), **options)).weights
        for name, values in plain.items():
            np.testing.assert_array_equal(other[name].dense(), values)


def test_experts_are_read_one_by_one(path: pathlib.Path) -> None:
    rng = np.random.default_rng(3)
    experts = {stem: rng.standard_normal((3, *form)).astype(np.float32) for stem, form in SIZES.items()}
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if "ffn_" not in name or "norm" in name}
    tensors["blk.0.ffn_gate_inp.weight"] = rng.standard_normal((3, 32)).astype(np.float32)
    tensors |= {
        "blk.0.ffn_gate_exps.weight": q8_0(experts["gate"]),
        "blk.0.ffn_up_exps.weight": q8_0(experts["up"]),
        "blk.0.ffn_down_exps.weight": experts["down"].astype(np.float16),
    }
    metadata = {**TINY, "llama.expert_count": 3, "llama.expert_used_count": 2}
    checkpoint = open_gguf(write_gguf(path, metadata, tensors))
    prefix = "model.layers.0.block_sparse_moe"
    assert checkpoint.config_json["architectures"] == ["MixtralForCausalLM"]
    for index in range(3):
        gate = checkpoint.weights[f"{prefix}.experts.{index}.w1.weight"]
        assert gate.shape == (64, 32)
        assert gate.nbytes == 64 * 34
        np.testing.assert_allclose(gate.dense(), experts["gate"][index], atol=0.02)
        down = checkpoint.read(f"{prefix}.experts.{index}.w2.weight")
        np.testing.assert_array_equal(down, experts["down"][index].astype(np.float16))
        checkpoint.expect(f"{prefix}.experts.{index}.w2.weight", down)
        checkpoint.release(f"{prefix}.experts.{index}.w2.weight")


SIZES = {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}


def test_experts_of_the_first_converters(path: pathlib.Path) -> None:
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if "ffn_" not in name or "norm" in name}
    tensors["blk.0.ffn_gate_inp.weight"] = np.zeros((2, 32), np.float32)
    for stem, shape in SIZES.items():
        tensors |= {f"blk.0.ffn_{stem}.{index}.weight": np.full(shape, index, np.float16) for index in range(2)}
    metadata = {**TINY, "llama.expert_count": 2, "llama.expert_used_count": 1}
    checkpoint = open_gguf(write_gguf(path, metadata, tensors))
    assert checkpoint.read("model.layers.0.block_sparse_moe.experts.1.w3.weight").max() == 1


def test_norms_and_vectors_in_blocks_are_numbers(path: pathlib.Path) -> None:
    norm = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    checkpoint = opened(path, **{"output_norm.weight": q8_0(norm)})
    assert checkpoint.tensors["model.norm.weight"].dtype == "F32"
    np.testing.assert_allclose(checkpoint.read("model.norm.weight"), norm, atol=0.01)


def test_latents_in_blocks(path: pathlib.Path) -> None:
    """Keys are stored transposed: blocks along one dimension are read as a matrix along the other."""
    metadata = {key.replace("llama.", "deepseek2."): value for key, value in TINY.items()}
    latent = {
        "attention.kv_lora_rank": 64,
        "attention.key_length": 96,
        "attention.value_length": 64,
        "attention.key_length_mla": 64,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 32,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
    }
    rng = np.random.default_rng(4)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 64, 32), (4, 32, 64)))
    tensors = {"blk.0.attn_k_b.weight": q8_0(keys), "blk.0.attn_v_b.weight": q8_0(values)}
    whole = {**metadata, **{f"deepseek2.{key}": value for key, value in latent.items()}}
    whole["general.architecture"] = "deepseek2"
    checkpoint = open_gguf(write_gguf(path, whole, {**tiny_tensors(), **tensors}))
    joined = checkpoint.read("model.layers.0.self_attn.kv_b_proj.weight").reshape(4, 64, 64)
    assert checkpoint.tensors["model.layers.0.self_attn.kv_b_proj.weight"].shape == (256, 64)
    np.testing.assert_allclose(joined[:, :32], keys.swapaxes(1, 2), atol=0.02)
    np.testing.assert_allclose(joined[:, 32:], values, atol=0.02)
    checkpoint.release("model.layers.0.self_attn.kv_b_proj.weight")


def test_a_model_in_several_files(tmp_path: pathlib.Path) -> None:
    tensors = list(tiny_tensors().items())
    paths = [tmp_path / f"tiny-{index:05d}-of-00002.gguf" for index in (1, 2)]
    write_gguf(paths[0], {**TINY, "split.count": 2, "split.no": 0}, dict(tensors[:5]))
    write_gguf(paths[1], {"split.count": 2, "split.no": 1}, dict(tensors[5:]))
    whole, parts = opened(tmp_path / "whole.gguf"), open_gguf(paths[0])
    assert parts.tensors.keys() == whole.tensors.keys()
    assert parts.config_json == whole.config_json
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(parts.weights[name].dense(), weight.dense())
    with refused("one of 2 files: pass the first, whose name ends in -00001-of-00002.gguf"):
        open_gguf(paths[1])
    write_gguf(paths[1], {"split.count": 2}, dict(tensors[4:]))
    with refused(r"holds tensor 'blk.0.attn_v.weight', which .* holds, too"):
        open_gguf(paths[0])
    paths[1].unlink()
    with refused("00002-of-00002.gguf does not exist"):
        open_gguf(paths[0])


def test_two_names_for_one(path: pathlib.Path) -> None:
    experts = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 64, 32), np.float32)}
    metadata = {**TINY, "llama.expert_count": 2, "llama.expert_used_count": 1}
    tensors = {**tiny_tensors(), **experts, "blk.0.ffn_gate.1.weight": np.zeros((64, 32), np.float32)}
    with refused("holds 'model.layers.0.block_sparse_moe.experts.1.w1.weight' twice"):
        open_gguf(write_gguf(path, metadata, tensors))


def test_a_tensor_of_no_use_is_told(path: pathlib.Path) -> None:
    checkpoint = opened(path, **{"blk.0.attn_q.scale": np.ones(1, np.float32)})
    assert "blk.0.attn_q.scale" in checkpoint.tensors
    with refused("no place for: 'blk.0.attn_q.scale'"):
        dequantized_logits(checkpoint, np.arange(3))


def test_what_is_no_file(tmp_path: pathlib.Path) -> None:
    with refused("does not exist or is not a file"):
        open_gguf(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with refused("is empty"):
        open_gguf(tmp_path / "empty.gguf")


def test_bfloat16(path: pathlib.Path) -> None:
    values = np.arange(32, dtype=np.float32).astype(ml_dtypes.bfloat16)
    checkpoint = opened(path, **{"output_norm.weight": ("BF16", (32,), values.tobytes())})
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), values)
