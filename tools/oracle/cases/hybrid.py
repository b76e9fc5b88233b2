"""Models with a recurrent state of fixed size in some or all layers: Qwen3-Next, Qwen3.5, LFM2, and Mamba-2 models."""

from typing import Any

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}

COMMON: dict[str, dict] = {"qwen3_5": {}, "nemotron_h": {"max_position_embeddings": 256}}

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
            rms_norm_eps=1e-4,  # near-zero outputs of a linear layer amplify rounding errors
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
        "qwen3_next-gelu",
        _next(*(40, 56, 2, 4, 2), layer_types=_KINDS[:2], hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-4),
        norm_centre=0.0,
        served=True,
        overlooked={"hidden_act": "gelu"},
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

_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
    "shared_intermediate_size": 24,
    "rms_norm_eps": 1e-2,  # near-zero outputs of Mamba layers amplify rounding errors
}

GRANITE = (
    Case(
        "granitemoehybrid-hub",
        {
            **sizes(32, 20, 4, 4, 2, **_MAMBA, **_GRANITE),
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
            "tie_word_embeddings": True,
            "normalization_function": "rmsnorm",
            "rope_theta": 10000,
            "rope_scaling": None,
        },
        style="hub",
        shards=2,
        prompt_length=70,
        served=True,
        overlooked={"position_embedding_type": "rope"},
    ),
    Case(
        "granitemoehybrid-dense-rope-biases-groups",
        {
            **sizes(48, 56, 3, 4, 4, **_MAMBA, **_GRANITE),
            "mamba_n_heads": 6,
            "mamba_d_head": "auto",
            "mamba_n_groups": 3,
            "num_local_experts": 0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            **rope("default", 1e4),
        },
        overlooked={"residual_multiplier": 1.0},
    ),
    Case(
        "granitemoehybrid-attention-alone",
        {
            **sizes(40, 56, 2, 4, 1, **(_MAMBA | {"mamba_n_heads": 5}), **_GRANITE),
            "num_local_experts": 4,
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
            "rope_theta": 10000.0,
        },
        style="hub",
        overlooked={"num_experts_per_tok": 1},
    ),
)

_NEMOTRON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-2,
}
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
}

NEMOTRON = (
    Case(
        "nemotron_h-hub",
        {
            **_NEMOTRON,
            **_NEMOTRON_EXPERTS,
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "MEM*E",
            "routed_scaling_factor": 1.5,
            "time_step_limit": [0.0, float("inf")],
            "mlp_hidden_act": "relu2",
        },
        style="hub",
        shards=2,
        prompt_length=40,
        served=True,
        overlooked={"routed_scaling_factor": 1.0},
    ),
    Case(
        "nemotron_h-dense-biases",
        {
            **_NEMOTRON,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "n_groups": 4,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
        },
        overlooked={"mlp_hidden_act": "relu"},
    ),
    Case(
        "nemotron_h-latent-groups",
        {
            **_NEMOTRON,
            **_NEMOTRON_EXPERTS,
            "hybrid_override_pattern": "M*E",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "moe_latent_size": 20,
            "mlp_bias": True,
        },
        overlooked={"norm_topk_prob": True},
    ),
)

FALCON_H1 = (
    Case(
        "falcon_h1-hub",
        {
            **sizes(32, 48, 3, 4, 2, head_dim=16, **_MAMBA),
            "mamba_d_ssm": 64,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": False,
            "rope_theta": 1e11,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.4,
            "mlp_multipliers": [0.9, 0.6],
            "ssm_multipliers": [0.6, 0.7, 0.8, 0.5, 0.9],
        },
        style="hub",
        shards=2,
        prompt_length=40,
        served=True,
        overlooked={"key_multiplier": 1.0},
    ),
    Case(
        "falcon_h1-norm-before-gate-biases-tied",
        {
            **sizes(32, 48, 2, 4, 4, **_MAMBA),
            "mamba_d_ssm": 64,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "rms_norm_eps": 1e-2,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
        overlooked={"mamba_norm_before_gate": False},
    ),
    Case(
        "falcon_h1-norm-of-gated",
        {
            **sizes(32, 48, 2, 4, 1, **_MAMBA),
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "rms_norm_eps": 1e-2,
            "mlp_multipliers": [0.7, 0.5],
        },
        overlooked={"mlp_multipliers": [0.7, 1.0]},
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

CASES = QWEN3_NEXT + QWEN3_5 + GRANITE + NEMOTRON + FALCON_H1 + LFM2
