"""Names of MaxText's models: llama, qwen2, qwen3 and gemma 1 to 3, with layers scanned (stacked on axis 1) or not.

Its models compute some products elsewhere than Hugging Face's: Llama and Gemma 1 and 2 have the scale of scores in the
query projection, Llama rotates pairs of neighbours, and Gemma has its constants in embeddings and norm scales. Undoing
this rounds to the dtype of the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxinfer.weights.trainers.dense import Dense, Place, Table, table_of
from jaxinfer.weights.trainers.rows import Template

_AXIS = 1  # of scanned layers
_PERIOD = 6  # layers of Gemma 3 that are scanned as one block
_QUERY, _KEY = "self_attn.q_proj.weight", "self_attn.k_proj.weight"

_LAYER = {
    _QUERY: Template("self_attention.query.kernel", "DNH", "NHD"),
    _KEY: Template("self_attention.key.kernel", "DKH", "KHD"),
    "self_attn.v_proj.weight": Template("self_attention.value.kernel", "DKH", "KHD"),
    "self_attn.o_proj.weight": Template("self_attention.out.kernel", "NHD", "DNH"),
    "self_attn.q_proj.bias": Template("self_attention.query.bias", "NH"),
    "self_attn.k_proj.bias": Template("self_attention.key.bias", "KH"),
    "self_attn.v_proj.bias": Template("self_attention.value.bias", "KH"),
    "mlp.gate_proj.weight": Template("mlp.wi_0.kernel", "DF", "FD"),
    "mlp.up_proj.weight": Template("mlp.wi_1.kernel", "DF", "FD"),
    "mlp.down_proj.weight": Template("mlp.wo.kernel", "FD", "DF"),
}
_QK_NORM = {
    f"self_attn.{name}_norm.weight": f"self_attention.{whole}_norm" for name, whole in (("q", "query"), ("k", "key"))
}
_NORMS = {
    "input_layernorm.weight": "pre_self_attention_layer_norm",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm",
}
_GEMMA1_NORMS = {
    "input_layernorm.weight": "pre_self_attention_norm",
    "post_attention_layernorm.weight": "pre_ffw_norm",
}
_GEMMA_NORMS = {
    "input_layernorm.weight": "pre_self_attention_norm",
    "post_attention_layernorm.weight": "post_self_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm",
    "post_feedforward_layernorm.weight": "post_ffw_norm",
}


def tables(dense: Dense) -> list[Table]:
    """Return the rows of a model with scanned layers, and of one without."""
    top, layer = _top(dense), _layer(dense)
    return [table_of(dense, top, layer, place) for place in _places(dense)]


def plain_name(name: str) -> str:
    """Return a name without what precedes it in a state, with dots: of ``params-params-decoder-decoder_norm-scale``."""
    name = name.replace("-", ".").replace("/", ".")
    while name.startswith(("params.", "base.")):
        name = name.partition(".")[2]
    return name


def _top(dense: Dense) -> Mapping[str, Template]:
    scale = dense.sizes["D"] ** -0.5 if dense.gemma else 1.0
    return {
        "model.embed_tokens.weight": Template("token_embedder.embedding", "VD", scale=scale, padded=True),
        "model.norm.weight": _norm("decoder.decoder_norm", "D", dense),
        "lm_head.weight": Template("decoder.logits_dense.kernel", "DV", "VD", padded=True),
    }


def _norm(name: str, form: str, dense: Dense) -> Template:
    return Template(f"{name}.scale", form, offset=-1.0 if dense.gemma else 0.0)


def _layer(dense: Dense) -> Mapping[str, Template]:
    norms = {name: _norm(own, "D", dense) for name, own in _layer_norms(dense).items()}
    norms |= {name: _norm(own, "H", dense) for name, own in _QK_NORM.items()}
    pairs = not dense.gemma and not _is_qwen(dense)
    in_query = not dense.has("self_attn.q_norm.weight") and not _is_qwen(dense)
    query = dataclasses.replace(_LAYER[_QUERY], scale=1.0 / dense.scale if in_query else 1.0, interleaved=pairs)
    return {**_LAYER, **norms, _QUERY: query, _KEY: dataclasses.replace(_LAYER[_KEY], interleaved=pairs)}


def _layer_norms(dense: Dense) -> Mapping[str, str]:
    if not dense.gemma:
        return _NORMS
    return _GEMMA_NORMS if dense.has("pre_feedforward_layernorm.weight") else _GEMMA1_NORMS


def _is_qwen(dense: Dense) -> bool:
    return dense.has("self_attn.q_proj.bias") or (dense.has("self_attn.q_norm.weight") and not dense.gemma)


def _places(dense: Dense) -> tuple[Callable[[int], Place], Callable[[int], Place]]:
    """Return the positions of layers that are scanned, and of those that are not."""
    if dense.gemma and dense.has("self_attn.q_norm.weight"):
        scanned = dense.layers - dense.layers % _PERIOD

        def in_blocks(index: int) -> Place:
            if index < scanned:
                return Place(f"decoder.layers.layers_{index % _PERIOD}.", axis=_AXIS)
            return Place(f"decoder.layers_remainder.layers_{index - scanned}.")

        return in_blocks, _alone
    if dense.gemma and dense.has("pre_feedforward_layernorm.weight"):  # Gemma 2: two layers are one of MaxText
        kinds = "_local", "_global"
        return (
            lambda index: Place("decoder.layers.", kinds[index % 2], _AXIS),
            lambda index: Place(f"decoder.layers_{index // 2}.", kinds[index % 2]),
        )
    return lambda index: Place("decoder.layers.", axis=_AXIS), _alone


def _alone(index: int) -> Place:
    return Place(f"decoder.layers_{index}.")
