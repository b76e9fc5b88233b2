"""Names of Levanter's models (Marin), the paths of their `equinox` modules: llama, mistral, qwen, qwen3, gemma 1 to 3.

Arrays are in the order of Hugging Face, with one axis for each named axis of `haliax`. Layers are stacked, or a list of
blocks (``scan_layers=False``).
"""

from __future__ import annotations

from jaxinfer.weights.trainers.dense import Dense, Place, Table, table_of
from jaxinfer.weights.trainers.rows import Template

_TOP = {
    "model.embed_tokens.weight": Template("embeddings.token_embeddings.weight", "VD"),
    "model.norm.weight": Template("transformer.norm.weight", "D"),
    "lm_head.weight": Template("lm_head.weight", "VD"),
}
_FORMS = {
    "self_attn.q_proj.weight": "KGHD",
    "self_attn.k_proj.weight": "KHD",
    "self_attn.v_proj.weight": "KHD",
    "self_attn.o_proj.weight": "DNH",
    "self_attn.q_proj.bias": "KGH",
    "self_attn.k_proj.bias": "KH",
    "self_attn.v_proj.bias": "KH",
    "self_attn.o_proj.bias": "D",
    "self_attn.q_norm.weight": "H",
    "self_attn.k_norm.weight": "H",
    "mlp.gate_proj.weight": "FD",
    "mlp.up_proj.weight": "FD",
    "mlp.down_proj.weight": "DF",
    "input_layernorm.weight": "D",
    "post_attention_layernorm.weight": "D",
    "pre_feedforward_layernorm.weight": "D",
    "post_feedforward_layernorm.weight": "D",
}
_LAYER = {name: Template(name, form) for name, form in _FORMS.items()}


def tables(dense: Dense) -> list[Table]:
    """Return the rows of a model with stacked layers, and of one with a list of layers."""
    stacked = Place("transformer.layers.stacked.", axis=0)
    return [
        table_of(dense, _TOP, _LAYER, lambda index: stacked),
        table_of(dense, _TOP, _LAYER, lambda index: Place(f"transformer.layers.blocks.{index}.")),
    ]
