"""Models for parity tests: one switch, or one odd size, at a time. Data only.

``style`` "hub" means that config.json is written as given here, in the style of published checkpoints
(``rope_theta`` and ``rope_scaling`` at the top level, ``torch_dtype``, defaults left out). "saved" means that
transformers builds the configuration and saves it (``rope_parameters``, every field spelt out).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose logits transformers computes.

    Attributes:
        name: unique; the first word is transformers' model type.
        config: fields of config.json in addition to ``COMMON``.
        style: "saved" or "hub", see the module's docstring.
        prompt_length: tokens.
        shards: number of safetensors files of the checkpoint.
        served: whether it is typical, for the checks that every family passes. At least one a model type.
        overlooked: an edit of config.json that simulates an overlooked field: it must change the logits
            beyond the tolerance.
        norm_centre: the mean weight of norms: 0 where the model adds 1 to them.
        query_share: factor of the weights of query norms: less than 1 where scores are not scaled,
            which else would be large, and rounding errors too.
        tables: tensors that a tied model's checkpoint stores, the embedding table ("embed") and the head ("head"):
            if both, they differ.
    """

    name: str
    config: dict
    style: str = "saved"
    prompt_length: int = 24
    shards: int = 1
    served: bool = False
    overlooked: Mapping[str, Any] | None = None
    norm_centre: float = 1.0
    query_share: float = 1.0
    tables: tuple[str, ...] = ("embed",)

    @property
    def model_type(self) -> str:
        return self.name.split("-")[0]


def sizes(
    hidden: int, intermediate: int | list[int], layers: int, heads: int, kv_heads: int | None, **others: Any
) -> dict:
    sizes = {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return {key: value for key, value in sizes.items() if value is not None} | others


def rope(kind: str, theta: float, **others: Any) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **others}}
