"""Cases of PEFT adapters: one feature of LoRA, or one family, at a time. Data only."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.oracle.cases.case import sizes


@dataclasses.dataclass(frozen=True)
class AdapterCase:
    """An adapter of a tiny model.

    Attributes:
        name: unique; the first word is transformers' model type.
        config: the model's config.json.
        lora: arguments of PEFT's LoraConfig.
        norm_centre: see `Case`.
        storage: storage of the model's linear weights: int8 or nf4, as bitsandbytes stores them; None: float32.
    """

    name: str
    config: dict
    lora: dict[str, Any]
    norm_centre: float = 1.0
    storage: str | None = None

    @property
    def model_type(self) -> str:
        return self.name.split("-")[0]


_LLAMA = sizes(32, 40, 2, 4, 2)
_QWEN2 = sizes(24, 36, 2, 4, 2)
_GPT2 = {"vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "tie_word_embeddings": False}
_MIXTRAL = sizes(24, 20, 2, 4, 2, num_local_experts=3, num_experts_per_tok=2)
_GEMMA = sizes(24, 40, 2, 3, 1, head_dim=8)
_PHI = sizes(32, 48, 2, 4, 4, tie_word_embeddings=False)
_PHI3 = sizes(32, 48, 2, 4, 2, pad_token_id=0)
_FALCON = sizes(
    32, 96, 2, 4, None, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=80, tie_word_embeddings=False
)
# bitsandbytes 0.50.2 reads NF4 on a CPU wrongly where rows of 32 share a block of 64.
_LLAMA_64, _QWEN2_64 = (sizes(64, 128, layers, 4, 2) for layers in (2, 1))
_QV, _MLP = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]
_ALL = [*_QV, "k_proj", "o_proj", *_MLP]

ADAPTERS = (
    AdapterCase("llama-qv", _LLAMA, {"r": 4, "lora_alpha": 8, "target_modules": _QV}),
    AdapterCase("llama-all-linear", _LLAMA, {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"}),
    AdapterCase(
        "llama-rslora", _LLAMA, {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["o_proj", *_MLP]}
    ),
    AdapterCase("llama-dora", _LLAMA, {"r": 3, "lora_alpha": 3, "use_dora": True, "target_modules": [*_QV, *_MLP]}),
    AdapterCase(
        "llama-patterns",
        _LLAMA,
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": [*_QV, "k_proj", "down_proj"],
            # PEFT saves patterns in alphabetical order, and the first match counts
            "rank_pattern": {r".*layers\.1\..*(q|down)_proj": 1, "q_proj": 4, "v_.*": 3},
            "alpha_pattern": {"(q|k)_proj": 2, "^model.layers.0.self_attn.v_proj": 7, "k_proj": 9},
        },
    ),
    AdapterCase(
        "llama-regex",
        _LLAMA,
        {
            "r": 2,
            "target_modules": r".*?layers\.[\d]{1,}\.(?:self_attn|mlp).*(q_proj|up_proj)",
            "exclude_modules": r".*\.0\.mlp.*",
        },
    ),
    AdapterCase(
        "llama-one-layer", _LLAMA, {"r": 2, "target_modules": _QV, "layers_to_transform": 1, "layers_pattern": "layers"}
    ),
    AdapterCase(
        "llama-lora-bias",
        _LLAMA | {"attention_bias": True, "mlp_bias": True},
        {"r": 2, "lora_bias": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    ),
    AdapterCase("llama-vocabulary", _LLAMA, {"r": 2, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    AdapterCase(
        "llama-vocabulary-dora", _LLAMA, {"r": 2, "use_dora": True, "target_modules": ["embed_tokens", "lm_head"]}
    ),
    AdapterCase(
        "llama-tied-embeddings",
        _LLAMA | {"tie_word_embeddings": True},
        {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "q_proj"]},
    ),
    AdapterCase(
        "llama-tied-head",
        _LLAMA | {"tie_word_embeddings": True},
        {"r": 3, "use_dora": True, "target_modules": ["lm_head", "v_proj"]},
    ),
    AdapterCase("llama-tokens", _LLAMA, {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [41, 3, 17]}),
    AdapterCase(
        "llama-tied-tokens",
        _LLAMA | {"tie_word_embeddings": True},
        {"r": 2, "target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [63, 0]}},
    ),
    AdapterCase(
        "llama-head-tokens",
        _LLAMA,
        {"r": 2, "target_modules": _QV, "trainable_token_indices": {"lm_head": [5, 4, 9], "embed_tokens": [9]}},
    ),
    AdapterCase("qwen2-qkv", _QWEN2, {"r": 2, "lora_alpha": 4, "target_modules": [*_QV, "k_proj", "up_proj"]}),
    AdapterCase("qwen2-bias-all", _QWEN2, {"r": 2, "bias": "all", "target_modules": ["v_proj", "down_proj"]}),
    AdapterCase("qwen2-bias-dora", _QWEN2, {"r": 2, "bias": "lora_only", "use_dora": True, "target_modules": _QV}),
    AdapterCase(
        "gpt2-attention", _GPT2, {"r": 3, "lora_alpha": 6, "fan_in_fan_out": True, "target_modules": ["c_attn"]}
    ),
    AdapterCase(
        "gpt2-all",
        _GPT2,
        {"r": 2, "fan_in_fan_out": True, "bias": "lora_only", "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
    AdapterCase(
        "gpt2-dora",
        _GPT2,
        {"r": 2, "fan_in_fan_out": True, "use_dora": True, "target_modules": ["c_attn", "mlp.c_proj", "c_fc"]},
    ),
    AdapterCase("gpt2-vocabulary", _GPT2, {"r": 2, "fan_in_fan_out": True, "target_modules": ["wte", "lm_head"]}),
    AdapterCase("mixtral-attention", _MIXTRAL, {"r": 2, "target_modules": [*_QV, "o_proj"]}),
    AdapterCase(
        "mixtral-experts",
        _MIXTRAL,
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 1},
        },
    ),
    AdapterCase("gemma-all", _GEMMA, {"r": 2, "target_modules": [*_QV, "k_proj", "o_proj", *_MLP]}, norm_centre=0.0),
    AdapterCase(
        "gemma-dora-rslora",
        _GEMMA,
        {"r": 2, "lora_alpha": 1, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", *_MLP]},
        norm_centre=0.0,
    ),
    AdapterCase(
        "gemma-vocabulary", _GEMMA, {"r": 2, "target_modules": ["embed_tokens", "lm_head", "o_proj"]}, norm_centre=0.0
    ),
    AdapterCase("phi-head", _PHI, {"r": 2, "lora_bias": True, "target_modules": ["lm_head", "q_proj"]}),
    AdapterCase(
        "phi3-all",
        _PHI3,
        {"r": 3, "lora_alpha": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    ),
    AdapterCase("phi3-dora", _PHI3, {"r": 2, "use_dora": True, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    AdapterCase(
        "falcon-all",
        _FALCON,
        {"r": 2, "target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]},
    ),
    AdapterCase("llama-int8-all", _LLAMA, {"r": 2, "lora_alpha": 3, "target_modules": _ALL}, storage="int8"),
    AdapterCase("llama-int8-dora", _LLAMA, {"r": 2, "use_dora": True, "target_modules": [*_QV, *_MLP]}, storage="int8"),
    AdapterCase("llama-nf4-all", _LLAMA_64, {"r": 2, "lora_alpha": 3, "target_modules": _ALL}, storage="nf4"),
    AdapterCase(
        "llama-nf4-dora", _LLAMA_64, {"r": 2, "use_dora": True, "target_modules": [*_QV, *_MLP]}, storage="nf4"
    ),
    AdapterCase(
        "qwen2-nf4-dora",
        _QWEN2_64,
        {"r": 2, "bias": "lora_only", "use_dora": True, "target_modules": [*_QV, "down_proj"]},
        storage="nf4",
    ),
    AdapterCase(
        "gemma-int8-rslora",
        _GEMMA,
        {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": _ALL},
        norm_centre=0.0,
        storage="int8",
    ),
)
