"""Mapping of GGUF tensors to Hugging Face names, including the inverse of the converter's changes.

The converter (llama.cpp's ``convert_hf_to_gguf.py``) permutes the rows of queries and keys for another RoPE layout,
stacks experts, adds one to Gemma's norms, and more: a `Target` describes how to undo it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.weights.gguf.header_view import Described

# Given the number of rows, or columns, returns the index of each in the file.
Order = Callable[[int], np.ndarray]

_BARE = r"ssm_a|(?:ffn_gate_inp|ffn_down_exps)\.scale"  # names without ".weight"
_LAYER = re.compile(rf"blk\.(\d{{1,5}})\.(?:(.+)\.(weight|bias)|({_BARE}))", re.ASCII)
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,5})", re.ASCII)

# Complete names, which take no ".weight" or ".bias": router corrections, sinks and scales.
_WITHOUT_KIND = ("_bias", ".sinks", "_scale", ".layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")

# Read with the configuration, or computed by every reader.
IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def shared_expert(module: str) -> dict[str, str]:
    """Return the names of a shared expert's matrices."""
    return {f"{ours}_shexp": theirs.replace("mlp.", f"{module}.") for ours, theirs in GATED.items()}


# Usual names within a layer; an architecture overrides the ones in which it differs.
LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **GATED,
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
        **shared_expert("mlp.shared_experts"),
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        # Additional tensors of multi-token prediction layers, which no parameter requests.
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.shared_head_norm": "shared_head.norm",
    }
)
STACKS = {f"{ours}_exps": theirs.replace("mlp.", "mlp.experts.{}.") + ".weight" for ours, theirs in GATED.items()}


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor, or the slice of a stack that belongs to one expert, under its Hugging Face name.

    Attributes:
        order: order of the rows (None: unchanged).
        shift: value added to unquantized values.
        transposed: unquantized values are stored as [in, out].
        matrix: a vector becomes a matrix with one row.
        expert: index of the matrix in a stack, or of the row in a matrix.
        rows: start and stop of the rows of a fused matrix.
        columns: like ``order``, for the inputs of a matrix.
        undo: inverse of a change to the values; raises ValueError.
        taps: a matrix [channels, taps] becomes a convolution [channels, 1, taps].
        plain: no product reads it as a weight, so it must be dequantized.
    """

    name: str
    order: Order | None = None
    shift: float = 0.0
    transposed: bool = False
    matrix: bool = False
    expert: int | None = None
    rows: tuple[int, int] | None = None
    columns: Order | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None
    taps: bool = False
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class Join:
    """A checkpoint tensor that is split over several tensors of the file, or transposed in the file.

    For stacks [experts, out, in] and biases [experts, out] the outputs are joined, and stacks are transposed to
    [experts, in, out]. For matrices [out, in] with an ``order`` the rows are joined.

    Attributes:
        name: name in the checkpoint; in `Names` that within a layer.
        parts: tensors of the file; in `Names` those of a layer.
        interleaved: outputs of the parts alternate; otherwise the parts are concatenated.
        order: order of the rows among those of all parts; in `Names` a function of the file and their number.
        latents: the parts are those of an MLA up-projection: keys [heads, rank, nope], values [heads, value, rank].
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool = False
    order: Callable[..., np.ndarray] | None = None
    latents: bool = False


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of one architecture.

    Attributes:
        layer: names within a layer.
        whole: names outside of the layers, without ".weight".
        layers: name prefix of all layers.
        stacks: full names of stacks, with braces for the expert's number; a stack outside of the layers has as many
            matrices as its first dimension.
        changes: fields of the `Target` that undo the converter's changes, by tensor; ``order`` and ``columns`` are
            functions of the file and the number of rows.
        shift: value to add to the norms.
        joins: tensors of a layer that are joined.
        fused_kv_heads: returns the KV heads of a layer with fused QKV; None: the same in all layers.
        behind: name prefix of multi-token prediction layers; empty: the same as other layers.
    """

    layer: Mapping[str, str] = LAYER
    whole: Mapping[str, str] = MappingProxyType(WHOLE)
    layers: str = "model.layers"
    stacks: Mapping[str, str] = MappingProxyType(STACKS)
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    shift: float = 0.0
    joins: tuple[Join, ...] = ()
    fused_kv_heads: Callable[[Described, int], int] | None = None
    behind: str = ""

    def joined(self, model: Described) -> list[Join]:
        """Return the checkpoint tensors that are joined from several, if the file has all of them."""
        made = [
            dataclasses.replace(
                join,
                name=f"{self.layers}.{index}.{join.name}",
                parts=tuple(f"blk.{index}.{part}" for part in join.parts),
                order=join.order and functools.partial(join.order, model),
            )
            for index in range(model.layers)
            for join in self.joins
        ]
        return [join for join in made if all(model.has(part) for part in join.parts)]

    def targets(self, model: Described, name: str) -> list[Target]:
        """Return the checkpoint tensors for a tensor of the file: none, one, or one for each expert.

        A tensor unknown to the architecture keeps its name, which no parameter requests.
        """
        if name in IGNORED or name.endswith(".attn_rot_embd.weight"):
            return []
        found = _LAYER.fullmatch(name)
        if found is None:
            stem, _, kind = name.rpartition(".")
            if stem in self.stacks:
                return [Target(self.stacks[stem].format(index), expert=index) for index in range(model.shapes[name][0])]
            return [self._target(model, stem, self.whole.get(stem), kind, name)]
        layer, stem, kind = found[1], found[2] or found[4], found[3] or ""
        behind = self.behind if int(layer) >= model.layers else ""
        prefix = f"{behind or self.layers}.{int(layer)}."
        if any(f"{stem}.{kind}" in join.parts for join in self.joins):
            return []
        if stem in self.stacks:
            form = prefix + self.stacks[stem]
            count = _stacked(model, stem, model.shapes[name])
            return [Target(form.format(index), expert=index) for index in range(count)] or [Target(name)]
        if stem == "attn_qkv" and stem not in self.layer and "attn_q" in self.layer:
            return self._cut(model, prefix, kind, name)
        renamed = self.layer.get(stem)
        expert = _ONE_EXPERT.fullmatch(stem)
        if expert is not None and f"{expert[1]}_exps" in self.stacks:
            # older files have one tensor per expert instead of a stack
            renamed = self.stacks[f"{expert[1]}_exps"].removesuffix(".weight").format(int(expert[2]))
        return [self._target(model, stem, None if renamed is None else prefix + renamed, kind, name)]

    def _target(self, model: Described, stem: str, name: str | None, kind: str, original: str) -> Target:
        if name is None:
            return Target(original)
        full = name if not kind or name.endswith(_WITHOUT_KIND) else f"{name}.{kind}"
        shift = self.shift if stem.endswith("norm") and kind == "weight" else 0.0
        changes: dict[str, Any] = {
            field: functools.partial(change, model) if field in ("order", "columns") else change
            for field, change in self.changes.get(stem, {}).items()
        }
        return Target(full, **{"shift": shift, **changes})

    def _cut(self, model: Described, prefix: str, kind: str, name: str) -> list[Target]:
        """Split a fused tensor of queries, keys and values into the three."""
        heads, rows = model.heads, model.shapes[name][0]
        kv_heads = self.fused_kv_heads(model, int(name.split(".")[1])) if self.fused_kv_heads else model.kv_heads
        if rows % (heads + 2 * kv_heads):
            raise model.bad("attention.head_count_kv", kv_heads)
        size = rows // (heads + 2 * kv_heads)
        ends = (0, heads * size, (heads + kv_heads) * size, rows)
        return [
            dataclasses.replace(self._target(model, stem, prefix + self.layer[stem], kind, name), rows=(start, end))
            for stem, start, end in zip(("attn_q", "attn_k", "attn_v"), ends[:-1], ends[1:], strict=True)
        ]


USUAL = Names()


def _stacked(model: Described, stem: str, shape: tuple[int, ...]) -> int:
    """Return the number of entries of a stack: matrices of all experts, or rows of all heads; 0 if it is none."""
    if stem.endswith("_exps"):
        return model.experts if shape[:-2] == (model.experts,) else 0
    return shape[0] if shape[:-1] in ((model.heads,), (model.kv_heads,)) else 0


def fused_kv_heads(model: Described, layer: int) -> int:
    """Return the number of KV heads that the rows of ``attn_qkv`` leave; the head size is that of the query norm."""
    heads, rows = model.heads, model.rows(f"blk.{layer}.attn_qkv.weight")
    size = math.prod(model.shapes.get(f"blk.{layer}.attn_q_norm.weight", ()))
    if not size or rows <= heads * size or rows % (2 * size) != heads * size % (2 * size):
        raise model.bad("attention.head_count", heads)
    return (rows // size - heads) // 2


def _turned(model: Described, heads: int, rows: int) -> np.ndarray:
    """Return the order that converts rows of heads from interleaved RoPE pairs back to two halves."""
    if rows % (2 * heads):
        raise model.bad("attention.head_count", heads)
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def turned_queries(model: Described, rows: int) -> np.ndarray:
    return _turned(model, model.heads, rows)


def turned_keys(model: Described, rows: int) -> np.ndarray:
    return _turned(model, model.kv_heads, rows)


def grouped(model: Described, rows: int) -> np.ndarray:
    """Return the order that regroups Falcon's concatenated queries, keys and values by KV head."""
    heads, kv_heads = model.heads, model.kv_heads
    if heads % kv_heads or rows % (heads + 2 * kv_heads):
        raise model.bad("attention.head_count_kv", kv_heads)
    size = rows // (heads + 2 * kv_heads)
    parts = np.split(np.arange(rows), (heads * size, (heads + kv_heads) * size))
    return np.concatenate([part.reshape(kv_heads, -1) for part in parts], axis=1).reshape(-1)
