"""DeepSeek's sparse attention (DeepSeek-V3.2-Exp): a small indexer chooses the tokens that a query attends to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, ChoosingAttend, causal_choice
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mla import LatentAttention
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import rotate
from jaxinfer.parallel.tokens import all_tokens
from jaxinfer.quant import matmul
from pallas_kernels.token_index import Index

# Of the norm of index keys, in every published model, whatever its `rms_norm_eps`.
INDEX_NORM_EPS = 1e-6


class Indexer(Layer):
    """The index queries, weights and keys of tokens; `pallas_kernels.token_index` has the rule by which they choose.

    Parameters: ``q`` [q_rank, heads, dim]; ``k`` [d, dim]; ``k_norm`` {scale, bias}; ``weights`` [d, heads], float32
    whatever the model's dtype.

    Attributes:
        interleaved: see `rotate`; the first numbers of a head are rotated.
    """

    interleaved: bool

    def setup(self) -> None:
        self.k_norm = LayerNorm(INDEX_NORM_EPS)

    def __call__(
        self, x: Float[Array, "*batch d"], wanted: Float[Array, "*batch k"], angles: tuple[jax.Array, jax.Array]
    ) -> Index:
        """``wanted``: the normed latent that the layer's queries are projected from."""
        q = rotate(matmul(wanted, self.weight("q")), *angles, interleaved=self.interleaved)
        k = self.k_norm(matmul(x, self.weight("k")))[..., None, :]
        k = rotate(k, *angles, interleaved=self.interleaved)[..., 0, :]
        weights = matmul(x.astype(jnp.float32), self.weight("weights"))
        heads, dim = q.shape[-2:]
        return Index(q, weights * (heads * dim) ** -0.5, k)


class SparseLatentAttention(LatentAttention):
    """`LatentAttention` to the tokens that an indexer chooses: its own (parameter ``indexer``), or an earlier layer's.

    Attributes:
        index_interleaved: of the indexer, see there; None: the layer has none, and takes the choice that it is handed.
    """

    index_interleaved: bool | None = None

    def setup(self) -> None:
        super().setup()
        if self.index_interleaved is not None:
            self.indexer = Indexer(self.index_interleaved)

    def __call__(  # type: ignore[override]
        self,
        x: Float[Array, "*batch d"],
        angles: tuple[jax.Array, jax.Array],
        attend: Attend,
        cache: Any,
        chosen: Any = None,
    ) -> tuple[Float[Array, "*batch d"], Any, Any]:
        """Attend. Returns the result, the choice by which it came about, and the cache."""
        x = all_tokens(x)
        wanted, k = self.latents(x, angles)
        q, rest = self.queries(wanted, angles), (cache, self.layer, self.scale)
        if self.index_interleaved is not None:
            index = self.indexer(x, wanted, angles)
            if isinstance(attend, ChoosingAttend):
                mixed, chosen, cache = attend.choosing(q, k, index, *rest)
                return self.out(mixed), chosen, cache
            chosen = causal_choice(index, self.layer)
        mixed, cache = attend(q, k, None, *rest, chosen=chosen)
        return self.out(mixed), chosen, cache
