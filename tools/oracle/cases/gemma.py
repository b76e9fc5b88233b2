"""Gemma 1, 2 and 3 (text)."""

import dataclasses

from tools.oracle.cases.case import Case, sizes

ARCHITECTURES = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}

_TANH = {"hidden_act": "gelu_pytorch_tanh"}

GEMMA = (
    Case(
        "gemma-two-tables-hub",
        sizes(48, 64, 1, 2, 1, head_dim=16, **_TANH),
        style="hub",
        served=True,
        tables=("embed", "head"),
        overlooked={"hidden_act": "silu"},
    ),
    Case("gemma-head-alone-hub", sizes(48, 64, 1, 2, 1, head_dim=16, **_TANH), style="hub", tables=("head",)),
    Case("gemma-mqa", sizes(48, 96, 2, 4, 1, head_dim=16, **_TANH), overlooked={"hidden_act": "silu"}),
    Case(
        "gemma-gelu-hub",
        sizes(64, 80, 2, 4, 4, head_dim=20, hidden_act="gelu", rope_theta=1e4, rope_scaling=None),
        style="hub",
        served=True,
        overlooked={"rope_theta": 1e6},
    ),
    Case(
        "gemma-untied-bias",
        sizes(40, 96, 2, 4, 2, head_dim=8, attention_bias=True, tie_word_embeddings=False, **_TANH),
        prompt_length=17,
    ),
)

# Both caps have an effect: scores reach 3 and more, logits 2.
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}

GEMMA2 = (
    Case(
        "gemma2-window",
        sizes(64, 96, 4, 4, 2, head_dim=16, sliding_window=8, **_CAPS),
        prompt_length=40,
        served=True,
        overlooked={"sliding_window": 9},
    ),
    Case(
        "gemma2-score-cap",
        sizes(64, 96, 2, 4, 1, head_dim=16, attn_logit_softcapping=1.0, final_logit_softcapping=None),
        overlooked={"attn_logit_softcapping": None},
    ),
    Case(
        "gemma2-logit-cap-hub",
        sizes(48, 96, 2, 4, 4, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0, rope_theta=1e4),
        style="hub",
        overlooked={"final_logit_softcapping": None},
    ),
    Case(
        "gemma2-default-caps-hub",
        sizes(48, 96, 2, 4, 2, head_dim=16, rope_theta=1e4, query_pre_attn_scalar=100),
        style="hub",
        overlooked={"attn_logit_softcapping": None},
    ),
    Case(
        "gemma2-scalar",
        sizes(48, 64, 2, 3, 1, head_dim=24, query_pre_attn_scalar=144, **_CAPS),
        overlooked={"query_pre_attn_scalar": 256},
    ),
    Case(
        "gemma2-window-passed-in-decode",
        sizes(64, 96, 3, 4, 2, head_dim=20, sliding_window=30),
        prompt_length=20,
        overlooked={"sliding_window": 256},
    ),
    Case(
        "gemma2-layer-types",
        sizes(
            64,
            96,
            3,
            4,
            2,
            head_dim=16,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        prompt_length=29,
        shards=2,
        overlooked={"layer_types": None},
    ),
    Case(
        "gemma2-untied-bias",
        sizes(
            48, 100, 2, 2, 1, head_dim=80, attention_bias=True, tie_word_embeddings=False, query_pre_attn_scalar=1280
        ),
    ),
)

_THETAS = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64}

GEMMA3 = (
    Case(
        "gemma3_text-pattern-hub",
        sizes(64, 96, 4, 4, 1, head_dim=16, sliding_window=8, sliding_window_pattern=3, **_THETAS),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"rope_local_base_freq": 1e6},
    ),
    Case(
        "gemma3_text-six-layers",
        sizes(32, 48, 7, 2, 1, head_dim=16, sliding_window=12),
        prompt_length=30,
        overlooked={"layer_types": None, "sliding_window_pattern": 7},
    ),
    Case(
        "gemma3_text-linear-hub",
        sizes(64, 96, 3, 4, 2, head_dim=20, sliding_window=8, sliding_window_pattern=2, rope_scaling=_LINEAR),
        style="hub",
        prompt_length=33,
        overlooked={"rope_scaling": None},
    ),
    Case(
        "gemma3_text-yarn",
        sizes(
            64,
            96,
            3,
            4,
            2,
            head_dim=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}},
        ),
        prompt_length=70,
        overlooked={
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e5}, "sliding_attention": {}}
        },
    ),
    Case(
        "gemma3_text-logit-cap",
        sizes(48, 64, 2, 4, 4, head_dim=16, query_pre_attn_scalar=100, final_logit_softcapping=2.0),
        overlooked={"final_logit_softcapping": None},
    ),
    Case(
        "gemma3_text-untied-bias-decode-window",
        sizes(
            40,
            96,
            2,
            4,
            2,
            head_dim=12,
            attention_bias=True,
            tie_word_embeddings=False,
            sliding_window=25,
            sliding_window_pattern=2,
        ),
        prompt_length=15,
        shards=2,
        overlooked={"sliding_window": 26},
    ),
)

CASES = tuple(dataclasses.replace(case, norm_centre=0.0) for case in (*GEMMA, *GEMMA2, *GEMMA3))
