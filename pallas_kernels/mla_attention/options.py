"""Options of a call of attention to latents; for attention to heads see `paged_attention.options`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

RANK = 512


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scales", "chosen"], meta_fields=["scale", "rank"])
@dataclasses.dataclass(frozen=True)
class LatentOptions:
    """Options of one call, alike in every path; arrays may be shapes of them where nothing is computed.

    Attributes:
        scale: multiplies the scores: usually ``(nope + rope) ** -0.5`` with the head's size before absorption.
        rank: how many numbers of a token's latent are its value; those behind them are the rotated key.
        scales: of a pool in int8 or float8, float32 ``[pages, page, parts]``: what a token's numbers are multiplied
            with when they are read: its first ``rank`` with the first, its rotated key with the second.
        chosen: the only keys that queries attend to, as `pallas_kernels.token_index` chooses them: of `decode`
            positions ``[rows, k]``, ascending, of which a row has min(k, length); of `prefill` a mask
            ``[sequences, chunk, keys]``.
    """

    scale: float
    rank: int = RANK
    scales: Any = None
    chosen: Any = None
