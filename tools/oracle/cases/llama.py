"""Llama, Mistral, Qwen2, Qwen3."""

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}

# With 64 original positions the wavelengths of head_dim 16 fall on both sides of the ramp and into it.
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3_HUB = {"rope_scaling": {**_LLAMA3, "rope_type": "llama3"}, "rope_theta": 500000.0}
_YARN_MSCALE = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 0.5,
    "mscale_all_dim": 0.25,
}
_FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0],
}
_YARN_QWEN = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}

LLAMA = (
    Case("llama-mha", sizes(64, 176, 2, 4, 4, rms_norm_eps=1e-5), prompt_length=33),
    Case("llama-stories-shape", sizes(64, 172, 3, 8, 4, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    Case("llama-mqa-head20", sizes(80, 128, 2, 4, 1, **rope("default", 500000.0))),
    Case("llama-tiny-hub", sizes(64, 176, 3, 8, 1, rope_theta=10000.0, torch_dtype="bfloat16"), style="hub"),
    Case("llama-biases", sizes(48, 96, 2, 4, 2, attention_bias=True, mlp_bias=True)),
    Case("llama-attention-bias", sizes(48, 96, 2, 2, 2, attention_bias=True), shards=2),
    Case("llama-mlp-bias", sizes(48, 100, 2, 2, 1, mlp_bias=True)),
    Case("llama-head80", sizes(64, 96, 2, 2, 1, head_dim=80)),
    Case("llama-head96-tied", sizes(96, 64, 2, 3, 3, head_dim=96, tie_word_embeddings=True), prompt_length=17),
    Case(
        "llama-hidden172",
        sizes(172, 203, 2, 4, 2, head_dim=20, vocab_size=61, rms_norm_eps=1e-3),
        overlooked={"rms_norm_eps": 1e-6},
    ),
    Case("llama-one-token-prompt", sizes(64, 96, 2, 4, 2), prompt_length=1),
    Case("llama-long-prompt", sizes(64, 96, 2, 4, 2, **rope("default", 10000.0)), prompt_length=150),
    Case(
        "llama-rope-llama3",
        sizes(64, 128, 2, 4, 2, **rope("llama3", 500000.0, **_LLAMA3)),
        prompt_length=70,
        overlooked={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    Case(
        "llama-rope-llama3-hub",
        sizes(64, 128, 2, 4, 2, **_LLAMA3_HUB),
        style="hub",
        prompt_length=70,
        shards=3,
        served=True,
        overlooked={"rope_theta": 10000.0},
    ),
    Case("llama-rope-llama3-tied-hub", sizes(64, 128, 2, 4, 1, **_LLAMA3_HUB, tie_word_embeddings=True), style="hub"),
    Case("llama-rope-linear", sizes(64, 96, 2, 4, 4, **rope("linear", 10000.0, factor=4.0))),
    Case(
        "llama-rope-linear-hub",
        sizes(64, 96, 2, 4, 4, rope_scaling={"type": "linear", "factor": 2.5}),
        style="hub",
        overlooked={"rope_scaling": None},
    ),
    Case(
        "llama-rope-yarn",
        sizes(64, 96, 2, 4, 2, **rope("yarn", 10000.0, factor=4.0, original_max_position_embeddings=64)),
        prompt_length=70,
        overlooked={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    Case(
        "llama-rope-yarn-mscale-hub",
        sizes(64, 96, 2, 4, 1, rope_scaling=_YARN_MSCALE),
        style="hub",
        prompt_length=50,
        overlooked={"rope_scaling": {**_YARN_MSCALE, "mscale": 1.0}},
    ),
    Case(
        "llama-rope-dynamic-hub",
        sizes(64, 96, 2, 4, 4, rope_scaling={"type": "dynamic", "factor": 2.0}, rope_theta=5e3),
        style="hub",
        prompt_length=40,
    ),
    Case(
        "llama-rope-longrope",
        sizes(
            64,
            96,
            2,
            4,
            2,
            **rope("longrope", 1e4, factor=8.0, original_max_position_embeddings=32, **_FACTORS),
        ),
        prompt_length=40,
        overlooked={"rope_parameters": None},
    ),
    Case("llama-oldest-hub", sizes(64, 172, 2, 4, None, rope_scaling=None, pretraining_tp=1), style="hub"),
)

MISTRAL = (
    Case(
        "mistral-window",
        sizes(64, 128, 3, 4, 2, sliding_window=8),
        prompt_length=40,
        served=True,
        overlooked={"sliding_window": 9},
    ),
    Case("mistral-window-hub", sizes(64, 128, 2, 4, 1, sliding_window=7, rope_theta=1e4), style="hub"),
    Case(
        "mistral-window-passed-in-decode",
        sizes(64, 128, 2, 4, 4, sliding_window=30),
        prompt_length=20,
        overlooked={"sliding_window": None},
    ),
    Case("mistral-full-head-dim", sizes(64, 128, 2, 4, 2, sliding_window=None, head_dim=32)),
    Case("mistral-full-tied-hub", sizes(64, 96, 2, 4, 2, sliding_window=None, tie_word_embeddings=True), style="hub"),
)

_MIXED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_HUB_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1, "rope_theta": 1000000.0}
_QWEN3_WINDOW = {**_MIXED, "sliding_window": 6, "max_window_layers": 2}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

QWEN2 = (
    Case("qwen2-bias", sizes(64, 128, 2, 4, 2, **rope("default", 1000000.0))),
    Case(
        "qwen2-tied-hub",
        sizes(56, 152, 2, 7, 1, **_HUB_WINDOW_OFF, tie_word_embeddings=True),
        style="hub",
        overlooked={"use_sliding_window": True},
    ),
    Case("qwen2-window-mixed", sizes(64, 96, 3, 4, 2, **_MIXED), prompt_length=36),
    Case(
        "qwen2-window-mixed-hub",
        sizes(64, 96, 3, 4, 4, **_MIXED, rope_theta=1000000.0),
        style="hub",
        overlooked={"max_window_layers": 2},
    ),
    Case(
        "qwen2-layer-types",
        sizes(64, 96, 3, 4, 2, **_MIXED, layer_types=_LAYER_TYPES),
        prompt_length=29,
        served=True,
        overlooked={"layer_types": None},
    ),
    Case(
        "qwen2-rope-yarn-hub",
        sizes(64, 96, 2, 4, 2, rope_theta=1000000.0, rope_scaling=_YARN_QWEN),
        style="hub",
        prompt_length=70,
        served=True,
        overlooked={"rope_scaling": None},
    ),
)

QWEN3 = (
    Case("qwen3-head-dim", sizes(64, 128, 2, 4, 2, head_dim=32, **rope("default", 1000000.0))),
    Case(
        "qwen3-tied-hub",
        sizes(64, 96, 2, 4, 1, **_HUB_WINDOW_OFF, head_dim=24, tie_word_embeddings=True),
        "hub",
        served=True,
    ),
    Case("qwen3-attention-bias", sizes(48, 96, 2, 2, 2, head_dim=80, attention_bias=True, rms_norm_eps=1e-3)),
    Case(
        "qwen3-rope-yarn-factor",
        sizes(
            64,
            96,
            2,
            4,
            2,
            head_dim=24,
            **rope(
                "yarn",
                50000.0,
                factor=4.0,
                original_max_position_embeddings=128,
                attention_factor=0.8,
                truncate=False,
            ),
        ),
        prompt_length=40,
    ),
    Case("qwen3-window-mixed", sizes(64, 96, 4, 4, 2, **_QWEN3_WINDOW, head_dim=16), prompt_length=31),
)

_YARN_MINISTRAL = {"factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}

SAME = (
    Case("seed_oss-hub", sizes(64, 96, 2, 4, 2, head_dim=24, rope_theta=1e7), style="hub", served=True),
    Case("seed_oss-biases", sizes(64, 96, 2, 4, 2, head_dim=16, attention_out_bias=True, mlp_bias=True)),
    Case(
        "ministral3-hub",
        sizes(
            64,
            96,
            2,
            4,
            2,
            head_dim=16,
            rope_parameters={
                "rope_type": "yarn",
                "type": "yarn",
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.1,
                **_YARN_MINISTRAL,
            },
        ),
        style="hub",
        prompt_length=70,
        served=True,
        overlooked={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.0,
                **_YARN_MINISTRAL,
            }
        },
    ),
)

CASES = (*LLAMA, *MISTRAL, *QWEN2, *QWEN3, *SAME)
