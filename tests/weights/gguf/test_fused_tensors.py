"""Experts whose gate and up are one tensor in a checkpoint and two in a GGUF file: dense, and in blocks."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.weights.gguf.checkpoint import open_gguf
from jaxinfer.weights.gguf.fused_tensors import Latest
from tests.weights.files import refused
from tests.weights.formats.checkpoints import weights_of
from tests.weights.gguf.files import TINY, dequantized_logits, q8_0, write_gguf

TOKENIZER = {key: value for key, value in TINY.items() if key.startswith("tokenizer.")}
VOCABULARY, WIDTH, SIZE, EXPERTS = 64, 64, 96, 3

METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": SIZE,
    "expert_feed_forward_length": SIZE,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": EXPERTS,
    "expert_used_count": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "gpt-oss": {"attention.sliding_window": 16, "expert_used_count": 2},
    "llama4": {"interleave_moe_layer_step": 2},
}
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32) / 8


def metadata(arch: str) -> dict[str, Any]:
    own = {f"{arch}.{key}": value for key, value in (METADATA | OWN[arch]).items()}
    return {"general.architecture": arch, **own, **TOKENIZER}


def layer(arch: str, index: int) -> dict[str, np.ndarray]:
    tensors = {f"attn_{part}.weight": normal(WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
    stacks = {"gate": (SIZE, WIDTH), "up": (SIZE, WIDTH), "down": (WIDTH, SIZE)}
    tensors |= {f"ffn_{part}_exps.weight": normal(EXPERTS, *shape) for part, shape in stacks.items()}
    tensors |= {"attn_norm.weight": np.ones(WIDTH, np.float32), "ffn_gate_inp.weight": 8 * normal(EXPERTS, WIDTH)}
    if arch == "gpt-oss":
        tensors |= {f"ffn_{part}_exps.bias": normal(EXPERTS, shape[0]) for part, shape in stacks.items()}
        tensors |= {"attn_sinks.weight": normal(2), "ffn_gate_inp.bias": normal(EXPERTS)}
        return tensors | {"post_attention_norm.weight": np.ones(WIDTH, np.float32)}
    tensors["ffn_norm.weight"] = np.ones(WIDTH, np.float32)
    if index % 2 == 0:
        kept = {name: tensor for name, tensor in tensors.items() if "_exps" not in name and "_inp" not in name}
        return kept | {f"ffn_{part}.weight": normal(*shape) for part, shape in stacks.items()}
    return tensors | {f"ffn_{part}_shexp.weight": normal(*shape) for part, shape in stacks.items()}


def tensors_of(arch: str) -> dict[str, np.ndarray]:
    whole = {"token_embd.weight": normal(VOCABULARY, WIDTH), "output.weight": normal(VOCABULARY, WIDTH)}
    whole["output_norm.weight"] = np.ones(WIDTH, np.float32)
    layers = ((f"blk.{index}.{name}", tensor) for index in range(2) for name, tensor in layer(arch, index).items())
    return {**whole, **dict(layers)}


def in_blocks(name: str, tensor: np.ndarray) -> Any:
    return tensor if tensor.ndim < 2 or "ffn_gate_inp" in name or name.endswith(".bias") else q8_0(tensor)


@pytest.mark.parametrize("arch", OWN)
def test_storages_compute_as_numbers_do(tmp_path: pathlib.Path, arch: str) -> None:
    blocks = {name: in_blocks(name, tensor) for name, tensor in tensors_of(arch).items()}
    path = write_gguf(tmp_path / "model.gguf", metadata(arch), blocks)
    checkpoint = open_gguf(path)
    stacks = [weight for name, weight in checkpoint.weights.items() if ".experts." in name]
    assert {len(weight.shape) for weight in stacks} == {3}
    ids = np.random.default_rng(6).integers(0, VOCABULARY, 24)
    expected = dequantized_logits(checkpoint, ids)
    model = load_model(str(path), "float32", show_progress=False)
    ours = np.asarray(model.apply(model.params, jnp.asarray(ids)))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


def test_parts_of_two_kinds_are_numbers(tmp_path: pathlib.Path) -> None:
    tensors = tensors_of("gpt-oss")
    gate, up = (tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    blocks = {**tensors, "blk.1.ffn_gate_exps.weight": q8_0(gate)}
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata("gpt-oss"), blocks))
    assert not checkpoint.weights
    found = checkpoint.read("model.layers.1.mlp.experts.gate_up_proj")
    assert checkpoint.tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == found.shape
    np.testing.assert_array_equal(found[..., 1::2], up.swapaxes(1, 2))
    np.testing.assert_allclose(found[..., ::2], gate.swapaxes(1, 2), atol=0.01)


def mxfp4(codes: np.ndarray, scales: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Return blocks of codes [*out, in] and exponents [*out, in / 32]; low nibbles have the first half of a block."""
    groups = codes.reshape(*scales.shape, 2, 16)
    nibbles = groups[..., 0, :] | groups[..., 1, :] << 4
    return "MXFP4", codes.shape, np.concatenate([scales[..., None], nibbles], axis=-1).astype(np.uint8).tobytes()


def test_gpt_oss_as_it_was_published(tmp_path: pathlib.Path) -> None:
    """Codes and scales equal those of the published folder, which pairs adjacent nibbles and alternates gate and up."""
    codes = RNG.integers(0, 16, (EXPERTS, 2 * SIZE, WIDTH), np.uint8)
    scales = RNG.integers(100, 140, (EXPERTS, 2 * SIZE, WIDTH // 32), np.uint8)
    pairs = codes.reshape(EXPERTS, 2 * SIZE, WIDTH // 32, 16, 2)
    published = {"x_blocks": pairs[..., 0] | pairs[..., 1] << 4, "x_scales": scales}
    expected = weights_of(tmp_path, published, {"quant_method": "mxfp4"})[0]["x"]
    tensors: dict[str, Any] = tensors_of("gpt-oss")
    for index, part in enumerate(("gate", "up")):
        tensors[f"blk.0.ffn_{part}_exps.weight"] = mxfp4(codes[:, index::2], scales[:, index::2])
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata("gpt-oss"), tensors))
    ours = checkpoint.weights["model.layers.0.mlp.experts.gate_up_proj"]
    assert (ours.shape, ours.layout) == (expected.shape, expected.layout)
    for part in ours.parts:
        np.testing.assert_array_equal(ours.read(part), expected.read(part), err_msg=part)


@pytest.mark.parametrize("arch", OWN)
def test_a_part_that_is_missing(tmp_path: pathlib.Path, arch: str) -> None:
    tensors = tensors_of(arch)
    del tensors["blk.1.ffn_up_exps.weight"]
    path = write_gguf(tmp_path / "model.gguf", metadata(arch), tensors)
    with refused("lacks a tensor .*experts.gate_up_proj"):
        load_model(str(path), "float32", show_progress=False)


def test_parts_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    tensors = {**tensors_of("gpt-oss"), "blk.1.ffn_up_exps.weight": normal(EXPERTS, SIZE, 32)}
    with refused("has tensors blk.1.ffn_gate_exps.weight, blk.1.ffn_up_exps.weight of shapes that do not fit"):
        open_gguf(write_gguf(tmp_path / "model.gguf", metadata("gpt-oss"), tensors))


def test_scales_that_are_no_numbers(tmp_path: pathlib.Path) -> None:
    codes, scales = np.zeros((EXPERTS, WIDTH, SIZE), np.uint8), np.full((EXPERTS, WIDTH, SIZE // 32), 255, np.uint8)
    tensors = {**tensors_of("gpt-oss"), "blk.0.ffn_down_exps.weight": mxfp4(codes, scales)}
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata("gpt-oss"), tensors))
    with refused("'blk.0.ffn_down_exps.weight' of .* has scales of MXFP4 that are no numbers"):
        checkpoint.weights["model.layers.0.mlp.experts.down_proj"].read("scales")


def test_the_latest_is_kept() -> None:
    latest, made = Latest(), []

    def get(name: str) -> np.ndarray:
        return latest.get(name, lambda: made.append(name) or np.full(1, len(made)))

    assert [int(get(name)[0]) for name in ("a", "a", "b", "b", "a")] == [1, 1, 2, 2, 3]
    assert made == ["a", "b", "a"]
