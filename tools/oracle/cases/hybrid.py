"""Models whose layers have a state of fixed size, some or all of them: Qwen3-Next, Qwen3.5, LFM2."""

from typing import Any

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}

COMMON: dict[str, dict] = {"qwen3_5": {}}

_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]


def _next(*numbers: Any, **others: Any) -> dict:
    return {**sizes(*numbers, head_dim=16, **_LINEAR), **_EXPERTS, **others}


def _dense(*numbers: Any, **others: Any) -> dict:
    return {**sizes(*numbers, head_dim=16, **_LINEAR), **others}


QWEN3_NEXT = (
    Case(
        "qwen3_next-hub",
        _next(
            *(40, 56, 4, 4, 2),
            full_attention_interval=4,
            rope_theta=1e7,
            rms_norm_eps=1e-4,  # outputs of a linear layer that are nearly zero blow roundings up
            partial_rotary_factor=0.25,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            mlp_only_layers=[],
        ),
        style="hub",
        shards=2,
        prompt_length=70,
        served=True,
        norm_centre=0.0,
        overlooked={"partial_rotary_factor": 0.5},
    ),
    Case(
        "qwen3_next-kinds-biased-dense-tied",
        _next(
            *(48, 40, 4, 4, 1),
            layer_types=_KINDS,
            attention_bias=True,
            mlp_only_layers=[2],
            norm_topk_prob=False,
            tie_word_embeddings=True,
            **rope("default", 1e4, partial_rotary_factor=0.5),
        ),
        norm_centre=0.0,
        overlooked={"num_experts_per_tok": 3},
    ),
    Case(
        "qwen3_next-one-value-head-each-two-taps",
        _next(*(40, 56, 2, 2, 2), full_attention_interval=2)
        | {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 2,
        },
        norm_centre=0.0,
    ),
)

QWEN3_5 = (
    Case("qwen3_5_text-dense", _dense(40, 56, 4, 4, 2), norm_centre=0.0, served=True, prompt_length=40),
    Case(
        "qwen3_5_moe_text-experts",
        {key: value for key, value in _next(40, 56, 4, 4, 2).items() if key != "intermediate_size"},
        norm_centre=0.0,
        served=True,
    ),
    Case(
        "qwen3_5-hub",
        {
            "text_config": {
                "model_type": "qwen3_5_text",
                "max_position_embeddings": 256,
                **_dense(40, 56, 4, 4, 2),
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": True,
                    "mrope_section": [1, 1, 0],
                },
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 40,
            },
        },
        style="hub",
        norm_centre=0.0,
        served=True,
    ),
)

_LFM2 = {"block_multiple_of": 8, "conv_L_cache": 3, "norm_eps": 1e-5}
_LFM2_MOE = _LFM2 | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}

LFM2 = (
    Case(
        "lfm2-hub",
        {
            **sizes(40, 56, 4, 4, 2),
            **_LFM2,
            "block_ff_dim": 60,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "conv_bias": False,
            "full_attn_idxs": [2],
            "rope_theta": 1e6,
        },
        style="hub",
        shards=2,
        prompt_length=70,
        served=True,
        overlooked={"rope_theta": 1e4},
    ),
    Case(
        "lfm2-biases-two-taps-untied",
        {
            **sizes(48, 40, 4, 4, 1),
            **_LFM2,
            "conv_L_cache": 2,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "tie_word_embeddings": False,
            **rope("default", 1e4),
        },
        overlooked={"norm_eps": 1e-2},
    ),
    Case(
        "lfm2_moe-hub",
        {
            **sizes(40, 56, 4, 4, 2),
            **_LFM2_MOE,
            "num_dense_layers": 1,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "rope_theta": 1e6,
        },
        style="hub",
        served=True,
        overlooked={"norm_topk_prob": False},
    ),
    Case(
        "lfm2_moe-scaled-without-bias",
        {
            **sizes(48, 40, 3, 4, 4),
            **_LFM2_MOE,
            "num_dense_layers": 0,
            "layer_types": ["full_attention", "conv", "conv"],
            "norm_topk_prob": False,
            "use_expert_bias": False,
            "routed_scaling_factor": 1.5,
        },
        overlooked={"routed_scaling_factor": 1.0},
    ),
)

CASES = QWEN3_NEXT + QWEN3_5 + LFM2
