"""The models that parity is measured on: one switch, or one odd size, at a time. Plain data.

``style`` "hub" means that config.json is written as given here, in the way of the checkpoints that people have
(``rope_theta`` and ``rope_scaling`` at the top level, ``torch_dtype``, defaults left out). "saved" means that
transformers builds the configuration and saves it (``rope_parameters``, every field spelt out).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to ask transformers about.

    Attributes:
        name: unique; the first word is the family.
        config: what config.json says beyond ``COMMON``.
        style: "saved" or "hub", see the module's docstring.
        prompt_length: tokens.
        shards: safetensors files to split the checkpoint into.
    """

    name: str
    config: dict
    style: str = "saved"
    prompt_length: int = 24
    shards: int = 1

    @property
    def model_type(self) -> str:
        return self.name.split("-")[0]


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, **others: object) -> dict:
    sizes = {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return {key: value for key, value in sizes.items() if value is not None} | others


def _rope(kind: str, theta: float, **others: float) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **others}}


# With 64 original positions the wavelengths of head_dim 16 fall on both sides of the ramp and into it.
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3_HUB = {"rope_scaling": {**_LLAMA3, "rope_type": "llama3"}, "rope_theta": 500000.0}

LLAMA = (
    Case("llama-mha", _sizes(64, 176, 2, 4, 4, rms_norm_eps=1e-5), prompt_length=33),
    Case("llama-stories-shape", _sizes(64, 172, 3, 8, 4, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    Case("llama-mqa-head20", _sizes(80, 128, 2, 4, 1, **_rope("default", 500000.0))),
    Case("llama-tiny-hub", _sizes(64, 176, 3, 8, 1, rope_theta=10000.0, torch_dtype="bfloat16"), style="hub"),
    Case("llama-biases", _sizes(48, 96, 2, 4, 2, attention_bias=True, mlp_bias=True)),
    Case("llama-attention-bias", _sizes(48, 96, 2, 2, 2, attention_bias=True), shards=2),
    Case("llama-mlp-bias", _sizes(48, 100, 2, 2, 1, mlp_bias=True)),
    Case("llama-head80", _sizes(64, 96, 2, 2, 1, head_dim=80)),
    Case("llama-head96-tied", _sizes(96, 64, 2, 3, 3, head_dim=96, tie_word_embeddings=True), prompt_length=17),
    Case("llama-hidden172", _sizes(172, 203, 2, 4, 2, head_dim=20, vocab_size=61, rms_norm_eps=1e-3)),
    Case("llama-one-token-prompt", _sizes(64, 96, 2, 4, 2), prompt_length=1),
    Case("llama-long-prompt", _sizes(64, 96, 2, 4, 2, **_rope("default", 10000.0)), prompt_length=150),
    Case("llama-rope-llama3", _sizes(64, 128, 2, 4, 2, **_rope("llama3", 500000.0, **_LLAMA3)), prompt_length=70),
    Case("llama-rope-llama3-hub", _sizes(64, 128, 2, 4, 2, **_LLAMA3_HUB), style="hub", prompt_length=70, shards=3),
    Case("llama-rope-llama3-tied-hub", _sizes(64, 128, 2, 4, 1, **_LLAMA3_HUB, tie_word_embeddings=True), style="hub"),
    Case("llama-rope-linear", _sizes(64, 96, 2, 4, 4, **_rope("linear", 10000.0, factor=4.0))),
    Case("llama-rope-linear-hub", _sizes(64, 96, 2, 4, 4, rope_scaling={"type": "linear", "factor": 2.5}), style="hub"),
    Case("llama-oldest-hub", _sizes(64, 172, 2, 4, None, rope_scaling=None, pretraining_tp=1), style="hub"),
)

MISTRAL = (
    Case("mistral-window", _sizes(64, 128, 3, 4, 2, sliding_window=8), prompt_length=40),
    Case("mistral-window-hub", _sizes(64, 128, 2, 4, 1, sliding_window=7, rope_theta=1e4), style="hub"),
    Case("mistral-window-passed-in-decode", _sizes(64, 128, 2, 4, 4, sliding_window=30), prompt_length=20),
    Case("mistral-full-head-dim", _sizes(64, 128, 2, 4, 2, sliding_window=None, head_dim=32)),
    Case("mistral-full-tied-hub", _sizes(64, 96, 2, 4, 2, sliding_window=None, tie_word_embeddings=True), style="hub"),
)

_MIXED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_HUB_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1, "rope_theta": 1000000.0}
_QWEN3_WINDOW = {**_MIXED, "sliding_window": 6, "max_window_layers": 2}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

QWEN2 = (
    Case("qwen2-bias", _sizes(64, 128, 2, 4, 2, **_rope("default", 1000000.0))),
    Case("qwen2-tied-hub", _sizes(56, 152, 2, 7, 1, **_HUB_WINDOW_OFF, tie_word_embeddings=True), style="hub"),
    Case("qwen2-window-mixed", _sizes(64, 96, 3, 4, 2, **_MIXED), prompt_length=36),
    Case("qwen2-window-mixed-hub", _sizes(64, 96, 3, 4, 4, **_MIXED, rope_theta=1000000.0), style="hub"),
    Case("qwen2-layer-types", _sizes(64, 96, 3, 4, 2, **_MIXED, layer_types=_LAYER_TYPES), prompt_length=29),
)

QWEN3 = (
    Case("qwen3-head-dim", _sizes(64, 128, 2, 4, 2, head_dim=32, **_rope("default", 1000000.0))),
    Case("qwen3-tied-hub", _sizes(64, 96, 2, 4, 1, **_HUB_WINDOW_OFF, head_dim=24, tie_word_embeddings=True), "hub"),
    Case("qwen3-attention-bias", _sizes(48, 96, 2, 2, 2, head_dim=80, attention_bias=True, rms_norm_eps=1e-3)),
    Case("qwen3-window-mixed", _sizes(64, 96, 4, 4, 2, **_QWEN3_WINDOW, head_dim=16), prompt_length=31),
)

CASES = (*LLAMA, *MISTRAL, *QWEN2, *QWEN3)
