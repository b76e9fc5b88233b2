"""Work of a checkpoint: bytes that a decode step must read, operations that a prefill must do."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from benchmarks.peers.checkpoint import BYTES, read_config, tensor_entries

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Work:
    """Sizes of a model in elements.

    Attributes:
        layers: weights of all layers and the last norm that one token uses.
        head: weights of the output matrix, or of the tied embedding table. An untied table is not read whole.
        kv: keys and values of one token.
        scores: products of one query with one key: query heads times head_dim, over all layers.
    """

    layers: int
    head: int
    kv: int
    scores: int
    max_len: int

    @classmethod
    def of(cls, folder: pathlib.Path) -> Work:
        config, entries = read_config(folder), tensor_entries(folder)
        sizes = {name: math.prod(entry.shape) for name, entry in entries.items()}
        tied = config.get("tie_word_embeddings", False) or _HEAD not in sizes
        heads, depth = config["num_attention_heads"], config["num_hidden_layers"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            layers=sum(size for name, size in sizes.items() if name not in (_EMBEDDING, _HEAD)),
            head=sizes[_EMBEDDING if tied else _HEAD],
            kv=2 * depth * (config.get("num_key_value_heads") or heads) * head_dim,
            scores=depth * heads * head_dim,
            max_len=config["max_position_embeddings"],
        )

    def decode_bytes(self, batch: int, context: float, dtype: str) -> float:
        """Return the bytes of a step of ``batch`` sequences with ``context`` tokens each: weights, keys, values."""
        return BYTES[dtype] * (self.layers + self.head + batch * context * self.kv)

    def prefill_flops(self, batch: int, length: int) -> float:
        """Return the operations of ``batch`` prompts of ``length`` tokens: a multiply and an add for each weight and
        token, causal attention (scores and their sum over values), and the head for each prompt's last token."""
        attention = 4 * self.scores * length * (length + 1) / 2
        return batch * (2 * self.layers * length + attention + 2 * self.head)
