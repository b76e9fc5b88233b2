"""Mapping of GGUF tensors to Hugging Face names, including the inverse of the converter's changes.

The converter (llama.cpp's ``convert_hf_to_gguf.py``) permutes the rows of queries and keys for another RoPE layout,
stacks experts, adds one to Gemma's norms, and more: a `Target` describes how to undo it.
"""

from __future__ import annotations

import dataclasses
import re

from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.name_rules import Join, Names, Target
from jaxinfer.weights.gguf.tables import FALCON_40B, TABLES

_BARE = r"ssm_a|(?:ffn_gate_inp|ffn_down_exps)\.scale"  # names without ".weight"
_LAYER = re.compile(rf"blk\.(\d{{1,5}})\.(?:(.+)\.(weight|bias)|({_BARE}))", re.ASCII)
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,5})", re.ASCII)

# Read with the configuration, or computed by every reader.
IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def joins(model: Described) -> list[Join]:
    """Return the checkpoint tensors that are joined from several, if the file has all of them."""
    names = _names(model)
    made = [
        Join(
            f"{names.layers}.{index}.{name}",
            tuple(f"blk.{index}.{part}" for part in parts),
            names.interleaved,
            names.row_orders[name](model) if name in names.row_orders else None,
        )
        for index in range(model.layers)
        for name, parts in names.joins.items()
    ]
    return [join for join in made if all(model.has(part) for part in join.parts)]


def targets(model: Described, name: str) -> list[Target]:
    """Return the checkpoint tensors for a tensor of the file: none, one, or one for each expert.

    A tensor unknown to the architecture keeps its name, which no parameter requests.
    """
    names = _names(model)
    if name in IGNORED or name.endswith(".attn_rot_embd.weight"):
        return []
    found = _LAYER.fullmatch(name)
    if found is None:
        stem, _, kind = name.rpartition(".")
        if stem in names.stacks:
            return [Target(names.stacks[stem].format(index), expert=index) for index in range(model.shapes[name][0])]
        return [names.target(model, stem, names.whole.get(stem), kind, name)]
    layer, stem, kind = found[1], found[2] or found[4], found[3] or ""
    behind = names.behind if int(layer) >= model.layers else ""
    prefix = f"{behind or names.layers}.{int(layer)}."
    if f"{stem}.{kind}" in names.joined:
        return []
    if stem in names.stacks:
        form = prefix + names.stacks[stem]
        count = names.stacked(model, stem, model.shapes[name])
        return [Target(form.format(index), expert=index) for index in range(count)] or [Target(name)]
    if stem == "attn_qkv" and stem not in names.layer and "attn_q" in names.layer:
        return _cut(model, names, prefix, kind, name)
    renamed = names.layer.get(stem)
    expert = _ONE_EXPERT.fullmatch(stem)
    if expert is not None and f"{expert[1]}_exps" in names.stacks:
        # older files have one tensor per expert instead of a stack
        renamed = names.stacks[f"{expert[1]}_exps"].removesuffix(".weight").format(int(expert[2]))
    return [names.target(model, stem, None if renamed is None else prefix + renamed, kind, name)]


def _names(model: Described) -> Names:
    if model.has("blk.0.attn_norm_2.weight"):
        return FALCON_40B
    return TABLES[model.architecture]


def _cut(model: Described, names: Names, prefix: str, kind: str, name: str) -> list[Target]:
    """Split a fused tensor of queries, keys and values into the three."""
    heads, rows = model.heads, model.shapes[name][0]
    kv_heads = names.fused_kv_heads(model, int(name.split(".")[1])) if names.fused_kv_heads else model.kv_heads
    if rows % (heads + 2 * kv_heads):
        raise model.bad("attention.head_count_kv", kv_heads)
    size = rows // (heads + 2 * kv_heads)
    ends = (0, heads * size, (heads + kv_heads) * size, rows)
    return [
        dataclasses.replace(names.target(model, stem, prefix + names.layer[stem], kind, name), rows=(start, end))
        for stem, start, end in zip(("attn_q", "attn_k", "attn_v"), ends[:-1], ends[1:], strict=True)
    ]
