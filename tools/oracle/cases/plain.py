"""Families close to Llama: other names of its switches, ungated MLPs, other norms."""

from typing import Any

from tools.oracle.cases.case import Case, rope, sizes

ARCHITECTURES = {
    "internlm3": "InternLM3ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "dots1": "Dots1ForCausalLM",
}


def _sizes(layers: int, heads: int, kv_heads: int | None, **others: Any) -> dict:
    return sizes(64, 96, layers, heads, kv_heads, **{"vocab_size": 32, **others})


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

INTERNLM3 = (
    Case(
        "internlm3-hub",
        _sizes(2, 4, 2, head_dim=16, bias=True, qkv_bias=True, rope_theta=5e4, rms_norm_eps=1e-5)
        | {"rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}},
        style="hub",
        served=True,
        overlooked={"rope_theta": 1e3},
    ),
)

ARCEE = (
    Case(
        "arcee-hub",
        _sizes(2, 4, 2, head_dim=20, rope_theta=1e4, rms_norm_eps=1e-5, mlp_bias=True),
        style="hub",
        served=True,
        overlooked={"hidden_act": "relu"},
    ),
)

APERTUS = (
    Case(
        "apertus-hub",
        _sizes(2, 4, 2, hidden_act="xielu", qk_norm=True, post_norm=False, rope_theta=1.2e4, rms_norm_eps=1e-5)
        | {"rope_scaling": {**_LLAMA3, "rope_type": "llama3", "type": "llama3"}},
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"rope_scaling": None},
    ),
    Case("apertus-biases", _sizes(2, 4, 4, hidden_act="xielu", attention_bias=True, **rope("default", 1e4)), shards=2),
)

NEMOTRON = (
    Case(
        "nemotron-hub",
        _sizes(2, 4, 2, head_dim=24, hidden_act="relu2", norm_eps=1e-5, rope_theta=1e4, partial_rotary_factor=0.25),
        style="hub",
        served=True,
        norm_centre=0.0,
        overlooked={"partial_rotary_factor": 0.5},
    ),
    Case(
        "nemotron-biases",
        _sizes(2, 4, 4, attention_bias=True, mlp_bias=True, norm_eps=1e-3, hidden_act="relu2"),
        norm_centre=0.0,
        overlooked={"norm_eps": 1e-5},
    ),
)

_EIGHT = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24}

DOTS1 = (
    Case(
        "dots1-hub",
        _sizes(3, 4, 2, **_EIGHT, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5)
        | {"rope_theta": 1e4, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-5},
        style="hub",
        served=True,
        overlooked={"norm_topk_prob": False},
    ),
    Case(
        "dots1-windows",
        _sizes(2, 4, 4, **_EIGHT, attention_bias=True, sliding_window=8, max_window_layers=1, n_group=2),
        prompt_length=40,
        overlooked={"sliding_window": 16},
    ),
)

CASES = (*INTERNLM3, *ARCEE, *APERTUS, *NEMOTRON, *DOTS1)
