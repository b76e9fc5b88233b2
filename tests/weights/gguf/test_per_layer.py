"""Gemma 3n and Gemma 4 as GGUF there and back, and what files cannot say."""

import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.registry import family_for
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from jaxinfer.weights.gguf.per_layer import PER_LAYER
from tests.weights.files import refused
from tests.weights.gguf.files import Blocks, q8_0, write_gguf
from tests.weights.gguf.gemma_files import converted
from tools.oracle.golden import Golden, load

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "models"
_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "num_kv_shared_layers": 0, "rope_parameters": _ROPES}
_NEAR, _WHOLE = "sliding_attention", "full_attention"
# What the converter asks of a config.json, where that leaves it open.
CASES: dict[str, dict[str, Any]] = {
    "gemma4_text-effective-hub": {},
    "gemma4_text-embedded-untied": {"global_head_dim": 16},
    "gemma4_text-experts": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "gemma4_text-pattern-hub": {
        "layer_types": [*5 * (_NEAR,), _WHOLE, _WHOLE],
        "rope_parameters": {**_ROPES, "full_attention": {**_ROPES["full_attention"], "partial_rotary_factor": 0.2}},
    },
    "gemma3n_text-hub": {},
    "gemma3n_text-default-pattern-hub": {
        "layer_types": [*4 * (_NEAR,), _WHOLE, _NEAR, _NEAR],
        "activation_sparsity_pattern": [0.0] * 7,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "altup_active_idx": 0,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
    },
}
_TABLE = "model.embed_tokens_per_layer.weight"


def filed(name: str) -> tuple[Golden, dict[str, Any], dict[str, np.ndarray]]:
    case = load(GOLDENS / name)
    return case, *converted(_DEFAULTS | case.config | CASES[name], case.tensors())


def written(path: pathlib.Path, name: str, without: str = "", **changes: Any) -> tuple[Golden, GgufCheckpoint]:
    case, metadata, tensors = filed(name)
    arch = metadata["general.architecture"]
    metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if key != f"{arch}.{without}"}
    return case, open_gguf(write_gguf(path / "model.gguf", kept, tensors))


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path: pathlib.Path, name: str) -> None:
    """But for rows of padding, which files of Gemma 3n have behind the embeddings of each layer."""
    case, checkpoint = written(tmp_path, name)
    told, family = dict(checkpoint.config_json), family_for(case.config)
    assert family_for(told) is family
    padded = {"vocab_size_per_layer_input": told.get("vocab_size_per_layer_input", 262_144)}
    assert family.config(told) == family.config({**case.config, **CASES[name], **padded})
    expected = case.tensors()
    assert checkpoint.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        found = checkpoint.read(key)
        assert found.shape == tensor.shape or key == _TABLE, key
        np.testing.assert_array_equal(found[: len(tensor)], tensor, err_msg=key)
        assert not found[len(tensor) :].any()


def test_every_architecture_has_a_case() -> None:
    assert {filed(name)[1]["general.architecture"] for name in CASES} == PER_LAYER.keys()


def test_what_no_product_reads_is_made_plain(tmp_path: pathlib.Path) -> None:
    case, metadata, tensors = filed("gemma3n_text-default-pattern-hub")
    wide = {"altup_router", "per_layer_token_embd", "attn_q"}
    files: dict[str, np.ndarray | Blocks] = {}
    for key, tensor in tensors.items():
        stem = key.removesuffix(".weight").rpartition(".")[2]
        files[key] = q8_0(tensor) if stem in wide and tensor.shape[-1] % 32 == 0 else tensor
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata, files))
    assert {key.rpartition(".self_attn.")[2] for key in checkpoint.weights} == {"q_proj.weight"}
    for key in ("model.layers.1.altup.modality_router.weight", "model.layers.1.self_attn.q_proj.weight"):
        found = checkpoint.read(key) if key in checkpoint.tensors else checkpoint.weights[key].dense()
        assert np.abs(found - case.tensors()[key]).max() < np.abs(found).max() / 120


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4_text-experts", {"attention.key_length": 16}, "has not 8 numbers in rope_freqs.weight"),
        ("gemma4_text-experts", {"rope.dimension_count_swa": 8}, "'8' as gemma4.rope.dimension_count_swa"),
        ("gemma4_text-experts", {"attention.sliding_window_pattern": 2}, "'2' as gemma4.attention.sliding_window_pat"),
        ("gemma4_text-experts", {"attention.key_length": 24}, "'24' as gemma4.attention.key_length"),
        ("gemma4_text-effective-hub", {"feed_forward_length": [40]}, "a list as gemma4.feed_forward_length"),
        ("gemma3n_text-hub", {"activation_sparsity_scale": 0.5}, "'0.5' as gemma3n.activation_sparsity_scale"),
    ],
)
def test_what_is_not_supported(tmp_path: pathlib.Path, name: str, changes: dict[str, Any], message: str) -> None:
    with refused(message):
        written(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gemma4_text-experts", "attention.key_length_swa"),
        ("gemma4_text-experts", "expert_used_count"),
        ("gemma4_text-experts", "attention.shared_kv_layers"),
        ("gemma3n_text-hub", "altup.num_inputs"),
        ("gemma3n_text-hub", "activation_sparsity_scale"),
    ],
)
def test_what_is_not_given(tmp_path: pathlib.Path, name: str, key: str) -> None:
    with refused(f"lacks the metadata .*{key}"):
        written(tmp_path, name, without=key)


def test_frequencies_that_turn_behind_those_that_do_not(tmp_path: pathlib.Path) -> None:
    _, metadata, tensors = filed("gemma4_text-experts")
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"][::-1].copy()
    with refused("rope_freqs.weight that are 1 behind others"):
        open_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors))
