"""Map the tensors of a GGUF file to those of a Hugging Face checkpoint, and undo what the converter changed.

The converter (llama.cpp's ``convert_hf_to_gguf.py``) turns the rows of queries and keys for another form of the rotary
embedding, stacks experts, adds one to Gemma's norms, and more: a `Target` says how to undo it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.gguf.described import Described

_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)\.(weight|bias)", re.ASCII)
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,5})", re.ASCII)

# Read with the configuration, or made by every reader for itself.
IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor, or the part of a stack that belongs to one expert, under its Hugging Face name.

    Attributes:
        order: by number of a row, where the file has it (None: rows stand as they are).
        shift: what is added to plain numbers.
        transposed: plain numbers stand as [in, out].
        matrix: a vector is a matrix of one row.
        expert: which matrix of a stack it is.
    """

    name: str
    order: Callable[[int], np.ndarray] | None = None
    shift: float = 0.0
    transposed: bool = False
    matrix: bool = False
    expert: int | None = None


def targets(model: Described, name: str) -> list[Target]:
    """Tensors of the checkpoint that a tensor of the file becomes: none, one, or one for each expert.

    A tensor that the architecture does not know keeps its name, under which nobody asks for it.
    """
    names = _names(model)
    if name in IGNORED or name.endswith(".attn_rot_embd.weight"):
        return []
    found = _LAYER.fullmatch(name)
    if found is None:
        stem, _, kind = name.rpartition(".")
        return [names.target(model, stem, names.whole.get(stem), kind, name)]
    layer, stem, kind = found.groups()
    prefix = f"{names.layers}.{int(layer)}."
    if stem in names.stacks:
        form = prefix + names.stacks[stem]
        count = model.experts if model.shapes[name][:-2] == (model.experts,) else 0
        return [Target(form.format(expert), expert=expert) for expert in range(count)] or [Target(name)]
    renamed = names.layer.get(stem)
    expert = _ONE_EXPERT.fullmatch(stem)
    if expert is not None and f"{expert[1]}_exps" in names.stacks:
        # before stacks there was a tensor for each
        renamed = names.stacks[f"{expert[1]}_exps"].removesuffix(".weight").format(int(expert[2]))
    return [names.target(model, stem, None if renamed is None else prefix + renamed, kind, name)]


def _names(model: Described) -> _Names:
    if model.has("blk.0.attn_norm_2.weight"):
        return _FALCON_40B
    return _ARCHITECTURES[model.architecture]


@dataclasses.dataclass(frozen=True)
class _Names:
    """Tensor names of one architecture.

    Attributes:
        whole: those outside of the layers, without ".weight".
        layers: what the names of all layers begin with.
        layer: those within a layer.
        stacks: of all experts: the whole name for one, with braces in the place of its number.
        orders: of which the rows were moved, by what undoes it.
        shift: what the norms lack.
        transposed: matrices stand as [in, out].
        vectors: tensors that lost their first dimension, of size 1.
    """

    whole: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    stacks: Mapping[str, str] = MappingProxyType({})
    orders: Mapping[str, Callable[[Described], Callable[[int], np.ndarray]]] = MappingProxyType({})
    shift: float = 0.0
    transposed: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()

    def target(self, model: Described, stem: str, name: str | None, kind: str, original: str) -> Target:
        if name is None:
            return Target(original)
        # DeepSeek's correction has a name of its own
        full = name if name.endswith("_bias") and kind == "bias" else f"{name}.{kind}"
        return Target(
            full,
            order=self.orders[stem](model) if stem in self.orders else None,
            shift=self.shift if stem.endswith("norm") and kind == "weight" else 0.0,
            transposed=kind == "weight" and stem in self.transposed,
            matrix=stem in self.vectors,
        )


def _turned(model: Described, heads: int) -> Callable[[int], np.ndarray]:
    """Order that puts rows of heads, whose pairs lie side by side, back to one half behind the other."""

    def order(rows: int) -> np.ndarray:
        if rows % (2 * heads):
            raise model.bad("attention.head_count", heads)
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    return order


def _turned_queries(model: Described) -> Callable[[int], np.ndarray]:
    return _turned(model, model.heads)


def _turned_keys(model: Described) -> Callable[[int], np.ndarray]:
    return _turned(model, model.kv_heads)


def _grouped(model: Described) -> Callable[[int], np.ndarray]:
    """Order that puts Falcon's queries, keys and values, one behind the other, back to groups of each KV head."""
    heads, kv_heads = model.heads, model.kv_heads

    def order(rows: int) -> np.ndarray:
        if heads % kv_heads or rows % (heads + 2 * kv_heads):
            raise model.bad("attention.head_count_kv", kv_heads)
        size = rows // (heads + 2 * kv_heads)
        ends = (heads * size, (heads + kv_heads) * size)
        parts = [part.reshape(kv_heads, -1) for part in np.split(np.arange(rows), ends)]
        return np.concatenate(parts, axis=1).reshape(-1)

    return order


_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SHARED = {f"{ours}_shexp": theirs.replace("mlp.", "mlp.{}.", 1) for ours, theirs in _GATED.items()}
_STACKS = {f"{ours}_exps": theirs.replace("mlp.", "mlp.experts.{}.", 1) + ".weight" for ours, theirs in _GATED.items()}
_MIXTRAL = {
    f"{ours}_exps": f"block_sparse_moe.experts.{{}}.{theirs}.weight"
    for ours, theirs in (("ffn_gate", "w1"), ("ffn_up", "w3"), ("ffn_down", "w2"))
}

_DECODER = _Names(_WHOLE, "model.layers", _ATTENTION | _GATED)
_QWEN3 = dataclasses.replace(_DECODER, layer=_ATTENTION | _QK_NORM | _GATED)
_LLAMA = dataclasses.replace(
    _DECODER,
    layer=_ATTENTION | _GATED | {"ffn_gate_inp": "block_sparse_moe.gate"},
    stacks=_MIXTRAL,
    orders={"attn_q": _turned_queries, "attn_k": _turned_keys},
)
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_QWEN2_SHARED = {ours: theirs.format("shared_expert") for ours, theirs in _SHARED.items()} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
_GEMMA = dataclasses.replace(_DECODER, shift=-1.0)
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3 = dataclasses.replace(_GEMMA, layer=_ATTENTION | _QK_NORM | _GATED | _SANDWICH)
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_GPT2 = _Names(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
_FALCON = _Names(
    {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
    "transformer.h",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    orders={"attn_qkv": _grouped},
)
# The first norm of a layer with two is that of its MLP.
_FALCON_40B = dataclasses.replace(_FALCON, layer={**_FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{ours: theirs.format("shared_experts") for ours, theirs in _SHARED.items()},
}

_ARCHITECTURES: Mapping[str, _Names] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _DECODER,
        "qwen3": _QWEN3,
        "qwen2moe": dataclasses.replace(
            _DECODER,
            layer={**_DECODER.layer, **_ROUTER, **_QWEN2_SHARED},
            stacks=_STACKS,
            vectors=("ffn_gate_inp_shexp",),
        ),
        "qwen3moe": dataclasses.replace(_QWEN3, layer={**_QWEN3.layer, **_ROUTER}, stacks=_STACKS),
        "gemma": _GEMMA,
        "gemma2": _GEMMA3,
        "gemma3": _GEMMA3,
        "phi3": dataclasses.replace(_DECODER, layer=_ATTENTION | _PHI3),
        "gpt2": _GPT2,
        "falcon": _FALCON,
        "deepseek2": dataclasses.replace(_DECODER, layer=_ATTENTION | _GATED | _ROUTER | _DEEPSEEK, stacks=_STACKS),
    }
)
