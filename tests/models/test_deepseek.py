"""DeepSeek-V2 and V3: accepted and rejected configs, and latents in the engine."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.llm import LLM
from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.deepseek import DeepseekConfig
from jaxinfer.models.model import Model
from jaxinfer.models.registry import family_for
from jaxinfer.types import CacheSpec, LayerSpec
from jaxinfer.weights import CheckpointError, init_params, load_params, save_params
from tests.engine.test_identity import SETTINGS, alone, check_mode, make_requests, preempted
from tests.fakes import random_model

YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}


def config_json(version: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 256,
        **changes,
    }


def config(version: int, **changes: Any) -> DeepseekConfig:
    fields = config_json(version, **changes)
    read: DeepseekConfig = family_for(fields).config(fields)
    return read


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(**config_json(3))


# --------------------------------------------------------------------------------------------------------------
# config.json


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        (2, {"num_experts_per_tok": None}, ["num_experts_per_tok", "missing"]),
        (2, {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8"]),
        (2, {"norm_topk_prob": True}, ["norm_topk_prob", "True"]),
        (2, {"mlp_bias": True}, ["mlp_bias", "True"]),
        (2, {"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
        (2, {"topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "group_limited_greedy"]),
        (2, {"topk_method": "group_limited_greedy", "n_group": 3}, ["n_group", "3", "8"]),
        (2, {"topk_method": "group_limited_greedy", "topk_group": 5}, ["topk_group", "5", "4"]),
        (2, {"topk_method": "group_limited_greedy", "n_group": None}, ["n_group", "missing"]),
        (2, {"num_key_value_heads": 2}, ["num_key_value_heads", "2"]),
        (2, {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        (2, {"first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
        (2, {"qk_rope_head_dim": 5}, ["qk_rope_head_dim", "5"]),
        (2, {"kv_lora_rank": 0}, ["kv_lora_rank", "0"]),
        (2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic", "yarn"]),
        (3, {"num_experts_per_tok": 5}, ["num_experts_per_tok", "5", "4"]),
        (3, {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        (3, {"topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        (3, {"n_group": 8}, ["n_group", "8"]),  # a group's score is the sum of its best two
        (3, {"rope_scaling": {**YARN, "mscale_all_dim": "1"}}, ["mscale_all_dim", "'1'"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(version: int, changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        config(version, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_is_left_out_is_what_transformers_takes():
    names = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group"
    names += " n_routed_experts moe_intermediate_size first_k_dense_replace max_position_embeddings"
    left_out = names.split()
    two, three = config_json(2), config_json(3, num_hidden_layers=5)
    for fields in (two, three):
        for name in left_out:
            del fields[name]
    del three["num_experts_per_tok"]
    v2, v3 = DeepseekConfig.from_v2(two), DeepseekConfig.from_v3(three)
    for cfg in (v2, v3):
        assert (cfg.rank, cfg.q_rank, cfg.nope, cfg.rope_dim, cfg.value_dim) == (512, 1536, 128, 64, 128)
    assert (v2.dense, v2.experts, v2.expert_size, v2.shared_size, v2.max_position) == (0, 64, 1407, 2814, 2048)
    assert (v3.dense, v3.experts, v3.expert_size, v3.shared_size, v3.max_position) == (3, 256, 2048, 2048, 4096)
    assert v2.rule == RoutingRule(2)
    assert v3.rule == RoutingRule(8, "sigmoid", renormalise=True, scale=2.5, groups=8, top_groups=4, group_score="top2")
    assert (v2.corrected, v3.corrected, v2.interleaved, v3.interleaved) == (False, True, True, True)


def test_queries_without_a_latent():
    assert config(2, q_lora_rank=None).q_rank is None
    assert config(3, q_lora_rank=7).q_rank == 7


def test_scores_grow_with_a_stretched_context():
    plain = 12**-0.5
    assert config(2).scale == pytest.approx(plain)
    assert config(2, rope_scaling=YARN).scale == pytest.approx(plain)
    stretched = config(2, rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707})
    assert stretched.scale == pytest.approx(plain * (0.0707 * np.log(40) + 1) ** 2)
    assert stretched.rope.attention_factor == 1.0


def test_a_page_holds_one_latent_a_token(model):
    assert model.cache_spec == CacheSpec((LayerSpec(latent_rank=12),) * 2, 1, 16)
    assert model.cache_spec.bytes_per_page(16, 2) == 2 * 16 * 16 * 2


# --------------------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(("version", "changes"), [(2, {"q_lora_rank": None}), (3, {"attention_bias": True})])
def test_weights_come_back_from_a_checkpoint_as_they_were(version: int, changes: dict, tmp_path: pathlib.Path):
    specs = family_for(config_json(version)).param_specs(config(version, **changes))
    params = init_params(specs, 0, "float32")
    save_params(tmp_path, params, specs, {})
    jax.tree.map(np.testing.assert_array_equal, params, load_params(tmp_path, specs, "float32"))


def test_the_layer_for_a_second_token_stays_in_the_checkpoint(tmp_path: pathlib.Path):
    """The MTP layer follows the last layer, at any depth, and is not loaded."""
    family, shallow = family_for(config_json(3)), config(3, num_hidden_layers=1)
    specs, deeper = (family.param_specs(config(3, num_hidden_layers=count)) for count in (1, 2))
    everything = {**specs, "layers_1": deeper["layers_1"]}
    params = init_params(everything, 0, "float32")
    save_params(tmp_path, params, everything, {})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        load_params(tmp_path, specs, "float32")
    loaded = load_params(tmp_path, specs, "float32", ignore=shallow.ignored)
    np.testing.assert_array_equal(loaded["embed"]["table"], params["embed"]["table"])


def test_every_weight_has_a_gradient(model: Model):
    tokens = jnp.asarray([np.random.default_rng(0).integers(0, 97, 40)])

    def loss(params: Any) -> jax.Array:
        logits = model.apply(params, tokens)
        return jax.nn.logsumexp(logits, axis=-1).sum() + logits[..., 5].sum()

    gradients = jax.jit(jax.grad(loss))(model.params)
    without = {path[-1].key for path, leaf in jax.tree.leaves_with_path(gradients) if not leaf.any()}
    assert without <= {"correction"}  # it selects experts, but is not part of the sum
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_bfloat16_stays_near_float32(model: Model):
    tokens = jnp.asarray([np.random.default_rng(1).integers(0, 97, 20)])
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    got, expected = (np.asarray(jax.jit(model.apply)(params, tokens)) for params in (narrow, wide))
    # a router may choose otherwise where two scores are close
    assert np.median(np.abs(got - expected)) < 0.1 * expected.std()


# --------------------------------------------------------------------------------------------------------------
# The engine


@pytest.mark.slow
def test_requests_have_the_bits_of_each_alone(model: Model, monkeypatch: pytest.MonkeyPatch):
    """Cold and warm cache, small steps, and pages swapped to the host and back."""
    requests = make_requests(10, model.config.vocab_size, longest=40)
    expected = alone(model, requests, **SETTINGS)
    small = LLM(model, **SETTINGS, num_pages=200, max_num_batched_tokens=72)
    check_mode(small, requests, expected, lambda stats: stats.prefix_hits > 0)
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    check_mode(LLM(model, **SETTINGS, num_pages=12), requests, expected, preempted("swap"))
