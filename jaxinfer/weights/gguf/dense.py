"""Config.json of dense architectures added to llama.cpp after Llama, Qwen, Gemma and the other early ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.weights.gguf.fields import (
    Json,
    biases,
    common,
    layer_types,
    named,
    rope_scaling,
    rotated_share,
    rows_of_first,
    sizes,
)
from jaxinfer.weights.gguf.header_view import Described

_EXAONE_32B = 64  # layer count of the only EXAONE 4 with sliding windows, even if the file has no window
_ATTENTION, _MLP = {"attention_bias": "attn_q"}, {"mlp_bias": "ffn_down"}


def _layer_normed(model: Described, name: str) -> Json:
    return {**sizes(model), name: model.number("attention.layer_norm_epsilon")}


def llama_biases(model: Described) -> Json:
    output = model.has("blk.0.attn_output.bias")
    read = biases(model, **_ATTENTION, **_MLP)
    return {**read, "attention_bias": read["attention_bias"] or output}


def _mistral3(model: Described) -> Json:
    """Return the config of Ministral 3, which scales queries with position, or of Mistral Small 3, which does not."""
    fields = common(model)
    if model.get("attention.temperature_scale") is None:
        return {**fields, **llama_biases(model), **named("LlamaForCausalLM", "llama")}
    rope = {**fields.pop("rope_scaling", {"rope_type": "default"}), "rope_theta": fields["rope_theta"]}
    if model.get("rope.scaling.yarn_log_multiplier") is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": model.number("rope.scaling.yarn_log_multiplier")}
    rope["llama_4_scaling_beta"] = model.number("attention.temperature_scale")
    return {**fields, "rope_parameters": rope, **named("Ministral3ForCausalLM", "ministral3")}


def _granite(model: Described) -> Json:
    fields = common(model)
    if model.get("rope.scaling.finetuned") is False:
        raise model.bad("rope.scaling.finetuned", "false")
    scale = model.number("attention.scale", 0.0) or fields["head_dim"] ** -0.5
    return {
        **fields,
        **llama_biases(model),
        **named("GraniteForCausalLM", "granite"),
        "attention_multiplier": scale,
        "embedding_multiplier": model.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": model.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": model.number("logit_scale"),
    }


def _olmo2(model: Described) -> Json:
    """Return the config of OLMo 2, or of OLMo 3, whose sliding-window layers use unscaled RoPE."""
    fields = {**common(model), **biases(model, **_ATTENTION)}
    window = model.count("attention.sliding_window", 0)
    if not window:
        return {**fields, **named("Olmo2ForCausalLM", "olmo2")}
    theta = fields["rope_theta"]
    ropes = {
        "full_attention": {**fields.pop("rope_scaling", {"rope_type": "default"}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", theta)},
    }
    windows = {"sliding_window": window, "layer_types": layer_types(model, 4)}
    return {**fields, **windows, "rope_parameters": ropes, **named("Olmo3ForCausalLM", "olmo3")}


def _smollm3(model: Described) -> Json:
    """Return the config of SmolLM3: every fourth layer has no RoPE, as in all published models; no key gives it."""
    return {
        **common(model),
        **llama_biases(model),
        **named("SmolLM3ForCausalLM", "smollm3"),
        "no_rope_layer_interval": 4,
    }


def _phi2(model: Described) -> Json:
    """Return the config of Phi-2; the MLP size is read from a tensor, as the converter always writes 4 * hidden."""
    return {
        **_layer_normed(model, "layer_norm_eps"),
        **named("PhiForCausalLM", "phi"),
        "intermediate_size": rows_of_first(model, "ffn_up.weight"),
        "partial_rotary_factor": rotated_share(model),
        "hidden_act": "gelu_new",
    }


def _command_r(model: Described) -> Json:
    return {
        **_layer_normed(model, "layer_norm_eps"),
        **biases(model, **_ATTENTION),
        **named("CohereForCausalLM", "cohere"),
        "logit_scale": model.number("logit_scale", 0.0) or 1.0,
        "use_qk_norm": model.has("blk.0.attn_q_norm.weight"),
    }


def _cohere2(model: Described) -> Json:
    if rotated_share(model) != 1.0:
        raise model.bad("rope.dimension_count", model.get("rope.dimension_count"))
    return {
        **_layer_normed(model, "layer_norm_eps"),
        **named("Cohere2ForCausalLM", "cohere2"),
        "sliding_window": model.count("attention.sliding_window"),
        "layer_types": layer_types(model, 4),
        "logit_scale": model.number("logit_scale"),
    }


def _glm(architecture: str, model_type: str) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        sections = model.get("rope.dimension_sections")
        if isinstance(sections, list) and any(sections):
            raise model.bad("rope.dimension_sections", sections)
        read = {**common(model), **biases(model, **_ATTENTION), "partial_rotary_factor": rotated_share(model)}
        fused = model.has("blk.0.attn_qkv.bias")
        return {**read, "attention_bias": read["attention_bias"] or fused, **named(architecture, model_type)}

    return fields


def _exaone4(model: Described) -> Json:
    window = model.count("attention.sliding_window", 4096 if model.layers == _EXAONE_32B else 0) or None
    fields = {**common(model), "sliding_window": window, **named("Exaone4ForCausalLM", "exaone4")}
    return {**fields, "layer_types": layer_types(model, 4)} if window else fields


def _ernie(model: Described) -> Json:
    return {**common(model), **biases(model, use_bias="attn_q"), **named("Ernie4_5ForCausalLM", "ernie4_5")}


def _hunyuan(model: Described) -> Json:
    """Return the config of Hunyuan; the converter has already applied ``alpha`` to theta."""
    fields = {**common(model), **biases(model, **_ATTENTION)}
    return {**fields, **named("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")}


def _gptneox(model: Described) -> Json:
    fields = _layer_normed(model, "layer_norm_eps")
    scaling = rope_scaling(model)
    return {
        **{name: value for name, value in fields.items() if name not in ("head_dim", "partial_rotary_factor")},
        **biases(model, attention_bias="attn_qkv"),
        **named("GPTNeoXForCausalLM", "gpt_neox"),
        **({} if scaling is None else {"rope_scaling": scaling}),
        "rotary_emb_base": fields["rope_theta"],
        "rotary_pct": rotated_share(model),
        "use_parallel_residual": bool(model.get("use_parallel_residual")),
        "hidden_act": "gelu",
    }


def _starcoder2(model: Described) -> Json:
    """Return the config of StarCoder 2; llama.cpp ignores its sliding window, so the file has none."""
    return {
        **_layer_normed(model, "norm_epsilon"),
        **biases(model, use_bias="attn_q"),
        **named("Starcoder2ForCausalLM", "starcoder2"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _stablelm(model: Described) -> Json:
    return {
        **_layer_normed(model, "layer_norm_eps"),
        **biases(model, use_qkv_bias="attn_q"),
        **named("StableLmForCausalLM", "stablelm"),
        "partial_rotary_factor": rotated_share(model),
        "qk_layernorm": model.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not model.has("blk.0.ffn_norm.weight"),
    }


def _seed_oss(model: Described) -> Json:
    read = biases(model, **_ATTENTION, **_MLP, attention_out_bias="attn_output")
    return {**common(model), **read, **named("SeedOssForCausalLM", "seed_oss")}


DENSE: Mapping[str, Callable[[Described], Json]] = MappingProxyType(
    {
        "mistral3": _mistral3,
        "granite": _granite,
        "olmo2": _olmo2,
        "smollm3": _smollm3,
        "phi2": _phi2,
        "command-r": _command_r,
        "cohere2": _cohere2,
        "chatglm": _glm("GlmForCausalLM", "glm"),
        "glm4": _glm("Glm4ForCausalLM", "glm4"),
        "exaone4": _exaone4,
        "ernie4_5": _ernie,
        "hunyuan-dense": _hunyuan,
        "gptneox": _gptneox,
        "starcoder2": _starcoder2,
        "stablelm": _stablelm,
        "seed_oss": _seed_oss,
    }
)
