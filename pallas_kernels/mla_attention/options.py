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
    """Options of one call, identical in every path; arrays may be shapes where nothing is computed.

    Attributes:
        scale: multiplies the scores: usually ``(nope + rope) ** -0.5`` with the head's size before absorption.
        rank: length of the value within a token's latent; the rotated key follows it.
        scales: scales of an int8 or float8 pool, float32 ``[pages, page, parts]``: the first dequantizes a token's
            first ``rank`` numbers, the second its rotated key.
        chosen: the only keys that queries attend to, chosen by `pallas_kernels.token_index`: for `decode`
            positions ``[rows, k]``, ascending, of which a row has min(k, length); for `prefill` a mask
            ``[sequences, chunk, keys]``.
    """

    scale: float
    rank: int = RANK
    scales: Any = None
    chosen: Any = None
