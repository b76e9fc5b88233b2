"""A GGUF architecture as a row of a table: its config.json fields with their readers, and its tensor names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.weights.gguf.fields import Json, common, expert_size, layer_types, rotated_share, rows_of_first
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.tensor_names import USUAL, Names

Reader = Callable[[Described], Any]  # returns the value of a field

_TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


@dataclasses.dataclass(frozen=True)
class Arch:
    """A GGUF architecture.

    Attributes:
        name: class of the model in `transformers`.
        model_type: ``model_type`` of its config.json.
        fields: fields of config.json: values, or functions of the file that read them.
        names: tensor names.
        base: returns the fields that the architecture shares with others.
        optional: fields that are left out where their function returns None.
        amend: changes fields that depend on others; raises CheckpointError for an unsupported model.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any] = MappingProxyType({})
    names: Names = USUAL
    base: Callable[[Described], Json] = common
    optional: Mapping[str, Reader] = MappingProxyType({})
    amend: Callable[[Described, Json], None] | None = None

    def config_json(self, model: Described) -> Json:
        """Return a config.json; raise CheckpointError if the metadata lacks a key that the configuration needs."""
        made: Json = {"architectures": [self.name], "model_type": self.model_type, **self.base(model)}
        made |= {name: value(model) if callable(value) else value for name, value in self.fields.items()}
        optional = {name: read(model) for name, read in self.optional.items()}
        made |= {name: value for name, value in optional.items() if value is not None}
        if self.amend is not None:
            self.amend(model, made)
        ids = {name: model.metadata.get(f"tokenizer.ggml.{key}") for name, key in _TOKEN_IDS.items()}
        made |= {name: value for name, value in ids.items() if type(value) is int}
        return {**made, "tie_word_embeddings": not model.has("output.weight")}


def count(key: str, default: int | None = None) -> Reader:
    return lambda model: model.count(key, default)


def number(key: str, default: float | None = None) -> Reader:
    return lambda model: model.number(key, default)


def given(key: str) -> Reader:
    """Return a reader of a number that is None if the file lacks the key."""
    return lambda model: None if model.get(key) is None else model.number(key)


def nonzero(key: str) -> Reader:
    """Return a reader of an integer for which 0, or no key, means None."""
    return lambda model: model.count(key, 0) or None


def scale(key: str) -> Reader:
    """Return a reader of a multiplier for which 0, or no key, means 1."""
    return lambda model: model.number(key, 0.0) or 1.0


def flag(key: str) -> Reader:
    return lambda model: bool(model.get(key))


def has(*tensors: str) -> Reader:
    """Return a reader of whether the first layer has any of the tensors."""
    return lambda model: any(model.has(f"blk.0.{tensor}") for tensor in tensors)


def first_rows(tensor: str) -> Reader:
    """Return a reader of the outputs of a matrix in the first layer that has it."""
    return lambda model: rows_of_first(model, tensor)


def kinds_of_layers(every: int) -> Reader:
    return lambda model: layer_types(model, every)


def experts(total: str, chosen: str = "num_experts_per_tok") -> dict[str, Reader]:
    """Return the fields of the number of experts and of those that a token is routed to."""
    return {total: lambda model: model.experts, chosen: count("expert_used_count")}


def layers_without_experts(model: Described) -> list[int]:
    return [index for index in range(model.layers) if not model.has(f"blk.{index}.ffn_gate_inp.weight")]


MIXTURE: Mapping[str, Any] = MappingProxyType(
    {
        **experts("num_experts"),
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": layers_without_experts,
    }
)
SHARED_EXPERT = {"shared_expert_intermediate_size": first_rows("ffn_gate_shexp.weight")}
WINDOW = {"sliding_window": count("attention.sliding_window")}
ROTATED = {"partial_rotary_factor": rotated_share}
