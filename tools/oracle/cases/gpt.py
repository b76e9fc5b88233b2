"""GPT-2, GPT-J, Phi-1/2 and Falcon: layer norms, ungated MLPs, parallel blocks, learned and partial positions."""

from tools.oracle.cases.case import Case, rope

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "phi": "PhiForCausalLM",
    "falcon": "FalconForCausalLM",
}

# Defaults of config.json for all cases, with the field names of the family.
COMMON = {
    "gpt2": {"n_positions": 256},
    "gptj": {"n_positions": 256},
    "phi": {"max_position_embeddings": 256},
    "falcon": {"max_position_embeddings": 256},
}


def _gpt(hidden: int, layers: int, heads: int, **others: object) -> dict:
    return {"vocab_size": 64, "n_embd": hidden, "n_layer": layers, "n_head": heads, **others}


def _model(hidden: int, layers: int, heads: int, **others: object) -> dict:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"vocab_size": 64, **sizes, **others}


# Further fields of the published files: none changes a logit.
_GPT2_HUB = {"n_ctx": 256, "attn_pdrop": 0.1, "summary_type": "cls_index", "task_specific_params": {}}
_GPTJ_HUB = {"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False, "n_inner": None}

GPT2 = (
    Case("gpt2-hub", _gpt(64, 2, 4, **_GPT2_HUB), style="hub", served=True, shards=2),
    Case(
        "gpt2-untied-inner",
        _gpt(60, 2, 3, n_inner=100, tie_word_embeddings=False),
        overlooked={"layer_norm_epsilon": 1e-2},
    ),
    Case("gpt2-one-head", _gpt(20, 3, 1), prompt_length=1),
    Case("gpt2-relu", _gpt(64, 2, 4, activation_function="relu"), overlooked={"activation_function": "gelu_new"}),
    Case(
        "gpt2-epsilon",
        _gpt(48, 2, 4, layer_norm_epsilon=1e-4, tie_word_embeddings=False),
        overlooked={"layer_norm_epsilon": 1e-5},
    ),
    Case(
        "gpt2-scale-by-layer",
        _gpt(64, 3, 4, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
        overlooked={"scale_attn_by_inverse_layer_idx": False},
    ),
    Case(
        "gpt2-unscaled-hub",
        _gpt(64, 2, 8, scale_attn_weights=False, tie_word_embeddings=False),
        style="hub",
        overlooked={"scale_attn_weights": True},
    ),
    Case("gpt2-long-prompt", _gpt(64, 2, 4, tie_word_embeddings=False), prompt_length=150),
)

GPTJ = (
    Case(
        "gptj-partial",
        _gpt(64, 2, 4, rotary_dim=8),
        served=True,
        overlooked={"rotary_dim": 16},
    ),
    Case("gptj-hub", _gpt(80, 2, 4, rotary_dim=12, **_GPTJ_HUB), style="hub", overlooked={"rotary_dim": 10}, shards=2),
    Case("gptj-whole-head", _gpt(96, 2, 3, rotary_dim=32, n_inner=72), prompt_length=70),
    Case("gptj-tied", _gpt(64, 2, 2, rotary_dim=24, tie_word_embeddings=True), prompt_length=17),
    Case(
        "gptj-gelu",
        _gpt(48, 2, 2, rotary_dim=2, activation_function="gelu", layer_norm_epsilon=1e-3),
        overlooked={"layer_norm_epsilon": 1e-5},
    ),
)

PHI = (
    Case(
        "phi-half",
        _model(64, 2, 4, intermediate_size=128),
        served=True,
        overlooked=rope("default", 10000.0, partial_rotary_factor=0.25),
    ),
    Case(
        "phi-hub",
        _model(80, 2, 4, intermediate_size=96, partial_rotary_factor=0.4, rope_theta=10000.0, rope_scaling=None),
        style="hub",
        overlooked={"partial_rotary_factor": None},
    ),
    Case(
        "phi-qk-layernorm",
        _model(64, 2, 4, intermediate_size=128, qk_layernorm=True, layer_norm_eps=1e-3),
        overlooked={"layer_norm_eps": 1e-5},
    ),
    Case("phi-grouped", _model(60, 2, 6, intermediate_size=100, num_key_value_heads=2, partial_rotary_factor=0.8)),
    Case("phi-one-kv-head-hub", _model(64, 2, 4, intermediate_size=64, num_key_value_heads=1), style="hub", shards=2),
    Case(
        "phi-linear",
        _model(64, 2, 2, intermediate_size=96, **rope("linear", 5000.0, factor=4.0, partial_rotary_factor=0.25)),
        prompt_length=70,
        overlooked={"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}},
    ),
    Case("phi-tied", _model(48, 2, 4, intermediate_size=100, tie_word_embeddings=True, hidden_act="relu")),
)

_GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
_RW = {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}

FALCON = (
    # Config of tiiuae/falcon-7b, where num_kv_heads has no effect.
    Case(
        "falcon-7b-hub",
        _model(64, 2, 4, num_kv_heads=4, multi_query=True, parallel_attn=True, bias=False, alibi=False),
        style="hub",
        served=True,
        overlooked={"layer_norm_epsilon": 1e-2},
    ),
    Case("falcon-40b-hub", _model(64, 2, 8, **_GROUPED, parallel_attn=True, multi_query=True), style="hub", shards=2),
    Case(
        "falcon-11b",
        _model(60, 2, 6, **_GROUPED, num_ln_in_parallel_attn=1, ffn_hidden_size=100, tie_word_embeddings=False),
    ),
    Case("falcon-untied-bias", _model(64, 2, 4, **_GROUPED, tie_word_embeddings=False, bias=True)),
    Case(
        "falcon-theta",
        _model(96, 2, 3, rope_theta=500.0, activation="gelu_new", tie_word_embeddings=False),
        style="hub",
        overlooked={"rope_theta": 10000.0},
    ),
    Case("falcon-rw-hub", _model(64, 3, 8, **_RW), style="hub", prompt_length=40),
    Case("falcon-rw-six-heads", _model(60, 2, 6, **_RW), prompt_length=33),
    Case("falcon-rw-rotary", _model(64, 2, 4, **_RW | {"alibi": False}, tie_word_embeddings=False), prompt_length=33),
    Case("falcon-alibi-parallel", _model(48, 2, 3, multi_query=False, alibi=True, tie_word_embeddings=False)),
    Case("falcon-alibi-new", _model(64, 2, 4, new_decoder_architecture=True, alibi=True, tie_word_embeddings=False)),
    Case(
        "falcon-sequential",
        _model(64, 3, 4, parallel_attn=False, tie_word_embeddings=False),
        overlooked={"layer_norm_epsilon": 1e-2},
    ),
    Case("falcon-long-prompt", _model(64, 2, 4, tie_word_embeddings=False), prompt_length=150),
)

CASES = (*GPT2, *GPTJ, *PHI, *FALCON)
