"""Architectures of GGUF files: for each the config.json that `transformers` would write, and its tensor names.

Keys are those of llama.cpp's writer (``gguf-py/gguf/constants.py``), tensor names those of its
``gguf-py/gguf/tensor_mapping.py``. Missing keys take the defaults of llama.cpp's readers; where there is no default
either, the file is rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.arch import (
    MIXTURE,
    ROTATED,
    SHARED_EXPERT,
    WINDOW,
    Arch,
    count,
    experts,
    first_rows,
    flag,
    has,
    kinds_of_layers,
    layers_without_experts,
    nonzero,
    number,
    scale,
)
from jaxinfer.weights.gguf.deepseek import ROUTED, SIGMOID, deepseek2
from jaxinfer.weights.gguf.fields import Json, expert_size, frame, layer_types, sizes
from jaxinfer.weights.gguf.gemma import GEMMA
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.hybrids import HYBRIDS
from jaxinfer.weights.gguf.tensor_names import (
    GATED,
    LAYER,
    WHOLE,
    Join,
    Names,
    grouped,
    shared_expert,
    turned_keys,
    turned_queries,
)


def architecture_of(model: Described) -> Arch:
    """Return the architecture of a file; raise CheckpointError if it is unknown."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{model.path} holds a model of the architecture {quoted(name)}, which is not supported "
            f"(known: {', '.join(ARCHITECTURES)})"
        )
    found = ARCHITECTURES[name]
    return found if isinstance(found, Arch) else found(model)


# --------------------------------------------------------------------------------------------------------------
# Fields and names that several rows share

_BIAS = {"attention_bias": has("attn_q.bias")}
_BIASES = {"attention_bias": has("attn_q.bias", "attn_output.bias"), "mlp_bias": has("ffn_down.bias")}
_EXPERT_SIZE = {"intermediate_size": expert_size}
_LAYER_NORM = number("attention.layer_norm_epsilon")
_QWEN = {"use_sliding_window": False, "attention_bias": has("attn_output.bias")}

_SPARSE_BLOCK = Names(
    {
        **LAYER,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
    },
    stacks={
        f"ffn_{ours}_exps": f"block_sparse_moe.experts.{{}}.{theirs}.weight"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
)
_TURNED = dataclasses.replace(
    _SPARSE_BLOCK, changes={"attn_q": {"order": turned_queries}, "attn_k": {"order": turned_keys}}
)
_FUSED_GATE = {**LAYER, "ffn_up": "mlp.gate_up_proj"}


# --------------------------------------------------------------------------------------------------------------
# Architectures of which the file's metadata or tensors choose a version

_LLAMA = Arch("LlamaForCausalLM", "llama", _BIASES, _TURNED)
_MISTRAL = Arch("MistralForCausalLM", "mistral", {**_BIASES, **WINDOW}, _TURNED)
_MIXTRAL = Arch(
    "MixtralForCausalLM",
    "mixtral",
    {**experts("num_local_experts"), "sliding_window": nonzero("attention.sliding_window")},
    _TURNED,
)


def _llama(model: Described) -> Arch:
    if model.experts:
        return _MIXTRAL
    return _MISTRAL if model.count("attention.sliding_window", 0) else _LLAMA


def _ministral_rope(model: Described, fields: Json) -> None:
    rope = {**fields.pop("rope_scaling", {"rope_type": "default"}), "rope_theta": fields["rope_theta"]}
    if model.get("rope.scaling.yarn_log_multiplier") is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": model.number("rope.scaling.yarn_log_multiplier")}
    fields["rope_parameters"] = {**rope, "llama_4_scaling_beta": model.number("attention.temperature_scale")}


_MINISTRAL = Arch("Ministral3ForCausalLM", "ministral3", names=_TURNED, amend=_ministral_rope)


def _mistral3(model: Described) -> Arch:
    """Return Ministral 3, which scales queries with position, or Mistral Small 3, which does not."""
    return _LLAMA if model.get("attention.temperature_scale") is None else _MINISTRAL


def _olmo3_ropes(model: Described, fields: Json) -> None:
    """Set the RoPE of OLMo 3, whose sliding-window layers use an unscaled one."""
    theta = fields["rope_theta"]
    fields["rope_parameters"] = {
        "full_attention": {**fields.pop("rope_scaling", {"rope_type": "default"}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", theta)},
    }


_OLMO2 = Arch("Olmo2ForCausalLM", "olmo2", _BIAS)
_OLMO3 = Arch("Olmo3ForCausalLM", "olmo3", {**_BIAS, **WINDOW, "layer_types": kinds_of_layers(4)}, amend=_olmo3_ropes)


def _olmo2(model: Described) -> Arch:
    return _OLMO3 if model.count("attention.sliding_window", 0) else _OLMO2


_FALCON = Arch(
    "FalconForCausalLM",
    "falcon",
    {
        "ffn_hidden_size": count("feed_forward_length"),
        "num_kv_heads": lambda model: model.kv_heads,
        "multi_query": lambda model: model.kv_heads == 1,
        "new_decoder_architecture": lambda model: model.kv_heads != 1,
        "num_ln_in_parallel_attn": 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": has("attn_qkv.bias"),
        "layer_norm_epsilon": _LAYER_NORM,
        "rope_theta": number("rope.freq_base", 10000.0),
    },
    Names(
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
        "transformer.h",
        changes={"attn_qkv": {"order": grouped}},
    ),
    frame,
)
# In a layer with two norms, the first is that of the MLP.
_FALCON_40B = dataclasses.replace(
    _FALCON,
    fields={**_FALCON.fields, "num_ln_in_parallel_attn": 2},
    names=dataclasses.replace(
        _FALCON.names, layer={**_FALCON.names.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    ),
)


def _falcon(model: Described) -> Arch:
    return _FALCON_40B if model.has("blk.0.attn_norm_2.weight") else _FALCON


# --------------------------------------------------------------------------------------------------------------
# Fields that depend on others

_EXAONE_32B = 64  # layer count of the only EXAONE 4 with sliding windows, even if the file has no window
_MAVERICK = 128  # number of experts of the Llama 4 without QK norm


def _granite(model: Described, fields: Json) -> None:
    if model.get("rope.scaling.finetuned") is False:
        raise model.bad("rope.scaling.finetuned", "false")
    fields["attention_multiplier"] = model.number("attention.scale", 0.0) or fields["head_dim"] ** -0.5


def _cohere2(model: Described, fields: Json) -> None:
    if "partial_rotary_factor" in fields:
        raise model.bad("rope.dimension_count", model.get("rope.dimension_count"))


def _glm(model: Described, fields: Json) -> None:
    del fields
    sections = model.get("rope.dimension_sections")
    if isinstance(sections, list) and any(sections):
        raise model.bad("rope.dimension_sections", sections)


def _exaone_window(model: Described, fields: Json) -> None:
    default = 4096 if model.layers == _EXAONE_32B else 0
    fields["sliding_window"] = model.count("attention.sliding_window", default) or None
    if fields["sliding_window"]:
        fields["layer_types"] = layer_types(model, 4)


def _neox_rope(model: Described, fields: Json) -> None:
    """Set the RoPE of GPT-NeoX, whose fields have names of its own."""
    del model, fields["head_dim"]
    fields["rotary_emb_base"] = fields["rope_theta"]
    fields["rotary_pct"] = fields.pop("partial_rotary_factor", 1.0)


def _sigmoid_gate(model: Described, fields: Json) -> None:
    del fields
    gate = model.count("expert_gating_func", SIGMOID)
    if gate not in (0, SIGMOID):
        raise model.bad("expert_gating_func", gate)


def _gpt_oss_rope(model: Described, fields: Json) -> None:
    """Set the RoPE of gpt-oss; as in all published models, YaRN's ramp ends are not rounded."""
    del model
    scaling = fields.pop("rope_scaling", {"rope_type": "default"})
    fields["rope_parameters"] = {**scaling, "rope_theta": fields["rope_theta"], "truncate": False}


def _llama4_layers(model: Described, fields: Json) -> None:
    if model.get("attention.sliding_window") == 0:
        raise model.bad("attention.sliding_window", 0)
    near = [kind == "sliding_attention" for kind in layer_types(model, 4)]
    fields["no_rope_layers"] = list(map(int, near))
    fields["layer_types"] = ["chunked_attention" if each else "full_attention" for each in near]


def _phimoe_rope(model: Described, fields: Json) -> None:
    del model
    scaling = fields.get("rope_scaling", {})
    if "attention_factor" in scaling:
        scaling["short_mscale"] = scaling["long_mscale"] = scaling.pop("attention_factor")


def _last_mixture(model: Described) -> int:
    """Return the last layer with a router."""
    return max(set(range(model.layers)).difference(layers_without_experts(model)), default=0)


# --------------------------------------------------------------------------------------------------------------
# The table

ARCHITECTURES: Mapping[str, Arch | Callable[[Described], Arch]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": Arch("Qwen2ForCausalLM", "qwen2", _QWEN),
        "qwen3": Arch("Qwen3ForCausalLM", "qwen3", _QWEN),
        "qwen2moe": Arch(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            {**_QWEN, **MIXTURE, **SHARED_EXPERT, "norm_topk_prob": False, "qkv_bias": has("attn_q.bias")},
            Names({**LAYER, **shared_expert("mlp.shared_expert")}, changes={"ffn_gate_inp_shexp": {"matrix": True}}),
        ),
        "qwen3moe": Arch("Qwen3MoeForCausalLM", "qwen3_moe", {**_QWEN, **MIXTURE}),
        "phi3": Arch(
            "Phi3ForCausalLM",
            "phi3",
            names=Names({**_FUSED_GATE, "attn_qkv": "self_attn.qkv_proj"}),
            optional={"sliding_window": nonzero("attention.sliding_window")},
        ),
        "gpt2": Arch(
            "GPT2LMHeadModel",
            "gpt2",
            {
                "vocab_size": lambda model: model.rows("token_embd.weight"),
                "n_embd": count("embedding_length"),
                "n_inner": count("feed_forward_length"),
                "n_layer": lambda model: model.layers,
                "n_head": lambda model: model.heads,
                "n_positions": count("context_length"),
                "layer_norm_epsilon": _LAYER_NORM,
                "activation_function": "gelu_new",
            },
            Names(
                {
                    "attn_norm": "ln_1",
                    "attn_qkv": "attn.c_attn",
                    "attn_output": "attn.c_proj",
                    "ffn_norm": "ln_2",
                    "ffn_up": "mlp.c_fc",
                    "ffn_down": "mlp.c_proj",
                },
                {
                    "token_embd": "transformer.wte",
                    "position_embd": "transformer.wpe",
                    "output_norm": "transformer.ln_f",
                    "output": "lm_head",
                },
                "transformer.h",
                changes={stem: {"transposed": True} for stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
            ),
            lambda model: {},
        ),
        "falcon": _falcon,
        "deepseek2": deepseek2,
        "mistral3": _mistral3,
        "granite": Arch(
            "GraniteForCausalLM",
            "granite",
            {
                **_BIASES,
                "embedding_multiplier": scale("embedding_scale"),
                "residual_multiplier": scale("residual_scale"),
                "logits_scaling": number("logit_scale"),
            },
            _TURNED,
            amend=_granite,
        ),
        "olmo2": _olmo2,
        # Every fourth layer has no RoPE, as in all published models; no key gives it.
        "smollm3": Arch("SmolLM3ForCausalLM", "smollm3", {**_BIASES, "no_rope_layer_interval": 4}, _TURNED),
        "phi2": Arch(
            "PhiForCausalLM",
            "phi",
            {
                **ROTATED,
                "layer_norm_eps": _LAYER_NORM,
                "intermediate_size": first_rows("ffn_up.weight"),  # the converter always writes 4 * hidden
                "hidden_act": "gelu_new",
            },
            Names(
                {**LAYER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
                {**WHOLE, "output_norm": "model.final_layernorm"},
            ),
            sizes,
        ),
        "command-r": Arch(
            "CohereForCausalLM",
            "cohere",
            {
                **_BIAS,
                "layer_norm_eps": _LAYER_NORM,
                "logit_scale": scale("logit_scale"),
                "use_qk_norm": has("attn_q_norm.weight"),
            },
            base=sizes,
        ),
        "cohere2": Arch(
            "Cohere2ForCausalLM",
            "cohere2",
            {
                **WINDOW,
                "layer_norm_eps": _LAYER_NORM,
                "layer_types": kinds_of_layers(4),
                "logit_scale": number("logit_scale"),
            },
            base=sizes,
            amend=_cohere2,
        ),
        "chatglm": Arch(
            "GlmForCausalLM",
            "glm",
            {**ROTATED, "attention_bias": has("attn_q.bias", "attn_qkv.bias")},
            Names(_FUSED_GATE),
            amend=_glm,
        ),
        "glm4": Arch(
            "Glm4ForCausalLM",
            "glm4",
            {**ROTATED, "attention_bias": has("attn_q.bias", "attn_qkv.bias")},
            Names(
                {
                    **_FUSED_GATE,
                    "post_attention_norm": "post_self_attn_layernorm",
                    "ffn_norm": "post_attention_layernorm",
                    "post_ffw_norm": "post_mlp_layernorm",
                }
            ),
            amend=_glm,
        ),
        "exaone4": Arch("Exaone4ForCausalLM", "exaone4", amend=_exaone_window),
        "ernie4_5": Arch("Ernie4_5ForCausalLM", "ernie4_5", {"use_bias": has("attn_q.bias")}),
        # The converter has already applied ``alpha`` to theta.
        "hunyuan-dense": Arch(
            "HunYuanDenseV1ForCausalLM",
            "hunyuan_v1_dense",
            _BIAS,
            Names(
                {**LAYER, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
            ),
        ),
        "gptneox": Arch(
            "GPTNeoXForCausalLM",
            "gpt_neox",
            {
                "layer_norm_eps": _LAYER_NORM,
                "attention_bias": has("attn_qkv.bias"),
                "use_parallel_residual": flag("use_parallel_residual"),
                "hidden_act": "gelu",
            },
            Names(
                {
                    "attn_norm": "input_layernorm",
                    "attn_qkv": "attention.query_key_value",
                    "attn_output": "attention.dense",
                    "ffn_norm": "post_attention_layernorm",
                    "ffn_up": "mlp.dense_h_to_4h",
                    "ffn_down": "mlp.dense_4h_to_h",
                },
                {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
                "gpt_neox.layers",
                changes={"attn_qkv": {"order": grouped}},
            ),
            sizes,
            amend=_neox_rope,
        ),
        # llama.cpp ignores the sliding window, so the file has none.
        "starcoder2": Arch(
            "Starcoder2ForCausalLM",
            "starcoder2",
            {"norm_epsilon": _LAYER_NORM, "use_bias": has("attn_q.bias"), "hidden_act": "gelu_pytorch_tanh"},
            Names({**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
            sizes,
        ),
        "stablelm": Arch(
            "StableLmForCausalLM",
            "stablelm",
            {
                **ROTATED,
                "layer_norm_eps": _LAYER_NORM,
                "use_qkv_bias": has("attn_q.bias"),
                "qk_layernorm": has("attn_q_norm.weight"),
                "use_parallel_residual": lambda model: not model.has("blk.0.ffn_norm.weight"),
            },
            Names(stacks={f"attn_{part}_norm": f"self_attn.{part}_layernorm.norms.{{}}.weight" for part in "qk"}),
            sizes,
        ),
        "seed_oss": Arch(
            "SeedOssForCausalLM",
            "seed_oss",
            {**_BIAS, "mlp_bias": has("ffn_down.bias"), "attention_out_bias": has("attn_output.bias")},
        ),
        # As in all published models, the GLU is clamped.
        "gpt-oss": Arch(
            "GptOssForCausalLM",
            "gpt_oss",
            {**experts("num_local_experts"), **_BIAS, **_EXPERT_SIZE, **WINDOW, "layer_types": kinds_of_layers(2)},
            Names(
                {**LAYER, "ffn_gate_inp": "mlp.router"},
                joins=(
                    Join("mlp.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), interleaved=True),
                    Join("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), interleaved=True),
                    Join("mlp.experts.down_proj", ("ffn_down_exps.weight",)),
                    Join("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",)),
                ),
            ),
            amend=_gpt_oss_rope,
        ),
        # Chunk size and query scaling are those of the published models, as in llama.cpp.
        "llama4": Arch(
            "Llama4ForCausalLM",
            "llama4_text",
            {
                **experts("num_local_experts"),
                **_BIAS,
                **_EXPERT_SIZE,
                "intermediate_size_mlp": count("feed_forward_length"),
                "interleave_moe_layer_step": count("interleave_moe_layer_step"),
                "use_qk_norm": lambda model: model.experts != _MAVERICK,
                "attention_chunk_size": 8192,
                "floor_scale": 8192,
                "attn_scale": 0.1,
                "attn_temperature_tuning": True,
            },
            Names(
                {
                    **LAYER,
                    **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in GATED.items()},
                    **shared_expert("feed_forward.shared_expert"),
                    "ffn_gate_inp": "feed_forward.router",
                },
                joins=(
                    Join("feed_forward.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
                    Join("feed_forward.experts.down_proj", ("ffn_down_exps.weight",)),
                ),
            ),
            amend=_llama4_layers,
        ),
        "glm4moe": Arch(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            {
                **ROUTED,
                **_BIAS,
                **ROTATED,
                "n_group": count("expert_group_count", 1),
                "topk_group": count("expert_group_used_count", 1),
                "use_qk_norm": has("attn_q_norm.weight"),
            },
            amend=_sigmoid_gate,
        ),
        "olmoe": Arch(
            "OlmoeForCausalLM",
            "olmoe",
            {**experts("num_experts"), **_BIAS, **_EXPERT_SIZE, "norm_topk_prob": False},
        ),
        "phimoe": Arch(
            "PhimoeForCausalLM",
            "phimoe",
            {
                **experts("num_local_experts"),
                **_BIAS,
                **_EXPERT_SIZE,
                "sliding_window": nonzero("attention.sliding_window"),
                "lm_head_bias": lambda model: model.has("output.bias"),
            },
            _SPARSE_BLOCK,
            amend=_phimoe_rope,
        ),
        "minimax-m2": Arch(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            {**experts("num_local_experts"), **_EXPERT_SIZE, **ROTATED},
            _SPARSE_BLOCK,
            amend=_sigmoid_gate,
        ),
        "ernie4_5-moe": Arch(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            {
                **experts("moe_num_experts", "moe_k"),
                "moe_intermediate_size": expert_size,
                "moe_num_shared_experts": count("expert_shared_count", 0),
                "moe_layer_start_index": count("leading_dense_block_count", 0),
                "moe_layer_end_index": _last_mixture,
                "moe_layer_interval": count("interleave_moe_layer_step"),
            },
            Names(
                {**LAYER, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
                changes={"exp_probs_b": {"matrix": True}},
            ),
        ),
        **GEMMA,
        **HYBRIDS,
    }
)
