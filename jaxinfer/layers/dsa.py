"""DeepSeek sparse attention (DeepSeek-V3.2-Exp): a small indexer selects the tokens that a query attends to."""

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

# Epsilon of the index key norm in every published model, independent of its `rms_norm_eps`.
INDEX_NORM_EPS = 1e-6


class Indexer(Layer):
    """Indexer: makes the index queries, weights and keys by which `pallas_kernels.token_index` selects tokens.

    Parameters: ``q`` [q_rank, heads, dim]; ``k`` [d, dim]; ``k_norm`` {scale, bias}; ``weights`` [d, heads], float32
    whatever the model dtype.

    Attributes:
        interleaved: see `rotate`; RoPE covers the first dims of a head.
    """

    interleaved: bool

    def setup(self) -> None:
        self.k_norm = LayerNorm(INDEX_NORM_EPS)

    def __call__(
        self, x: Float[Array, "*batch d"], wanted: Float[Array, "*batch k"], angles: tuple[jax.Array, jax.Array]
    ) -> Index:
        """Return the index queries, weights and keys; ``wanted``: the normed query latent of the layer."""
        q = rotate(matmul(wanted, self.weight("q")), *angles, interleaved=self.interleaved)
        k = self.k_norm(matmul(x, self.weight("k")))[..., None, :]
        k = rotate(k, *angles, interleaved=self.interleaved)[..., 0, :]
        weights = matmul(x.astype(jnp.float32), self.weight("weights"))
        heads, dim = q.shape[-2:]
        return Index(q, weights * (heads * dim) ** -0.5, k)


class SparseLatentAttention(LatentAttention):
    """`LatentAttention` to tokens selected by its own indexer (parameter ``indexer``) or by that of an earlier layer.

    Attributes:
        index_interleaved: `Indexer.interleaved`; None: no indexer, the layer uses the selection passed to it.
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
        """Run attention. Returns the output, the token selection that it used, and the cache."""
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
