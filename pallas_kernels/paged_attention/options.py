"""Options of a call of attention, besides its operands: one declaration for every path and the KV pool."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sinks", "scales", "tree", "ends"],
    meta_fields=["scale", "window", "softcap"],
)
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of one call, identical in every path; arrays may be shapes where nothing is computed.

    Attributes:
        scale: multiplies the scores, usually ``head_dim ** -0.5``.
        window: number of keys that a query sees, including its own; None: all before it.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2, arXiv:2408.00118); None: no cap.
        sinks: one more score per head, ``[heads]``, used in the normalisation only (gpt-oss; StreamingLLM's
            learned variant, arXiv:2309.17453). It is neither scaled nor capped.
        scales: dequantization factors of an int8 or float8 pool, float32, per page and head
            ``[pages, 2, kv_heads]`` or per token ``[pages, 2, kv_heads, page]``.
        tree: mask of the chunk's tokens that each token sees, bool ``[sequences, chunk, chunk]``, query first; a token
            sees itself. Keys before the chunk are seen by all. Verification of a token tree (SpecInfer,
            arXiv:2305.09781). For prefill only.
        ends: last position that each token of a chunk sees, int ``[sequences, chunk]``, at or after its own and within
            the chunk: that of its image, in which attention is bidirectional (Gemma 3). For prefill by XLA only,
            without a ``tree``.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Any = None
    scales: Any = None
    tree: Any = None
    ends: Any = None

    @property
    def refusal(self) -> str | None:
        """The reason to reject options that no kernel supports; None: they are fine."""
        if self.ends is not None:
            return "no kernel attends in both directions"
        if (self.window is None or self.window >= 1) and (self.softcap is None or self.softcap > 0):
            return None
        return f"window {self.window} and softcap {self.softcap} must be positive"

    @property
    def flags(self) -> AttentionOptions:
        """The options with True in the place of each array: the static part of a launch."""
        flags: AttentionOptions = jax.tree.map(lambda _: True, self)
        return flags
