"""Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss."""

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

_EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}

MIXTRAL = (
    Case(
        "mixtral-two-of-eight",
        sizes(48, 40, 2, 4, 2, **_EIGHT),
        prompt_length=33,
        overlooked={"num_experts_per_tok": 3},
    ),
    Case(
        "mixtral-hub",
        sizes(40, 28, 2, 4, 1, **_EIGHT, rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None),
        style="hub",
        shards=2,
        served=True,
        overlooked={"rope_theta": 10000.0},
    ),
    Case(
        "mixtral-window-tied",
        sizes(48, 33, 2, 2, 2, num_local_experts=3, num_experts_per_tok=1, sliding_window=9, tie_word_embeddings=True),
        prompt_length=30,
        overlooked={"sliding_window": 10},
    ),
    Case(
        "mixtral-window-passed-in-decode-head20",
        sizes(48, 24, 2, 4, 4, **_EIGHT, sliding_window=30, head_dim=20),
        prompt_length=17,
        overlooked={"sliding_window": None},
    ),
)

_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_SHARED = {**_QWEN, "shared_expert_intermediate_size": 28}

QWEN2_MOE = (
    Case(
        "qwen2_moe-hub",
        sizes(40, 72, 2, 4, 4, **_SHARED, rope_theta=1e6, use_sliding_window=False, sliding_window=8, qkv_bias=True),
        style="hub",
        served=True,
        overlooked={"norm_topk_prob": True},
    ),
    Case("qwen2_moe-tied", sizes(48, 40, 2, 4, 2, **_SHARED, tie_word_embeddings=True), shards=2),
    Case(
        "qwen2_moe-renormalised",
        sizes(48, 40, 2, 4, 1, **_SHARED, norm_topk_prob=True),
        overlooked={"norm_topk_prob": False},
    ),
    Case("qwen2_moe-without-bias", sizes(48, 40, 2, 2, 2, **_SHARED, qkv_bias=False)),
    Case("qwen2_moe-dense-layers", sizes(40, 56, 4, 2, 1, **_SHARED, decoder_sparse_step=2, mlp_only_layers=[3])),
    Case(
        "qwen2_moe-window-hub",
        sizes(40, 56, 4, 4, 2, **_SHARED, use_sliding_window=True, sliding_window=7, max_window_layers=3),
        style="hub",
        prompt_length=30,
        overlooked={"max_window_layers": 2},
    ),
)

QWEN3_MOE = (
    Case(
        "qwen3_moe-hub",
        sizes(40, 72, 2, 4, 2, **_QWEN, head_dim=16, norm_topk_prob=True, rope_theta=1e6, sliding_window=None),
        style="hub",
        served=True,
        overlooked={"norm_topk_prob": False},
    ),
    Case("qwen3_moe-many-experts", sizes(32, 72, 2, 4, 1, **{**_QWEN, "num_experts": 33, "num_experts_per_tok": 5})),
    Case(
        "qwen3_moe-window-tied",
        sizes(48, 40, 2, 4, 4, **_QWEN, use_sliding_window=True, sliding_window=8, tie_word_embeddings=True),
        prompt_length=30,
        overlooked={"sliding_window": 9},
    ),
    Case("qwen3_moe-bias-dense-layers", sizes(48, 52, 3, 2, 1, **_QWEN, attention_bias=True, mlp_only_layers=[0])),
)

# With 64 original positions the wavelengths of head_dim 16 fall on both sides of the ramp and into it.
_YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}
_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}

GPT_OSS = (
    Case(
        "gpt_oss-hub",
        sizes(40, 24, 2, 4, 2, **_OSS, sliding_window=9, rope_theta=150000.0)
        | {"rope_scaling": {**_YARN, "rope_type": "yarn"}, "experts_per_token": 2, "swiglu_limit": 7.0},
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"rope_scaling": {"rope_type": "default"}},
    ),
    Case(
        "gpt_oss-clamped",
        sizes(48, 32, 2, 4, 1, **_OSS, sliding_window=30, swiglu_limit=0.8, swiglu_alpha=1.2),
        shards=2,
        overlooked={"swiglu_limit": 7.0},
    ),
    Case(
        "gpt_oss-layer-types-tied",
        sizes(48, 20, 3, 4, 4, **_OSS, sliding_window=8, tie_word_embeddings=True, **rope("yarn", 150000.0, **_YARN))
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        prompt_length=30,
        overlooked={"layer_types": None},
    ),
    Case(
        "gpt_oss-without-bias",
        sizes(40, 24, 2, 2, 1, **{**_OSS, "head_dim": 24}, attention_bias=False, **rope("default", 10000.0)),
        overlooked={"swiglu_alpha": 1.0},
    ),
)

CASES = (*MIXTRAL, *QWEN2_MOE, *QWEN3_MOE, *GPT_OSS)
