"""Architectures with gated DeltaNet layers (Qwen3-Next, Qwen3.5), and the inverse of the converter's changes to them.

In checkpoints value heads are grouped by key head. Files of Qwen3.5 have the first value head of every key head, then
the second of each (``_LinearAttentionVReorderBase`` of ``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.gguf.arch import MIXTURE, ROTATED, SHARED_EXPERT, Arch, count
from jaxinfer.weights.gguf.fields import Json
from jaxinfer.weights.gguf.header_view import MAX_HEADS, Described
from jaxinfer.weights.gguf.tensor_names import LAYER, Join, Names, shared_expert

_SMALLEST = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of the recurrent layers: ``keys`` key heads with ``values`` value heads each, and their dimensions."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(model: Described) -> Heads:
        """Read the heads; raise CheckpointError if the metadata lacks a size or the sizes do not divide each other."""
        keys, total = (model.count(f"ssm.{name}", most=MAX_HEADS) for name in ("group_count", "time_step_rank"))
        inner, size = model.count("ssm.inner_size"), model.count("ssm.state_size")
        if not keys or not total or total % keys:
            raise model.bad("ssm.time_step_rank", total)
        if not inner or inner % total:
            raise model.bad("ssm.inner_size", inner)
        return Heads(keys, total // keys, size, inner // total)


def by_heads(model: Described, rows: int) -> np.ndarray:
    """Return the order that regroups concatenated queries, keys, values and gates by key head."""
    heads = Heads.of(model)
    widths = (heads.key_dim, heads.key_dim, *2 * (heads.values * heads.value_dim,))
    if rows != heads.keys * sum(widths):
        raise model.bad("ssm.inner_size", model.get("ssm.inner_size"))
    parts = np.split(np.arange(rows), np.cumsum([heads.keys * width for width in widths[:-1]]))
    return np.concatenate([part.reshape(heads.keys, -1) for part in parts], axis=1).reshape(-1)


def untiled(model: Described, rows: int) -> np.ndarray:
    """Return the order that regroups rows of value heads, of any equal size, by key head."""
    heads = Heads.of(model)
    if rows % (heads.keys * heads.values):
        raise model.bad("ssm.time_step_rank", heads.keys * heads.values)
    return np.arange(rows).reshape(heads.values, heads.keys, -1).swapaxes(0, 1).reshape(-1)


def untiled_values(model: Described, rows: int) -> np.ndarray:
    """Return the order that regroups the rows of values, which follow those of queries and keys."""
    heads = Heads.of(model)
    first = 2 * heads.keys * heads.key_dim
    if rows <= first:
        raise model.bad("ssm.state_size", heads.key_dim)
    return np.concatenate([np.arange(first), first + untiled(model, rows - first)])


def logarithms(decays: np.ndarray) -> np.ndarray:
    """Return logarithms of the negated decays, as in the checkpoint; raise ValueError if one is positive or NaN."""
    if not (decays <= 0).all():
        raise ValueError("decays that are not at most 0")
    return np.log(np.maximum(-decays.astype(np.float32), _SMALLEST))


def _layers(model: Described, fields: Json) -> None:
    """Set the sizes of recurrent layers and the layer types; a layer is recurrent if it has a convolution tensor."""
    heads = Heads.of(model)
    recurrent = [model.has(f"blk.{index}.ssm_conv1d.weight") for index in range(model.layers)]
    attends = recurrent.index(False) if False in recurrent else 0
    fields |= {
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.keys * heads.values,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "attention_bias": model.has(f"blk.{attends}.attn_output.bias"),
    }


_NAMES = Names(
    {
        **LAYER,
        **shared_expert("mlp.shared_expert"),
        "ssm_a": "linear_attn.A_log",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    changes={
        "ffn_gate_inp_shexp": {"matrix": True},
        "ssm_norm": {"shift": 0.0},
        "ssm_a": {"undo": logarithms},
        "ssm_conv1d": {"taps": True},
    },
    shift=-1.0,
    behind="mtp.layers",
)
_QWEN3_NEXT = dataclasses.replace(
    _NAMES,
    layer={**_NAMES.layer, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    joins=(Join("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), order=by_heads),),
)
_QWEN35 = dataclasses.replace(
    _NAMES,
    layer={
        **_NAMES.layer,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    },
    changes={
        **_NAMES.changes,
        "ssm_a": {"order": untiled, "undo": logarithms},
        "ssm_conv1d": {"order": untiled_values, "taps": True},
        "ssm_out": {"columns": untiled},
        "attn_qkv": {"order": untiled_values},
        **{stem: {"order": untiled} for stem in ("ssm_dt", "attn_gate", "ssm_alpha", "ssm_beta")},
    },
)


def _hybrid(name: str, model_type: str, names: Names) -> Callable[[Described], Arch]:
    """Return a choice between the models with experts and without."""
    fields = {**ROTATED, "linear_conv_kernel_dim": count("ssm.conv_kernel")}
    dense = Arch(name, model_type, fields, names, amend=_layers)
    sparse = dataclasses.replace(dense, fields={**fields, **MIXTURE, **SHARED_EXPERT})
    return lambda model: sparse if model.experts else dense


HYBRIDS: Mapping[str, Callable[[Described], Arch]] = MappingProxyType(
    {
        "qwen3next": _hybrid("Qwen3NextForCausalLM", "qwen3_next", _QWEN3_NEXT),
        "qwen35": _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text", _QWEN35),
        "qwen35moe": _hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _QWEN35),
    }
)
