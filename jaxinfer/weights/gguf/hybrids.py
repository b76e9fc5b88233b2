"""Config.json of hybrid models with recurrent and attention layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.weights.gguf.fields import Json, common, expert_size, named, rotated_share, rows_of_first
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.recurrent import Heads


def _hybrid(architecture: str, model_type: str) -> Callable[[Described], Json]:
    """Return a config builder; a layer is recurrent if it has a convolution tensor, and MoE if it has a router."""

    def fields(model: Described) -> Json:
        recurrent = [model.has(f"blk.{index}.ssm_conv1d.weight") for index in range(model.layers)]
        attends = recurrent.index(False) if False in recurrent else 0
        made = {
            **common(model),
            **Heads.of(model).fields(model),
            **named(architecture, model_type),
            "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
            "partial_rotary_factor": rotated_share(model),
            "attention_bias": model.has(f"blk.{attends}.attn_output.bias"),
        }
        return made | (_experts(model) if model.experts else {})

    return fields


def _experts(model: Described) -> Json:
    """Return the fields of the experts; routing weights are always normalised."""
    return {
        "num_experts": model.experts,
        "num_experts_per_tok": model.count("expert_used_count"),
        "moe_intermediate_size": expert_size(model),
        "shared_expert_intermediate_size": rows_of_first(model, "ffn_gate_shexp.weight"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            index for index in range(model.layers) if not model.has(f"blk.{index}.ffn_gate_inp.weight")
        ],
    }


HYBRIDS: Mapping[str, Callable[[Described], Json]] = MappingProxyType(
    {
        "qwen3next": _hybrid("Qwen3NextForCausalLM", "qwen3_next"),
        "qwen35": _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text"),
        "qwen35moe": _hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    }
)
