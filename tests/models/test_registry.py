"""config.json: accepted fields and rejected values."""

import importlib

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.llama import LlamaConfig
from jaxinfer.models.registry import FAMILIES, family_for
from tests.fakes import llama_json


def config(**changes) -> LlamaConfig:
    return LlamaConfig.from_json(llama_json(**changes))


def windows(**changes) -> list[int | None]:
    return [layer.window for layer in config(**{"num_hidden_layers": 4, **changes}).layers]


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", ["BertModel"]])
def test_an_unknown_architecture_is_refused(names):
    with pytest.raises(ConfigError) as error:
        family_for({"architectures": names})
    assert f"architectures = {names!r} " in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"hidden_size": -1}, ["hidden_size", "-1"]),
        ({"num_hidden_layers": 2**40}, ["num_hidden_layers"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "small"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"rope_scaling": [1]}, ["rope_scaling"]),
        ({"rope_scaling": {"rope_type": "mrope"}}, ["rope_type", "mrope", "llama3"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            ["short_factor", "4 numbers"],
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [0, 1]}},
            ["long_factor", "[0, 1]"],
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}}, ["beta_fast", "-1"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0}}, ["factor", "0"]),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
            ["partial_rotary_factor", "0.5", "linear"],
        ),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ({"rope_theta": 1}, ["rope_theta", "1"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window", "0"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(changes, words):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert all(word in str(error.value) for word in words)


def test_sliding_windows_of_each_family():
    assert windows(sliding_window=8) == [None] * 4
    assert windows(model_type="mistral", sliding_window=8) == [8] * 4
    assert windows(model_type="mistral", sliding_window=None) == [None] * 4
    assert windows(model_type="qwen2", sliding_window=8) == [None] * 4
    assert windows(model_type="mistral") == [4096] * 4  # default of transformers
    assert windows(model_type="qwen2", use_sliding_window=True, num_hidden_layers=29) == [None] * 28 + [4096]
    qwen = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
    assert windows(**qwen, max_window_layers=3) == [None, None, None, 8]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(**qwen, layer_types=kinds) == [None, 8, None, 8]
    with pytest.raises(ConfigError, match="layer_types"):
        windows(**qwen, layer_types=kinds[:3])


def test_rope_in_the_old_and_the_new_style():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = config(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.factor, old.rope.original_max_position) == (5e5, 8.0, 64)
    assert config(rope_theta=777).rope.theta == 777.0


def test_switches_follow_the_model_type():
    assert (config().qkv_bias, config().qk_norm) == (False, False)
    qwen2 = config(model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.out_bias) == (True, False)
    biased = config(attention_bias=True)
    assert (biased.qkv_bias, biased.out_bias) == (True, True)
    assert config(model_type="qwen3").qk_norm
    assert config(head_dim=20).head_dim == 20
    assert config(model_type="qwen3").head_dim == 128
    mimo = config(model_type="mimo", attention_bias=True)
    assert (mimo.qkv_bias, mimo.out_bias) == (True, False)
    seed = config(model_type="seed_oss")
    assert (seed.qkv_bias, seed.out_bias, seed.head_dim) == (True, False, 128)


def test_what_transformers_takes_no_notice_of_is_not_read():
    mistral = config(model_type="mistral")
    assert config(model_type="mistral", attention_bias=True) == mistral
    for partial in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        assert config(**partial) == config()


def test_layers_that_predict_further_tokens_are_left_out():
    """MTP layers are ignored: MiMo's by name, DeepSeek's by layer index, whether or not config.json counts them."""
    assert FAMILIES["MiMoForCausalLM"].ignore == ("model.mtp_layers.*",)
    shallow = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8, "hidden_size": 16}
    deepseek = FAMILIES["DeepseekV3ForCausalLM"].config({**shallow, "intermediate_size": 8})
    assert deepseek.ignored == ("model.layers.2.*",)


@pytest.mark.parametrize("kinds", [["sparse", "dense"], ["dense"], "dense", ["dense", "other"]])
def test_glm_has_dense_layers_before_sparse_ones(kinds):
    shallow = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8, "hidden_size": 16}
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        FAMILIES["Glm4MoeLiteForCausalLM"].config({**shallow, "intermediate_size": 8, "mlp_layer_types": kinds})


@pytest.mark.parametrize(("name", "package"), [("llama", "families"), ("gemma3n", "families"), ("eagle", "heads")])
def test_former_names_of_modules_are_aliases(name: str, package: str) -> None:
    own = importlib.import_module(f"jaxinfer.models.{package}.{name}")
    assert importlib.import_module(f"jaxinfer.models.{name}") is own
    assert own.__spec__ is not None
    assert own.__spec__.name == own.__name__ == f"jaxinfer.models.{package}.{name}"


def test_other_names_are_no_modules() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("jaxinfer.models.no_such_family")


def test_a_family_is_found_by_its_constant() -> None:
    registry = importlib.import_module("jaxinfer.models.registry")
    assert registry.LLAMA is FAMILIES["LlamaForCausalLM"]
    with pytest.raises(AttributeError):
        registry.NO_SUCH_FAMILY  # noqa: B018
