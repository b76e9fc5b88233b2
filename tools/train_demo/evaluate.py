"""Held-out loss: nats per token, bits per character, and by position in the context."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.models.model import Model

ROWS = 2  # sequences of one forward pass


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Losses over a text, cut into windows that each start with BOS and are independent of the previous window."""

    characters: int
    tokens: int
    nats_per_token: float
    bits_per_character: float
    by_position: dict[str, float]


def windows(ids: Int[np.ndarray, " n"], bos: int, length: int) -> Int[np.ndarray, "rows window"]:
    """Return [rows, length + 1]: BOS and ``length`` ids. The last window is padded with -1, which is not scored."""
    rows = -(-len(ids) // length)
    padded = np.full(rows * length, -1, np.int32)
    padded[: len(ids)] = ids
    return np.concatenate([np.full((rows, 1), bos, np.int32), padded.reshape(rows, length)], axis=1)


class Scorer:
    """Scorer of one model under any parameters; compiled once per window length."""

    def __init__(self, model: Model, bos: int) -> None:
        self._bos = bos

        def losses(params: Any, cut: Int[Array, "rows window"]) -> Float[Array, "rows time"]:
            tokens, targets = cut[:, :-1], cut[:, 1:]
            logprobs = jax.nn.log_softmax(model.apply(params, jnp.maximum(tokens, 0)))
            chosen = jnp.take_along_axis(logprobs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
            return jnp.where(targets >= 0, -chosen, 0.0)

        self._losses = jax.jit(losses)

    def token_losses(self, params: Any, cut: Int[np.ndarray, "rows window"]) -> Float[np.ndarray, "rows time"]:
        """Return nats of every token, float64, 0 for padding."""
        padded = np.full((-(-len(cut) // ROWS) * ROWS, cut.shape[1]), -1, np.int32)
        padded[: len(cut)] = cut
        parts = [np.asarray(self._losses(params, padded[row : row + ROWS])) for row in range(0, len(padded), ROWS)]
        return np.concatenate(parts)[: len(cut)].astype(np.float64)

    def mean(self, params: Any, ids: Int[np.ndarray, " n"], length: int) -> float:
        """Return nats per token over windows of ``length``."""
        return float(self.token_losses(params, windows(ids, self._bos, length)).sum() / len(ids))

    def held_out(self, params: Any, ids: Int[np.ndarray, " n"], characters: int, length: int) -> HeldOut:
        """Return all measures of a text of ``characters`` characters and tokens ``ids``."""
        cut = windows(ids, self._bos, length)
        losses = self.token_losses(params, cut)
        total = float(losses.sum())
        bits = total / characters / math.log(2)
        return HeldOut(characters, len(ids), total / len(ids), bits, _by_position(losses, cut[:, 1:] >= 0))


def _by_position(losses: Float[np.ndarray, "rows time"], scored: np.ndarray) -> dict[str, float]:
    """Return mean nats of the tokens at positions 0-63, 64-127, 128-255, ... of their window."""
    length = losses.shape[1]
    edges = [0, *(2**power for power in range(6, 20) if 2**power < length), length]
    return {
        f"{low}-{high - 1}": float(losses[:, low:high].sum() / scored[:, low:high].sum())
        for low, high in itertools.pairwise(edges)
        if scored[:, low:high].any()
    }
