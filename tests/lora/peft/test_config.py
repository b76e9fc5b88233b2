"""Keys of adapter_config.json: supported keys, keys rejected by name, and the modules that they target."""

import json
import logging
from typing import Any

import pytest

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.config import parse_config
from tests.lora.goldens import GOLDENS
from tools.oracle.cases.adapters import ADAPTERS

WRITTEN = json.loads((GOLDENS / "llama-qv" / "adapter_config.json").read_text())


@pytest.mark.parametrize("name", [case.name for case in ADAPTERS])
def test_what_peft_writes_is_read(name: str):
    parse_config(json.loads((GOLDENS / name / "adapter_config.json").read_text()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("layer_replication", [[0, 1], [0, 1]]),
        ("alora_invocation_tokens", [5, 6]),
        ("use_qalora", True),
        ("use_bdlora", {"target_modules_bd_a": ["q_proj"]}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"scale": 1.0}),
        ("megatron_config", {"x": 1}),
        ("ensure_weight_tying", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", 1),
        ("r", 0),
        ("r", True),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("use_dora", "yes"),
        ("bias", "some"),
        ("bias", ["all"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", [1]),
        ("rank_pattern", {"(q_proj": 1}),
        ("alpha_pattern", {"q_proj": None}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", [1]),
        ("target_modules", "(q_proj"),
        ("exclude_modules", {"a": 1}),
        ("target_parameters", "mlp.experts.down_proj"),
        ("layers_pattern", "a(.*)*"),
        ("layers_to_transform", ["one"]),
        ("layers_to_transform", 1.5),
        ("use_rslora", 2),
        ("r", "eight"),
        ("r", 8.5),
        ("lora_alpha", "16x"),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", [1]),
        ("trainable_token_indices", "1"),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", [0.5]),
        ("trainable_token_indices", {"embed_tokens": 3}),
        ("trainable_token_indices", {"embed_tokens": []}),
        ("enable_lora", [True, False, True]),
    ],
)
def test_a_key_that_is_not_served_is_named(key: str, value: Any):
    with pytest.raises(AdapterError, match=key):
        parse_config(WRITTEN | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", False),
        ("eva_config", {"rho": 2.0}),
        ("lora_dropout", 0.1),
        ("inference_mode", False),
        ("task_type", None),
        ("fan_in_fan_out", True),
        ("base_model_name_or_path", "somebody/some-model"),
        ("a_key_of_tomorrow", False),
        ("a_key_of_tomorrow", 3),
        ("lorap_emb_lr", 1e-06),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"corda_method": "kpm"}),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}),
    ],
)
def test_a_key_without_effect_changes_nothing(key: str, value: Any):
    assert parse_config(WRITTEN | {key: value}).canonical == parse_config(WRITTEN).canonical


def test_lora_bias_beside_dora_is_refused():
    with pytest.raises(AdapterError, match="lora_bias"):
        parse_config(WRITTEN | {"use_dora": True, "lora_bias": True})


def test_layers_beside_a_regular_expression_are_refused():
    with pytest.raises(AdapterError, match="layers_to_transform"):
        parse_config(WRITTEN | {"target_modules": ".*q_proj", "layers_to_transform": [0]})


def test_sets_have_an_order_of_their_own_and_tables_keep_theirs():
    config = parse_config(WRITTEN | {"target_modules": ["a", "b"], "alpha_pattern": {"b": 1, "a": 2}})
    other = parse_config(WRITTEN | {"target_modules": ["b", "a"], "alpha_pattern": {"b": 1, "a": 2}})
    assert json.dumps(config.canonical) == json.dumps(other.canonical)
    turned = parse_config(WRITTEN | {"target_modules": ["b", "a"], "alpha_pattern": {"a": 2, "b": 1}})
    assert json.dumps(config.canonical) != json.dumps(turned.canonical)


def test_which_modules_are_meant():
    config = parse_config(
        WRITTEN
        | {
            "target_modules": ["q_proj", "mlp.up_proj"],
            "exclude_modules": ["1.self_attn.q_proj"],
            "r": 4,
            "lora_alpha": 2,
        }
    )
    assert config.targets("model.layers.0.self_attn.q_proj")
    assert config.targets("model.layers.1.mlp.up_proj")
    assert not config.targets("model.layers.1.self_attn.q_proj")
    assert not config.targets("model.layers.0.self_attn.xq_proj")
    assert not config.targets("model.layers.0.up_proj")
    assert config.scale("model.layers.0.self_attn.q_proj") == 0.5


@pytest.mark.parametrize(("layers", "pattern"), [(1, None), ([1], "layers"), ([1], ["h", "layers"])])
def test_layers_are_chosen_by_the_first_number_behind_a_dot(layers: Any, pattern: Any):
    config = parse_config(WRITTEN | {"layers_to_transform": layers, "layers_pattern": pattern})
    assert config.targets("model.layers.1.experts.0.q_proj")
    assert not config.targets("model.layers.0.experts.1.q_proj")


def test_first_pattern_that_matches_counts():
    config = parse_config(
        WRITTEN | {"rank_pattern": {"(q|k)_proj": 2, "q_proj": 3}, "alpha_pattern": {"0.q_proj": 6}, "use_rslora": True}
    )
    assert config.rank("model.0.q_proj") == 2
    assert config.scale("model.0.q_proj") == 6 / 2**0.5
    assert config.scale("model.1.v_proj") == 8 / 4**0.5


def test_keys_that_are_not_known_are_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        parse_config(WRITTEN | {"lorap_emb_lr": 1e-06, "eva_config": {"rho": 2.0}})
        assert caplog.records == []
        parse_config(WRITTEN | {"a_key_of_tomorrow": 3, "another": None})
    assert ["'a_key_of_tomorrow': 3" in record.getMessage() for record in caplog.records] == [True]


def test_numbers_of_another_type():
    config = parse_config(
        WRITTEN
        | {"r": 4.0, "lora_alpha": "6", "use_rslora": 0, "rank_pattern": {"k_proj": "2"}, "layers_to_transform": ["1"]}
    )
    assert (config.r, config.lora_alpha, config.use_rslora) == (4, 6.0, False)
    assert config.rank("model.layers.0.k_proj") == 2
    assert config.layers_to_transform == {1}


def test_the_order_of_tokens_counts():
    one, other = (parse_config(WRITTEN | {"trainable_token_indices": listed}) for listed in ([1, 2], [2, 1]))
    assert one.canonical != other.canonical
