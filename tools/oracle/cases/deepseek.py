"""DeepSeek-V2 and DeepSeek-V3, and models with their blocks, sparse indexers included."""

from typing import Any

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
}

_LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_EVEN_LATENT = {"kv_lora_rank": 22, "qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 11}
_ODD_LATENT = {"kv_lora_rank": 23, "qk_nope_head_dim": 13, "qk_rope_head_dim": 6, "v_head_dim": 11}
_MOE = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
_GROUPS = {"n_group": 4, "topk_group": 2}
_YARN = {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}


def _dense(layers: int, heads: int, **others: Any) -> dict:
    """Return a model without experts: all of its layers are dense first layers."""
    common = {**sizes(64, 96, layers, heads, heads), **_LATENT, **_MOE, **_GROUPS, "first_k_dense_replace": layers}
    return {**common, **others}


def _v2(heads: int = 4, **others: Any) -> dict:
    return _dense(
        1, heads, **{"num_hidden_layers": 2, "q_lora_rank": 20, "n_group": None, "topk_group": None, **others}
    )


def _v3(heads: int = 4, **others: Any) -> dict:
    return _v2(heads, **{"n_shared_experts": 1, **_GROUPS, **others})


_LIMITED: dict[str, Any] = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
_YARN_V2: dict[str, Any] = {
    "rope_scaling": {"type": "yarn", **_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
}
_YARN_V3 = rope("yarn", 10000.0, **_YARN, mscale=1.0, mscale_all_dim=0.6)

V2 = (
    Case("deepseek_v2-greedy", _v2(), overlooked={"num_experts_per_tok": 2}),
    Case("deepseek_v2-dense", _dense(2, 4, q_lora_rank=20)),
    Case("deepseek_v2-dense-plain-queries", _dense(2, 2, q_lora_rank=None), shards=2),
    Case(
        "deepseek_v2-dense-odd-sizes",
        _dense(2, 3, hidden_size=60, vocab_size=61, q_lora_rank=17, **_EVEN_LATENT, rms_norm_eps=1e-3),
        overlooked={"rms_norm_eps": 1e-6},
    ),
    Case("deepseek_v2-scaled-tied", _v2(routed_scaling_factor=2.5, tie_word_embeddings=True, n_shared_experts=1)),
    Case("deepseek_v2-group-limited", _v2(**_LIMITED), prompt_length=33, overlooked={"topk_method": "greedy"}),
    Case(
        "deepseek_v2-lite-hub",
        _v2(q_lora_rank=None, **_YARN_V2, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1),
        style="hub",
        prompt_length=70,
        shards=2,
        served=True,
        overlooked={"rope_scaling": None},
    ),
    Case("deepseek_v2-all-sparse", _v2(first_k_dense_replace=0), overlooked={"routed_scaling_factor": 1.1}),
)
V3 = (
    Case("deepseek_v3-groups", _v3(), overlooked={"topk_group": 1, "num_experts_per_tok": 2}),
    Case("deepseek_v3-dense-biases", _dense(2, 4, q_lora_rank=20, attention_bias=True)),
    Case(
        "deepseek_v3-dense-halves",
        _dense(2, 4, q_lora_rank=None, rope_interleave=False),
        prompt_length=40,
        overlooked={"rope_interleave": True},
    ),
    Case("deepseek_v3-dense-odd-sizes", _dense(2, 3, hidden_size=57, q_lora_rank=19, **_ODD_LATENT)),
    Case(
        "deepseek_v3-dense-yarn",
        _dense(2, 4, q_lora_rank=20, **_YARN_V3),
        prompt_length=70,
        overlooked={"rope_parameters": _YARN_V3["rope_parameters"] | {"mscale_all_dim": 0.5}},
    ),
    Case("deepseek_v3-one-group-tied", _v3(n_group=1, topk_group=1, tie_word_embeddings=True)),
    Case("deepseek_v3-not-normalised", _v3(norm_topk_prob=False), overlooked={"norm_topk_prob": True}),
    Case(
        "deepseek_v3-hub",
        _v3(
            rope_scaling={"type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            rope_theta=10000,
            routed_scaling_factor=1.5,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            moe_layer_freq=1,
            num_nextn_predict_layers=1,
        ),
        style="hub",
        prompt_length=50,
        shards=3,
        served=True,
        overlooked={"routed_scaling_factor": 2.5},
    ),
)

SAME = (
    Case(
        "glm4_moe_lite-hub",
        _v3(
            rope_theta=1e6,
            routed_scaling_factor=1.8,
            n_group=1,
            topk_group=1,
            num_nextn_predict_layers=1,
            norm_topk_prob=True,
            partial_rotary_factor=1.0,
        ),
        style="hub",
        served=True,
        overlooked={"routed_scaling_factor": 2.5},
    ),
    Case("glm4_moe_lite-saved", _v3(n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse"])),
    Case(
        "youtu-hub",
        {**sizes(64, 96, 2, 4, 4), **_LATENT, "q_lora_rank": 20, "rope_theta": 5e5, "tie_word_embeddings": True},
        style="hub",
        served=True,
        overlooked={"rope_interleave": False},
    ),
)

_INDEX: dict[str, Any] = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 24}


def _sparse(heads: int = 4, **others: Any) -> dict:
    return _v3(heads, **{**_INDEX, **others})


def _sparse_dense(layers: int = 2, heads: int = 4, **others: Any) -> dict:
    """Return a model with sparse attention, and without experts."""
    return _dense(layers, heads, **{"q_lora_rank": 20, **_INDEX, **others})


_SHARED = ["full", "shared", "full", "shared"]
SPARSE = (
    Case("deepseek_v32-dense-layers", _sparse_dense(), prompt_length=40, overlooked={"index_topk": 128}),
    # Sequences are no longer than the number of tokens that a query attends to.
    Case("deepseek_v32-all-chosen", _sparse_dense(index_topk=128), prompt_length=40),
    # Selection begins during decoding.
    Case("deepseek_v32-chosen-later", _sparse_dense(index_topk=40), prompt_length=30, overlooked={"index_topk": 39}),
    Case(
        "deepseek_v32-odd-sizes",
        _sparse_dense(
            1, 3, hidden_size=57, q_lora_rank=19, **_ODD_LATENT, index_n_heads=5, index_head_dim=11, index_topk=7
        ),
        overlooked={"index_topk": 8},
    ),
    Case("deepseek_v32-one-token", _sparse_dense(1, index_topk=1), prompt_length=40, overlooked={"index_topk": 2}),
    Case(
        "deepseek_v32-hub",
        _sparse(
            rope_scaling={"type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            rope_theta=10000,
            routed_scaling_factor=1.5,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            moe_layer_freq=1,
            num_nextn_predict_layers=1,
        ),
        style="hub",
        prompt_length=50,
        shards=3,
        served=True,
        overlooked={"indexer_rope_interleave": True},
    ),
    Case("glm_moe_dsa-every-other", _sparse_dense(4, index_topk_freq=2), prompt_length=40),
    Case(
        "glm_moe_dsa-saved",
        _sparse(n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse"]),
        prompt_length=40,
        overlooked={"indexer_rope_interleave": False},
    ),
    Case(
        "glm_moe_dsa-hub",
        _sparse_dense(
            4,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
            num_nextn_predict_layers=1,
            rope_interleave=True,
            indexer_rope_interleave=True,
            index_topk_freq=2,
            index_skip_topk_offset=1,
            indexer_types=_SHARED,
        ),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"index_topk": 23},
    ),
)

CASES = (*V2, *V3, *SAME, *SPARSE)
