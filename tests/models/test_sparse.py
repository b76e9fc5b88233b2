"""Mixtures of experts: accepted and rejected configs, and steps of their engines."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers import moe
from jaxinfer.llm import LLM
from jaxinfer.models.config import ConfigError
from jaxinfer.models.families.sparse import SparseBlock, SparseConfig
from jaxinfer.models.model import Model
from jaxinfer.models.registry import family_for
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights import init_params, load_params, save_params
from tests.engine.test_identity import SETTINGS, alone, check_mode, make_requests
from tests.fakes import random_model

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 6,
        "intermediate_size": 20,
        "sliding_window": 24,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "head_dim": 8,
        "sliding_window": 20,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 6,
        "moe_intermediate_size": 20,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "num_local_experts": 6,
        "head_dim": 8,
        "rotary_dim": 4,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_local_experts": 6,
        "head_dim": 8,
        "intermediate_size_mlp": 40,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 64,
    },
    "dots1": {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 6},
    "phimoe": {
        "architectures": ["PhimoeForCausalLM"],
        "model_type": "phimoe",
        "num_local_experts": 6,
        "lm_head_bias": True,
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
    },
    "granitemoe": {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_local_experts": 6},
    "granitemoeshared": {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "num_local_experts": 6,
        "shared_intermediate_size": 12,
    },
}

PHI_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4} | {
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 64,
}


def config_json(family: str, **changes: Any) -> dict[str, Any]:
    common = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    chosen = {} if "moe_k" in FAMILIES[family] else {"num_experts_per_tok": 2}
    return {**common, **heads, **chosen, **FAMILIES[family], **changes}


def config(family: str, **changes: Any) -> SparseConfig:
    fields = config_json(family, **changes)
    read: SparseConfig = family_for(fields).config(fields)
    return read


def windows(family: str, **changes: Any) -> list[int | None]:
    return [layer.window for layer in config(family, **{"num_hidden_layers": 4, **changes}).layers]


@pytest.fixture(scope="module", params=["qwen2_moe", "gpt_oss"])  # with a shared expert; with sinks and biases
def model(request: pytest.FixtureRequest) -> Model:
    return random_model(**config_json(request.param))


# --------------------------------------------------------------------------------------------------------------
# config.json


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "7", "6"]),
        ("mixtral", {"num_local_experts": 0}, ["num_local_experts", "0"]),
        ("mixtral", {"intermediate_size": None}, ["intermediate_size", "missing"]),
        ("mixtral", {"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ("mixtral", {"hidden_act": "tanh"}, ["hidden_act", "tanh"]),
        ("mixtral", {"sliding_window": -4}, ["sliding_window", "-4"]),
        ("qwen2_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
        ("qwen2_moe", {"mlp_only_layers": ["1"]}, ["mlp_only_layers", "'1'"]),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": ["full"]}, ["layer_types", "full"]),
        ("qwen2_moe", {"max_window_layers": -1}, ["max_window_layers", "-1"]),
        ("qwen3_moe", {"norm_topk_prob": 1}, ["norm_topk_prob", "1"]),
        ("gpt_oss", {"layer_types": ["full_attention"]}, ["layer_types", "full_attention"]),
        ("gpt_oss", {"swiglu_limit": "none"}, ["swiglu_limit", "none"]),
        ("dots1", {"scoring_func": "softmax"}, ["scoring_func = 'softmax'", "sigmoid"]),
        ("dots1", {"n_shared_experts": None}, ["n_shared_experts is missing"]),
        ("dots1", {"layer_types": ["full_attention"]}, ["layer_types", "must name 2"]),
        ("dots1", {"sliding_window": 0, "max_window_layers": 1}, ["sliding_window = 0"]),
        ("glm4_moe", {"first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
        ("glm4_moe", {"n_group": 4}, ["n_group", "4"]),
        ("glm4_moe", {"n_shared_experts": 0}, ["n_shared_experts", "0"]),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        ("minimax_m2", {"rotary_dim": 10}, ["rotary_dim", "10", "8"]),
        ("minimax_m2", {"scoring_func": "softmax"}, ["scoring_func", "softmax"]),
        ("minimax_m2", {"qk_norm_type": "per_head"}, ["qk_norm_type", "per_head"]),
        ("minimax_m2", {"use_routing_bias": False}, ["use_routing_bias", "False"]),
        ("minimax_m2", {"shared_intermediate_size": 8}, ["shared_intermediate_size", "8"]),
        ("minimax_m2", {"attn_type_list": [0, 1]}, ["attn_type_list", "0, 1"]),
        ("llama4", {"layer_types": ["full"]}, ["layer_types", "full"]),
        ("llama4", {"no_rope_layers": [1]}, ["no_rope_layers", "1"]),
        ("llama4", {"moe_layers": "all"}, ["moe_layers", "all"]),
        ("llama4", {"attention_chunk_size": 0}, ["attention_chunk_size", "0"]),
        ("llama4", {"floor_scale": 0}, ["floor_scale", "0"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ("olmoe", {"head_dim": 16}, ["head_dim", "16"]),
        ("phimoe", {"num_experts_per_tok": 3}, ["num_experts_per_tok", "3"]),
        ("phimoe", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ("phimoe", {"rope_scaling": PHI_ROPE | {"long_mscale": 1.5}}, ["long_mscale", "1.5", "1.25"]),
        ("phimoe", {"rope_scaling": PHI_ROPE | {"long_factor": [1.0]}}, ["long_factor", "1.0", "4"]),
        ("ernie4_5_moe", {"use_bias": True}, ["use_bias", "True"]),
        ("ernie4_5_moe", {"moe_k": 7}, ["moe_k", "7", "6"]),
        ("ernie4_5_moe", {"moe_norm_min": -1.0}, ["moe_norm_min", "-1.0"]),
        ("ernie4_5_moe", {"moe_layer_end_index": "last"}, ["moe_layer_end_index", "last"]),
        ("granitemoe", {"logits_scaling": 0}, ["logits_scaling", "0"]),
        ("granitemoe", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "7", "6"]),
        ("granitemoe", {"residual_multiplier": "x"}, ["residual_multiplier", "'x'"]),
        ("granitemoeshared", {"shared_intermediate_size": -1}, ["shared_intermediate_size", "-1"]),
    ],
)
def test_a_bad_field_is_named_with_its_value(family: str, changes: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        config(family, **changes)
    assert all(word in str(error.value) for word in words)


def test_what_is_left_out_is_what_transformers_takes():
    bare = {"num_experts_per_tok": None, "intermediate_size": None, "moe_intermediate_size": None}
    bare |= {"num_local_experts": None, "num_experts": None, "max_position_embeddings": None}
    mixtral = config("mixtral", num_local_experts=None, num_experts_per_tok=None)
    assert (mixtral.experts, mixtral.rule.top_k, mixtral.rule.renormalise) == (8, 2, True)
    assert (mixtral.norm_eps, mixtral.rope.theta, mixtral.max_position) == (1e-5, 1e6, 131072)
    qwen2 = config("qwen2_moe", **bare, shared_expert_intermediate_size=None)
    assert (qwen2.experts, qwen2.rule.top_k, qwen2.expert_size, qwen2.shared_size) == (60, 4, 1408, 5632)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.norm_eps, qwen2.max_position) == (True, False, 1e-6, 32768)
    qwen3 = config("qwen3_moe", **bare)
    assert (qwen3.experts, qwen3.rule.top_k, qwen3.expert_size, qwen3.shared_size) == (128, 8, 768, None)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 8)
    granite = config("granitemoe", **bare, num_key_value_heads=None)
    assert (granite.experts, granite.rule.top_k, granite.expert_size, granite.kv_heads) == (8, 2, 11008, 4)
    assert (granite.scale, granite.logits_scaling, granite.max_position) == (1.0, 1.0, 2048)
    assert config("granitemoeshared", shared_intermediate_size=None).shared_size is None
    oss = config("gpt_oss", **bare, sliding_window=None)
    assert (oss.experts, oss.rule.top_k, oss.expert_size) == (128, 4, 2880)
    assert (oss.rope.kind, oss.rope.factor, oss.rope.theta, oss.rope.truncate) == ("yarn", 32.0, 150000.0, False)
    assert (oss.glu, oss.sinks, oss.qkv_bias, oss.out_bias) == (moe.ClampedGLU(1.702, 7.0), True, True, True)


def test_what_is_left_out_of_newer_families_is_what_transformers_takes():
    bare = {"num_experts_per_tok": None, "intermediate_size": None, "moe_intermediate_size": None}
    bare |= {"num_key_value_heads": 4}
    glm = config("glm4_moe", **bare, n_routed_experts=None)
    assert (glm.experts, glm.rule.top_k, glm.rule.scale, glm.expert_size) == (128, 8, 1.0, 1408)
    assert (glm.shared_size, glm.rope.partial, glm.sparse, glm.out_bias) == (1408, 0.5, (False, True), False)
    m2 = config("minimax_m2", **bare, num_local_experts=None, rotary_dim=None, head_dim=None)
    assert (m2.experts, m2.rule.top_k, m2.expert_size, m2.rope.theta, m2.rope.partial) == (256, 8, 1536, 5e6, 1.0)
    llama4 = config("llama4", **bare, num_hidden_layers=4, no_rope_layer_interval=None, attention_chunk_size=None)
    assert (llama4.rule.top_k, llama4.expert_size, llama4.rope.theta, llama4.chunk) == (1, 8192, 5e5, None)
    assert llama4.rotated == (True, True, True, False)
    olmoe = config("olmoe", **bare, num_experts=None)
    assert (olmoe.experts, olmoe.rule.top_k, olmoe.expert_size, olmoe.norm_eps) == (64, 8, 2048, 1e-5)
    phi = config("phimoe", **bare | {"num_local_experts": None})
    assert (phi.experts, phi.rule.jitter, phi.expert_size, phi.qkv_bias, phi.head_bias) == (16, 0.01, 6400, False, True)
    assert phi.rope.theta == 1e6
    ernie = config("ernie4_5_moe", **bare, moe_num_experts=None, moe_k=None)
    assert (ernie.experts, ernie.rule.top_k, ernie.expert_size, ernie.shared_size) == (64, 6, 1536, 3072)
    assert (ernie.tied, ernie.rope.theta, ernie.sparse) == (True, 5e5, (False, True))


def test_minimax_rotates_a_share_of_a_head_that_is_given_in_numbers():
    assert config("minimax_m2").rope.partial == 0.5
    assert config("minimax_m2", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}).rope.partial == 0.25


def test_layers_for_drafts_are_left_out():
    assert config("glm4_moe").ignored == ("model.layers.2.*",)
    assert config("glm4_moe", num_nextn_predict_layers=2).ignored == ("model.layers.2.*", "model.layers.3.*")


def test_a_context_of_llama4_ends_with_its_first_chunk():
    model = random_model(**config_json("llama4", max_position_embeddings=256))
    assert model.config.max_position == 64
    assert model.apply(model.params, jnp.zeros((1, 64), jnp.int32)).shape == (1, 64, 97)
    with pytest.raises(ValueError, match=r"65 tokens .* attention_chunk_size \(64\)"):
        model.apply(model.params, jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(ValueError, match="max_model_len = 65"):
        LLM(model, max_model_len=65)
    assert config("llama4", no_rope_layers=[0, 0]).chunk is None
    assert config("llama4", layer_types=["full_attention"] * 2).chunk is None


def test_heads_that_are_left_out_and_heads_that_are_null():
    fields = config_json("qwen3_moe", num_attention_heads=16)
    del fields["num_key_value_heads"]
    assert family_for(fields).config(fields).kv_heads == 4
    assert config("qwen3_moe", num_attention_heads=16, num_key_value_heads=None).kv_heads == 16


def test_sliding_windows_of_each_family():
    assert windows("mixtral") == [24] * 4
    assert windows("mixtral", sliding_window=None) == [None] * 4
    assert windows("qwen3_moe", sliding_window=8) == [None] * 4
    assert windows("qwen3_moe", sliding_window=8, use_sliding_window=True) == [8] * 4
    assert windows("qwen3_moe", use_sliding_window=True) == [4096] * 4
    assert windows("qwen2_moe", sliding_window=0) == [None] * 4
    assert windows("qwen2_moe", sliding_window=8, use_sliding_window=True) == [8, None, 8, None]
    assert (
        windows("qwen2_moe", sliding_window=8, use_sliding_window=True, max_window_layers=2) == [8, None] + [None] * 2
    )
    assert windows("gpt_oss") == [20, None, 20, None]
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert windows("gpt_oss", layer_types=kinds) == [None, None, 20, 20]


def test_windows_of_dots_are_of_the_layers_behind_a_number():
    def windows(**changes: Any) -> list[int | None]:
        return [layer.window for layer in config("dots1", num_hidden_layers=3, **changes).layers]

    assert windows() == windows(sliding_window=8) == [None] * 3
    assert windows(max_window_layers=1) == [None, 4096, 4096]
    assert windows(sliding_window=8, max_window_layers=2) == [None, None, 8]
    assert windows(sliding_window=None, max_window_layers=0) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(sliding_window=8, layer_types=kinds) == [8, None, 8]


def test_which_layers_have_experts():
    assert config("qwen2_moe").sparse == (True, False)
    steps = config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert steps.sparse == (False, True, False, False, False, True)


# --------------------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_from_a_checkpoint_as_they_were(family: str, tmp_path: pathlib.Path):
    specs = family_for(config_json(family)).param_specs(config(family))
    params = init_params(specs, 0, "float32")
    save_params(tmp_path, params, specs, {})
    jax.tree.map(np.testing.assert_array_equal, params, load_params(tmp_path, specs, "float32"))


def test_every_weight_has_a_gradient(model: Model):
    tokens = jnp.asarray([np.random.default_rng(0).integers(0, 97, 40)])

    def loss(params: Any) -> jax.Array:
        return jax.nn.logsumexp(model.apply(params, tokens), axis=-1).sum() + model.apply(params, tokens)[..., 5].sum()

    gradients = jax.jit(jax.grad(loss))(model.params)
    without = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(gradients) if not leaf.any()]
    assert without == []
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_bfloat16_stays_near_float32(model: Model):
    tokens = jnp.asarray([np.random.default_rng(1).integers(0, 97, 20)])
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    got, expected = (np.asarray(jax.jit(model.apply)(params, tokens)) for params in (narrow, wide))
    # a router may choose otherwise where two scores are close
    assert np.median(np.abs(got - expected)) < 0.1 * expected.std()


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_requests_have_the_bits_of_each_alone(family: str):
    model = random_model(**config_json(family))
    requests = make_requests(6, model.config.vocab_size, longest=12)
    expected = alone(model, requests, **SETTINGS)
    small = LLM(model, **SETTINGS, num_pages=200, max_num_batched_tokens=72)
    check_mode(small, requests, expected, lambda stats: True)


@pytest.mark.slow
def test_idle_rows_and_padding_ask_for_no_expert(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        groups = group(*arguments, **options)
        jax.debug.callback(lambda count: counts.append(int(count)), groups.occupied)
        return groups

    group = moe.group
    monkeypatch.setattr(moe, "group", counted)
    llm = LLM(random_model(**config_json("mixtral")), **SETTINGS, num_pages=200)
    counts.clear()
    llm.generate([[5]], [SamplingParams(temperature=0.0, max_tokens=6)])
    jax.effects_barrier()
    assert counts
    assert set(counts) == {2}  # for one row two experts in each of two layers
    counts.clear()
    llm.generate([[5, 6, 7, 8]], [SamplingParams(temperature=0.0, max_tokens=1)])
    jax.effects_barrier()
    assert max(counts) <= 6  # three tokens in a chunk of 16


def test_a_layer_can_be_replaced():
    model = random_model(**config_json("mixtral"))

    class Silent(SparseBlock):
        def __call__(self, x: Any, context: Any, attend: Any, cache: Any) -> Any:
            return x, cache

    edited = model.replace(module=model.module.clone(overrides=((0, Silent), (1, Silent))))
    tokens = jnp.asarray([[3, 5, 8]])
    assert not np.array_equal(edited.apply(model.params, tokens), model.apply(model.params, tokens))
    scaled = {**model.params, "layers_0": jax.tree.map(lambda leaf: 2 * leaf, model.params["layers_0"])}
    np.testing.assert_array_equal(edited.apply(model.params, tokens), edited.apply(scaled, tokens))
