"""Dense families that differ from Llama in norms, multipliers, positions or the order of their operations."""

from typing import Any

from tools.oracle.cases.case import Case, sizes

ARCHITECTURES = {
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
}

# Defaults of config.json for all cases.
COMMON: dict[str, dict] = {}


def _sizes(layers: int, heads: int, kv_heads: int | None, **others: Any) -> dict:
    return sizes(64, 96, layers, heads, kv_heads, **{"vocab_size": 32, **others})


_OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

OLMO = (
    Case(
        "olmo2-hub",
        _sizes(2, 4, 2, rope_theta=500000, rms_norm_eps=1e-6),
        style="hub",
        served=True,
        overlooked={"rms_norm_eps": 1e-1},
    ),
    Case(
        "olmo3-yarn-hub",
        _sizes(5, 4, 2, sliding_window=8, rope_theta=500000, rope_scaling=_OLMO3_YARN),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"rope_scaling": None},
    ),
    Case(
        "olmo3-layer-types",
        _sizes(3, 4, 1, sliding_window=6) | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        prompt_length=21,
        overlooked={"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
)

_MULTIPLIERS = {
    "embedding_multiplier": 0.7,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.125,
    "logits_scaling": 0.5,
}

GRANITE = (
    Case(
        "granite-hub",
        _sizes(2, 4, 2, rope_theta=1e7, rope_scaling=None, tie_word_embeddings=False, **_MULTIPLIERS),
        style="hub",
        served=True,
        overlooked={"attention_multiplier": 0.25},
    ),
    Case(
        "granite-biases",
        _sizes(2, 4, 1, attention_bias=True, mlp_bias=True, residual_multiplier=0.5),
        overlooked={"residual_multiplier": 1.0},
    ),
    Case("granite-tied-hub", _sizes(2, 4, 2, tie_word_embeddings=True, **_MULTIPLIERS), style="hub"),
)

SMOLLM3 = (
    Case(
        "smollm3-hub",
        _sizes(
            4,
            4,
            2,
            rope_theta=5e6,
            no_rope_layers=[1, 0, 1, 0],
            tie_word_embeddings=False,
            pad_token_id=0,
            max_window_layers=28,
        ),
        style="hub",
        prompt_length=33,
        served=True,
        overlooked={"no_rope_layers": [1, 1, 1, 0]},
    ),
    Case(
        "smollm3-windows",
        _sizes(
            4,
            4,
            2,
            pad_token_id=0,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=7,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        overlooked={"sliding_window": 8},
    ),
    Case("smollm3-tied-hub", _sizes(4, 4, 2, rope_theta=5e6, no_rope_layer_interval=4, pad_token_id=0), style="hub"),
)

_UNTIED = {"tie_word_embeddings": False}

COHERE = (
    Case(
        "cohere-hub",
        _sizes(2, 4, 2, use_qk_norm=True, logit_scale=0.8, layer_norm_eps=1e-5, rope_theta=75e6, **_UNTIED),
        style="hub",
        served=True,
        overlooked={"logit_scale": 1.0},
    ),
    Case("cohere-tied-hub", _sizes(2, 4, 2, logit_scale=0.25), style="hub"),
    Case("cohere-biases", _sizes(2, 4, 4, attention_bias=True, logit_scale=1.5, head_dim=24, **_UNTIED)),
    Case(
        "cohere2-hub",
        _sizes(4, 4, 2, sliding_window=8, sliding_window_pattern=2, logit_scale=0.9, rope_theta=5e4, **_UNTIED),
        style="hub",
        prompt_length=29,
        served=True,
        overlooked={"sliding_window_pattern": 4},
    ),
    Case("cohere2-tied-hub", _sizes(4, 4, 2, sliding_window=8, logit_scale=0.5), style="hub", prompt_length=29),
)

GLM = (
    Case(
        "glm-hub",
        _sizes(2, 4, 2, head_dim=16, attention_bias=True, pad_token_id=0, rope_theta=1e4),
        style="hub",
        served=True,
        overlooked={"partial_rotary_factor": 1.0},
    ),
    Case(
        "glm4-hub",
        _sizes(2, 4, 2, head_dim=32, attention_bias=False, pad_token_id=0, partial_rotary_factor=0.25),
        style="hub",
        served=True,
        overlooked={"partial_rotary_factor": 0.5},
    ),
    Case("glm4-biases", _sizes(2, 4, 1, head_dim=16, attention_bias=True, pad_token_id=0)),
)

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

EXAONE4 = (
    Case(
        "exaone4-hub",
        _sizes(4, 4, 2, sliding_window=8, sliding_window_pattern=2, rope_theta=1e6, rope_scaling=_LLAMA3),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"sliding_window_pattern": 4},
    ),
    Case(
        "exaone4-full",
        _sizes(2, 4, 2, sliding_window=None, layer_types=["full_attention"] * 2),
        overlooked={"sliding_window": 4096},
    ),
)

ERNIE = (
    Case(
        "ernie4_5-hub",
        _sizes(2, 4, 2, head_dim=24, rope_theta=5e5, use_bias=True, **_UNTIED),
        style="hub",
        served=True,
        overlooked={"rope_theta": 1e3},
    ),
    Case("ernie4_5-tied-hub", _sizes(2, 4, 2, head_dim=24, rope_theta=5e5, use_bias=False), style="hub"),
)

HUNYUAN = (
    Case(
        "hunyuan_v1_dense-alpha-hub",
        _sizes(2, 4, 2, head_dim=16, rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0}, rope_theta=1e3),
        style="hub",
        served=True,
        overlooked={"rope_scaling": None},
    ),
    Case("hunyuan_v1_dense-biases", _sizes(2, 4, 1, head_dim=24, attention_bias=True)),
    Case("hunyuan_v1_dense-tied-hub", _sizes(2, 4, 2, head_dim=16, tie_word_embeddings=True), style="hub"),
)

NEOX = (
    Case(
        "gpt_neox-hub",
        _sizes(2, 4, None, rotary_pct=0.5, rotary_emb_base=1e3),
        style="hub",
        served=True,
        overlooked={"rotary_pct": 0.25},
    ),
    Case(
        "gpt_neox-serial",
        _sizes(2, 4, None, use_parallel_residual=False, attention_bias=False),
        overlooked={"use_parallel_residual": True},
    ),
)

STARCODER2 = (
    Case(
        "starcoder2-hub",
        _sizes(2, 4, 2, sliding_window=8, norm_epsilon=1e-5, rope_theta=1e5, **_UNTIED),
        style="hub",
        served=True,
        overlooked={"sliding_window": None},
    ),
    Case("starcoder2-tied-hub", _sizes(2, 4, 2, sliding_window=8), style="hub"),
    Case("starcoder2-plain", _sizes(2, 4, 1, use_bias=False, hidden_act="gelu", **_UNTIED)),
)

STABLELM = (
    Case(
        "stablelm-hub",
        _sizes(2, 4, 4, use_qkv_bias=True, partial_rotary_factor=0.5, rope_theta=1e4),
        style="hub",
        served=True,
        overlooked={"partial_rotary_factor": 0.25},
    ),
    Case(
        "stablelm-parallel",
        _sizes(2, 4, 2, qk_layernorm=True, use_parallel_residual=True),
        overlooked={"use_parallel_residual": False},
    ),
)

CASES = (
    *(*OLMO, *GRANITE, *SMOLLM3, *COHERE, *GLM, *EXAONE4),
    *(*ERNIE, *HUNYUAN, *NEOX, *STARCODER2, *STABLELM),
)
