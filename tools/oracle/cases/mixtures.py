"""GLM-4.5, MiniMax-M2, Llama 4, OLMoE, Phi-3.5-MoE, Ernie 4.5, Granite 3."""

from typing import Any

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
}

_GLM: dict[str, Any] = {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

GLM4_MOE = (
    Case(
        "glm4_moe-hub",
        sizes(64, 96, 2, 4, 2, **_GLM, attention_bias=True, use_qk_norm=True, rope_theta=1e6, rope_scaling=None)
        | {"partial_rotary_factor": 0.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1},
        style="hub",
        served=True,
        overlooked={"partial_rotary_factor": 1.0},
    ),
    Case(
        "glm4_moe-groups-tied",
        sizes(48, 40, 2, 4, 4, **{**_GLM, "head_dim": 20}, n_group=4, topk_group=2, tie_word_embeddings=True)
        | {"norm_topk_prob": False, "n_shared_experts": 2},
        shards=2,
        overlooked={"topk_group": 4},
    ),
    Case(
        "glm4_moe-all-sparse-yarn",
        sizes(40, 40, 2, 4, 1, **{**_GLM, "first_k_dense_replace": 0}, use_qk_norm=True)
        | rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5),
        prompt_length=50,
        overlooked={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    Case(
        "glm4_moe-two-dense",
        sizes(40, 56, 3, 4, 2, **{**_GLM, "first_k_dense_replace": 2}, attention_bias=True, routed_scaling_factor=1.5),
        overlooked={"routed_scaling_factor": 1.0},
    ),
)

_EIGHT: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}

MINIMAX_M2 = (
    Case(
        "minimax_m2-hub",
        sizes(64, 24, 2, 4, 2, **_EIGHT, head_dim=24, rope_theta=5e6, rotary_dim=12, scoring_func="sigmoid")
        | {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "attn_type_list": [1, 1]}
        | {"num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_mtp": True, "shared_intermediate_size": 0},
        style="hub",
        served=True,
        overlooked={"rotary_dim": None},
    ),
    Case(
        "minimax_m2-whole-heads-tied",
        sizes(48, 20, 2, 4, 1, **_EIGHT, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-3),
        shards=2,
        overlooked={"rms_norm_eps": 1e-6},
    ),
)

_LLAMA4: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "head_dim": 16,
    "intermediate_size_mlp": 72,
    "attention_chunk_size": 256,
    "floor_scale": 8,
}
_LLAMA4_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}

LLAMA4 = (
    Case(
        "llama4_text-hub",
        sizes(64, 24, 4, 4, 2, **_LLAMA4, rope_theta=5e5, no_rope_layers=[], interleave_moe_layer_step=2)
        | {"rope_scaling": {"rope_type": "llama3", **_LLAMA4_ROPE}},
        style="hub",
        prompt_length=50,
        served=True,
        overlooked={"floor_scale": 8192},
    ),
    Case(
        "llama4_text-plain-heads-tied",
        sizes(48, 20, 2, 4, 1, **{**_LLAMA4, "num_experts_per_tok": 2}, use_qk_norm=False, attention_bias=True)
        | {"no_rope_layers": [0, 1], "moe_layers": [0, 1], "tie_word_embeddings": True},
        shards=2,
        overlooked={"no_rope_layers": [1, 0]},
    ),
    Case(
        "llama4_text-not-tuned",
        sizes(40, 20, 2, 2, 2, **_LLAMA4, no_rope_layer_interval=2, attn_temperature_tuning=False),
        prompt_length=40,
        overlooked={"use_qk_norm": False},
    ),
)

OLMOE = (
    Case(
        "olmoe-hub",
        sizes(64, 24, 2, 4, 4, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False, clip_qkv=None),
        style="hub",
        served=True,
        overlooked={"norm_topk_prob": True},
    ),
    Case(
        "olmoe-biases-tied",
        sizes(48, 20, 2, 4, 2, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True)
        | {"tie_word_embeddings": True},
        shards=2,
        overlooked={"num_experts_per_tok": 3},
    ),
)

_MSCALE = {"short_mscale": 1.25, "long_mscale": 1.25}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5], "long_factor": [4.0] * 8}

PHIMOE = (
    Case(
        "phimoe-hub",
        sizes(64, 24, 2, 4, 2, num_local_experts=8, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True)
        | {"rope_scaling": {"type": "longrope", **_LONG, **_MSCALE, "original_max_position_embeddings": 256}}
        | {"original_max_position_embeddings": 256, "sliding_window": 256, "router_jitter_noise": 0.3},
        style="hub",
        served=True,
        overlooked={"router_jitter_noise": 0.01},
    ),
    Case(
        "phimoe-window-tied",
        sizes(48, 20, 2, 4, 4, num_local_experts=4, num_experts_per_tok=2, sliding_window=9, tie_word_embeddings=True),
        prompt_length=30,
        overlooked={"sliding_window": 10},
    ),
)

_ERNIE: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2}

ERNIE4_5_MOE = (
    Case(
        "ernie4_5_moe-hub",
        sizes(64, 96, 2, 4, 2, **_ERNIE, rope_theta=5e5, use_bias=False, tie_word_embeddings=True)
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
        style="hub",
        served=True,
        overlooked={"rope_theta": 1e4},
    ),
    Case(
        "ernie4_5_moe-between-dense-layers",
        sizes(48, 40, 4, 4, 1, **{**_ERNIE, "moe_num_shared_experts": 0}, head_dim=16, tie_word_embeddings=False)
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2, "moe_norm_min": 0.5},
        shards=2,
        overlooked={"moe_norm_min": 1e-12},
    ),
)

_GRANITE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 0.7,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.125,
    "logits_scaling": 0.5,
}

GRANITEMOE = (
    Case(
        "granitemoe-hub",
        sizes(64, 24, 2, 4, 2, **_GRANITE, rope_theta=1e4, rope_scaling=None, tie_word_embeddings=True),
        style="hub",
        served=True,
        overlooked={"residual_multiplier": 1.0},
    ),
    Case(
        "granitemoeshared-hub",
        sizes(48, 20, 2, 4, 1, **_GRANITE, shared_intermediate_size=28, attention_bias=True),
        style="hub",
        shards=2,
        served=True,
        overlooked={"logits_scaling": 1.0},
    ),
    Case(
        "granitemoeshared-without",
        sizes(40, 20, 2, 4, 4, **_GRANITE, shared_intermediate_size=0, head_dim=12),
        overlooked={"num_experts_per_tok": 2},
    ),
)

CASES = (*GLM4_MOE, *MINIMAX_M2, *LLAMA4, *OLMOE, *PHIMOE, *ERNIE4_5_MOE, *GRANITEMOE)
