"""Each architecture as GGUF and back: files as llama.cpp's converter writes them give the same config and tensors.

The checkpoints are those of the oracle's golden files; a case that a GGUF file cannot express is not listed.
"""

import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.registry import family_for
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.gguf.architectures import ARCHITECTURES
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from tests.weights.files import refused
from tests.weights.gguf.convert import converted
from tests.weights.gguf.files import write_gguf
from tools.oracle.golden import Golden, load

# Changes to config.json that a file needs to express it: see `_score_size`.
CASES: dict[str, dict[str, Any]] = {
    "llama-head80": {},
    "llama-biases": {},
    "llama-mlp-bias": {},
    "llama-tiny-hub": {},
    "llama-rope-linear-hub": {},
    "llama-rope-yarn": {},
    "mistral-window": {},
    "mixtral-two-of-eight": {},
    "qwen2-tied-hub": {},
    "qwen2-rope-yarn-hub": {},
    "qwen3-head-dim": {},
    "qwen3-attention-bias": {},
    "qwen2_moe-dense-layers": {},
    "qwen2_moe-without-bias": {},
    "qwen3_moe-hub": {},
    "gemma-mqa": {},
    "gemma2-window": {"query_pre_attn_scalar": 16},
    "gemma3_text-six-layers": {"query_pre_attn_scalar": 16},
    "gemma3_text-logit-cap": {"query_pre_attn_scalar": 16},
    "phi3-longrope-partial": {},
    "phi3-window-hub": {},
    "gpt2-untied-inner": {},
    "falcon-7b-hub": {},
    "falcon-40b-hub": {},
    "falcon-11b": {},
    "deepseek_v2-lite-hub": {},
    "deepseek_v2-group-limited": {},
    "deepseek_v3-groups": {},
}


def golden(repo: pathlib.Path, name: str) -> Golden:
    return load(repo / "tests" / "goldens" / "models" / name)


def reopened(
    case: Golden, config: dict[str, Any], path: pathlib.Path, without: str = "", split: bool = False, **changes: Any
) -> GgufCheckpoint:
    eps = family_for(config).config(config).norm_eps
    metadata, tensors = converted(config, case.tensors(), eps, split)
    kept = {key: value for key, value in metadata.items() if not (without and key.endswith(without))}
    arch = metadata["general.architecture"]
    return open_gguf(write_gguf(path, {**kept, **{f"{arch}.{key}": value for key, value in changes.items()}}, tensors))


def check(case: Golden, config: dict[str, Any], checkpoint: GgufCheckpoint) -> None:
    family, told = family_for(config), dict(checkpoint.config_json)
    assert family_for(told) is family
    assert family.config(told) == family.config(config)
    expected = case.tensors()
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert checkpoint.tensors[name].shape == tensor.shape, name
        # adding and subtracting one rounds a norm twice
        slack = 2e-7 if "gemma" in config["model_type"] and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(checkpoint.read(name), tensor, rtol=0, atol=slack, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(repo: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    case = golden(repo, name)
    config = {**case.config, **CASES[name]}
    check(case, config, reopened(case, config, tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["deepseek_v2-lite-hub", "deepseek_v3-groups"])
def test_latents_in_two_parts(repo: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    case = golden(repo, name)
    check(case, dict(case.config), reopened(case, dict(case.config), tmp_path / "model.gguf", split=True))


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 64)])
def test_factors_of_llama3(repo: pathlib.Path, tmp_path: pathlib.Path, factor: float, original: int) -> None:
    """Factors of published models are recognised as Llama 3's; other factors are read as they are."""
    case = golden(repo, "llama-rope-llama3-hub")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = {**case.config, "rope_scaling": scaling, "rope_theta": 500000.0}
    told = dict(reopened(case, config, tmp_path / "model.gguf").config_json)
    ours, theirs = (family_for(one).config(one) for one in (told, config))
    assert (ours.rope == theirs.rope) == (original == 8192)
    frequencies = [one.rope.up_to(256).inverse_frequencies(one.head_dim) for one in (ours, theirs)]
    np.testing.assert_allclose(*frequencies, rtol=3e-7)
    assert ours.rope.attention_factor == 1.0


def test_gemma_by_its_layers(repo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """No key gives the scale of attention scores."""
    case = golden(repo, "gemma3_text-six-layers")
    windows = [index % 3 != 2 for index in range(case.config["num_hidden_layers"])]
    checkpoint = reopened(
        case, dict(case.config), tmp_path / "model.gguf", **{"attention.sliding_window_pattern": windows}
    )
    assert checkpoint.config_json["query_pre_attn_scalar"] == case.config["head_dim"]
    full = [kind == "full_attention" for kind in checkpoint.config_json["layer_types"]]
    assert full == [not window for window in windows]


@pytest.mark.parametrize(
    ("name", "without", "message"),
    [
        ("llama-tiny-hub", ".block_count", "lacks the metadata llama.block_count"),
        ("llama-tiny-hub", ".head_count", "lacks the metadata llama.attention.head_count"),
        ("mixtral-two-of-eight", ".expert_used_count", "lacks the metadata llama.expert_used_count"),
        ("gemma2-window", ".sliding_window", "lacks the metadata gemma2.attention.sliding_window"),
        ("deepseek_v3-groups", ".expert_group_count", "lacks the metadata deepseek2.expert_group_count"),
        ("llama-tiny-hub", "general.architecture", "its metadata lacks general.architecture"),
    ],
)
def test_what_is_not_given(repo: pathlib.Path, tmp_path: pathlib.Path, name: str, without: str, message: str) -> None:
    case = golden(repo, name)
    with refused(message):
        reopened(case, dict(case.config), tmp_path / "model.gguf", without)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "sideways"}, "'sideways' as llama.rope.scaling.type"),
        ({"attention.value_length": 7}, "'7' as llama.attention.value_length"),
        ({"block_count": 1 << 30}, "as llama.block_count, which is not supported"),
        ({"attention.head_count": 1 << 30}, "as llama.attention.head_count"),
        ({"attention.head_count": 5}, "llama.attention.head_count"),
        ({"expert_count": 1 << 30}, "as llama.expert_count"),
        ({"attention.head_count_kv": [2, 4]}, "a list as llama.attention.head_count_kv"),
        ({"context_length": -1}, "'-1' as llama.context_length"),
        ({"rope.freq_base": float("nan")}, "'nan' as llama.rope.freq_base"),
        ({"attention.layer_norm_rms_epsilon": "small"}, "'small' as llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_what_is_not_supported(
    repo: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    case = golden(repo, "llama-tiny-hub")
    with refused(message):
        checkpoint = reopened(case, dict(case.config), tmp_path / "model.gguf", **changes)
        [checkpoint.read(name) for name in checkpoint.tensors]


def test_unknown_architectures_are_listed(tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "mamba"}, {"x": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="'mamba', which is not supported") as caught:
        open_gguf(path)
    assert all(name in str(caught.value) for name in ARCHITECTURES)
