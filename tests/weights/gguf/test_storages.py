"""Each architecture with weights in blocks computes the same as with dequantised weights."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.models.model import Model
from jaxinfer.models.registry import family_for
from jaxinfer.quant.layouts import Blocks
from jaxinfer.types import ParamSpec, map_specs
from jaxinfer.weights.gguf.checkpoint import open_gguf
from tests.weights.gguf.convert import converted
from tests.weights.gguf.files import (
    MIXED,
    MIXED_TINY,
    TINY,
    dequantized_logits,
    mixed_tensors,
    q8_0,
    random_blocks,
    write_gguf,
)

TOKENIZER = {key: value for key, value in TINY.items() if key.startswith("tokenizer.")}
VOCABULARY = 64

# All sizes are whole blocks.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 2,
    "topk_group": 1,
}
WINDOWED = {"query_pre_attn_scalar": 32, "sliding_window": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {**WINDOWED, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3_text": ("Gemma3ForCausalLM", WINDOWED),
    "phi3": ("Phi3ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "n_inner": 96}),
    "falcon": ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**EXPERTS, **LATENTS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**EXPERTS, **LATENTS, "norm_topk_prob": True}),
}
FAST = ("mixtral", "gpt2")


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random tensors under the names that the family reads."""
    family, rng = family_for(config), np.random.default_rng(5)
    made: dict[str, np.ndarray] = {}

    def add(path: tuple[str, ...], spec: ParamSpec) -> None:
        del path
        for source in spec.sources:
            if source.name not in made:
                made[source.name] = rng.standard_normal(source.shape).astype(np.float32) / 8

    map_specs(add, family.param_specs(family.config(config)))
    return made


def in_blocks(name: str, tensor: np.ndarray) -> Any:
    plain = tensor.ndim < 2 or tensor.shape[-1] % 32 or "ffn_gate_inp" in name or name.startswith("position")
    return np.ascontiguousarray(tensor, np.float32) if plain else q8_0(tensor)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]
)
def test_storages_compute_as_numbers_do(tmp_path: pathlib.Path, kind: str) -> None:
    architecture, own = MODELS[kind]
    config = {**COMMON, **own, "architectures": [architecture], "model_type": kind}
    if kind in ("gpt2", "falcon"):
        config = {name: value for name, value in config.items() if name != "head_dim"}
    metadata, tensors = converted(config, tensors_of(config), 1e-5)
    blocks = {name: in_blocks(name, tensor) for name, tensor in tensors.items()}
    path = write_gguf(tmp_path / "model.gguf", {**metadata, **TOKENIZER}, blocks)
    ids = np.random.default_rng(6).integers(0, VOCABULARY, 24)
    checkpoint = open_gguf(path)
    assert len(checkpoint.weights) >= 8
    expected = dequantized_logits(checkpoint, ids)
    model = load_model(str(path), "float32", show_progress=False)
    ours = np.asarray(model.apply(model.params, jnp.asarray(ids)))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


# --------------------------------------------------------------------------------------------------------------
# Files of few bits a weight, which mix many kinds of blocks


def all_of(kind: str) -> dict[str, Any]:
    """Return the tensors of `MIXED_TINY`, every matrix in blocks of one kind."""
    rng = np.random.default_rng(8)
    return {
        name: random_blocks(kind, tensor[1], rng) if isinstance(tensor, tuple) else tensor
        for name, tensor in mixed_tensors().items()
    }


def computes_as_numbers_do(path: pathlib.Path) -> Model:
    ids = np.random.default_rng(6).integers(0, 8, 24)
    expected = dequantized_logits(open_gguf(path), ids)
    model = load_model(str(path), "float32", show_progress=False)
    ours = np.asarray(jax.jit(model.apply)(model.params, jnp.asarray(ids)))
    assert 0.1 < np.abs(expected).max() < 1e3
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())
    return model


@pytest.mark.parametrize("experts", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_file_of_many_kinds(tmp_path: pathlib.Path, experts: int) -> None:
    """Embedding tables, fused weights with slices of different kinds, and stacked experts."""
    counts = {"llama.expert_count": experts, "llama.expert_used_count": 2} if experts else {}
    tensors = mixed_tensors(experts)
    path = write_gguf(tmp_path / "model.gguf", {**MIXED_TINY, **counts}, tensors)
    stored = open_gguf(path).weights.values()
    kinds = {tensor[0] for tensor in tensors.values() if isinstance(tensor, tuple)}
    assert {weight.layout for weight in stored} == {Blocks(kind) for kind in kinds}
    model = computes_as_numbers_do(path)
    in_blocks = sum(len(tensor[2]) for tensor in tensors.values() if isinstance(tensor, tuple))
    held = [array.nbytes for array in jax.tree.leaves(model.params) if array.dtype == jnp.uint8]
    assert sum(held) == in_blocks  # and takes no more bytes in memory


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
def test_a_file_of_one_kind(tmp_path: pathlib.Path, kind: str) -> None:
    computes_as_numbers_do(write_gguf(tmp_path / "model.gguf", MIXED_TINY, all_of(kind)))
