"""Newer architectures as GGUF and back: metadata and tensors equal those that llama.cpp's converter wrote."""

import hashlib
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import family_for
from jaxinfer.weights import CheckpointError
from jaxinfer.weights.gguf.architectures import architecture_of
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from jaxinfer.weights.gguf.header_view import Described
from tests.weights.files import refused
from tests.weights.gguf.convert import factors_of_llama3
from tests.weights.gguf.files import write_gguf
from tests.weights.gguf.newer import tensors_of_file
from tools.oracle.gguf_cases import CASES, Converted, read_converted

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "gguf"


def converted(name: str) -> tuple[Converted, dict[str, np.ndarray]]:
    """Return a case and the tensors of its file."""
    case = read_converted(GOLDENS / f"{name}.json")
    tensors = tensors_of_file(case.config, case.checkpoint())
    return case, tensors | _rope_factors(case)


def _rope_factors(case: Converted) -> dict[str, np.ndarray]:
    scaling, config = case.config.get("rope_scaling") or {}, case.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if scaling.get("rope_type") == "llama3":
        return {"rope_freqs.weight": factors_of_llama3(scaling, config["rope_theta"], head_dim)}
    names = [name for name in ("short", "long") if f"{name}_factor" in scaling]
    return {f"rope_factors_{name}.weight": np.asarray(scaling[f"{name}_factor"], np.float32) for name in names}


def written(
    path: pathlib.Path, name: str, without: tuple[str, ...] = (), **changes: Any
) -> tuple[Converted, GgufCheckpoint]:
    """Write and open a case's file. ``without``: keys without the architecture's name; ``changes``: values by key."""
    case, tensors = converted(name)
    arch = case.metadata["general.architecture"]
    metadata = {**case.metadata, **{f"{arch}.{key}": value for key, value in changes.items()}}
    kept = {key: value for key, value in metadata.items() if key.removeprefix(f"{arch}.") not in without}
    return case, open_gguf(write_gguf(path / "model.gguf", kept, tensors))


@pytest.mark.parametrize("name", CASES)
def test_files_are_those_of_the_converter(name: str) -> None:
    """All tensors except Llama 3's factors, whose last bits differ since torch computes them in float32."""
    case, tensors = converted(name)
    sums = {
        key: ["F32", list(tensor.shape), hashlib.sha256(tensor.tobytes()).hexdigest()[:16]]
        for key, tensor in tensors.items()
    }
    assert sums.keys() == case.tensors.keys()
    factors = {"rope_freqs.weight"}
    assert {key: sums[key] for key in sums.keys() - factors} == {
        key: case.tensors[key] for key in case.tensors.keys() - factors
    }


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path: pathlib.Path, name: str) -> None:
    case, checkpoint = written(tmp_path, name)
    told, expected = dict(checkpoint.config_json), case.checkpoint()
    ours, theirs = (family_for(config) for config in (told, case.config))
    assert ours.config(told) == theirs.config(case.config)
    assert ours.module is theirs.module
    assert checkpoint.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert checkpoint.tensors[key].shape == tensor.shape, key
        np.testing.assert_array_equal(checkpoint.read(key), tensor, err_msg=key)


# --------------------------------------------------------------------------------------------------------------
# Files that the converter does not write for these cases


def test_mistral_small_is_a_llama(tmp_path: pathlib.Path) -> None:
    """Without the key of temperature scaling, its queries are those of a Llama."""
    keys = ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    _, checkpoint = written(tmp_path, "ministral3-hub", without=keys)
    assert checkpoint.config_json["architectures"] == ["LlamaForCausalLM"]


def test_granite_without_scales(tmp_path: pathlib.Path) -> None:
    keys = ("attention.scale", "embedding_scale", "residual_scale")
    _, checkpoint = written(tmp_path, "granite-hub", without=keys)
    config = family_for(checkpoint.config_json).config(checkpoint.config_json)
    assert (config.scale, config.embedding_multiplier, config.residual_multiplier) == (0.25, 1.0, 1.0)


def test_norms_of_each_head(tmp_path: pathlib.Path) -> None:
    """Files of StableLM 2 12B have a matrix of norms, and no norm before the MLP."""
    case, tensors = converted("stablelm-hub")
    config = {**case.config, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False}
    kept = {key: tensor for key, tensor in tensors.items() if "ffn_norm" not in key and not key.endswith("k.bias")}
    kept = {key: tensor for key, tensor in kept.items() if not key.endswith(("attn_q.bias", "attn_v.bias"))}
    norms = np.arange(64, dtype=np.float32).reshape(4, 16)
    kept |= {f"blk.{layer}.attn_{part}_norm.weight": norms for layer in range(2) for part in "qk"}
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.metadata, kept))
    told = dict(checkpoint.config_json)
    assert family_for(told).config(told) == family_for(config).config(config)
    np.testing.assert_array_equal(checkpoint.read("model.layers.1.self_attn.k_layernorm.norms.2.weight"), norms[2])


@pytest.mark.parametrize("name", ["glm-hub", "phi-hub", "granite-biases"])
def test_queries_keys_and_values_in_one(tmp_path: pathlib.Path, name: str) -> None:
    """Fused QKV tensors, as in the first files of ChatGLM and Phi-2, and in files of the converter's --fuse-qkv."""
    case, tensors = converted(name)
    for kind in ("weight", "bias"):
        for layer in range(2):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.metadata, tensors))
    told = dict(checkpoint.config_json)
    assert family_for(told).config(told) == family_for(case.config).config(case.config)
    for key, tensor in case.checkpoint().items():
        np.testing.assert_array_equal(checkpoint.read(key), tensor, err_msg=key)


@pytest.mark.parametrize("name", ["glm4_moe-hub", "glm4_moe_lite-hub"])
def test_layers_that_predict_further_tokens(tmp_path: pathlib.Path, name: str) -> None:
    """MTP layers get names of the layer after the last one, which the family ignores."""
    case, tensors = converted(name)
    more = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128), np.float32), "blk.2.attn_norm.weight": np.ones(64, "f4")}
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.metadata, tensors | more))
    new = checkpoint.tensors.keys() - case.checkpoint().keys()
    assert new == {"model.layers.2.eh_proj.weight", "model.layers.2.input_layernorm.weight"}


def test_windows_by_a_period(tmp_path: pathlib.Path) -> None:
    _, checkpoint = written(tmp_path, "gpt_oss-hub")
    assert checkpoint.config_json["layer_types"] == ["sliding_attention", "full_attention"]
    _, checkpoint = written(tmp_path, "cohere2-hub", **{"attention.sliding_window_pattern": 2})
    assert [kind[0] for kind in checkpoint.config_json["layer_types"]] == ["s", "f", "s", "f"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm4-hub", {"rope.dimension_sections": [8, 12, 12, 0]}, "a list as glm4.rope.dimension_sections"),
        ("granite-hub", {"rope.scaling.finetuned": False}, "'false' as granite.rope.scaling.finetuned"),
        ("cohere2-hub", {"rope.dimension_count": 8}, "'8' as cohere2.rope.dimension_count"),
        ("glm4_moe-hub", {"expert_gating_func": 1}, "'1' as glm4moe.expert_gating_func"),
        ("minimax_m2-hub", {"expert_gating_func": 1}, "'1' as minimax-m2.expert_gating_func"),
        ("llama4_text-hub", {"attention.sliding_window": 0}, "'0' as llama4.attention.sliding_window"),
        (
            "olmo3-yarn-hub",
            {"attention.sliding_window_pattern": [True]},
            "a list as olmo2.attention.sliding_window",
        ),
        ("glm4_moe-hub", {"nextn_predict_layers": 9}, "'9' as glm4moe.nextn_predict_layers"),
    ],
)
def test_what_is_not_supported(tmp_path: pathlib.Path, name: str, changes: dict[str, Any], message: str) -> None:
    with refused(message):
        written(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gpt_oss-hub", "attention.sliding_window"),
        ("granite-hub", "logit_scale"),
        ("llama4_text-hub", "interleave_moe_layer_step"),
        ("starcoder2-hub", "attention.layer_norm_epsilon"),
        ("olmoe-hub", "expert_used_count"),
    ],
)
def test_what_is_not_given(tmp_path: pathlib.Path, name: str, key: str) -> None:
    with refused(f"lacks the metadata .*{key}"):
        written(tmp_path, name, without=(key,))


def _refusal(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model = Described(pathlib.Path("model.gguf"), metadata, shapes, tensors.__getitem__)
    try:
        architecture = architecture_of(model)
        told, names = architecture.config_json(model), architecture.names
        family_for(told).config(told)
        assert sum(len(names.targets(model, name)) for name in shapes) + len(names.joined(model)) > 0
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_wrong_metadata_is_refused_in_a_sentence(name: str) -> None:
    case, tensors = converted(name)
    values = (0, 1, 7, -1, 1 << 31, 0.0, -1.0, float("nan"), "x", True, [], [1, 2], ["x"])
    said = [_refusal({**case.metadata, key: value}, tensors) for key in case.metadata for value in values]
    assert not any("\n" in sentence for sentence in said)
    assert sum(sentence != "" for sentence in said) > len(said) // 3
