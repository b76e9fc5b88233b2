"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), absorbed: no keys or values are made of latents."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Layer
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import rotate
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, matmul_heads, plus_bias
from jaxinfer.types import LayerSpec

# Epsilon of the latent norms in every published model, independent of its `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6


class LatentAttention(Layer):
    """MLA layer: caches a latent of ``layer.latent_rank`` and a rotated key of ``rope`` elements per token.

    Weight absorption: the unrotated part of a query is multiplied by the key up-projection of its head and scored
    against latents; the attention output over latents is multiplied by the value up-projection. This reorders the
    published equation: no key or value of a head is ever materialised, in prefill or decode.

    Parameters: ``down`` [d, q_rank + latent_rank + rope], the query latent (absent without ``q_rank``), the key latent,
    and the key to rotate; ``q_norm`` and ``kv_norm`` {scale}; ``q`` [q_rank or d, heads, nope + rope]; ``up_key``
    [heads, nope, latent_rank]; ``up_value`` [heads, latent_rank, value_dim]; ``out`` [heads * value_dim, d];
    ``down_bias`` and ``out_bias`` with ``bias``.

    Attributes:
        nope, rope: unrotated and rotated dims of a query head.
        q_rank: rank of the query latent; None: queries are projected from the input.
        scale: score scale.
        interleaved: see `rotate`.
    """

    heads: int
    nope: int
    rope: int
    layer: LayerSpec
    scale: float
    q_rank: int | None = None
    bias: bool = False
    interleaved: bool = True

    def setup(self) -> None:
        self.kv_norm = RMSNorm(LATENT_NORM_EPS)
        if self.q_rank is not None:
            self.q_norm = RMSNorm(LATENT_NORM_EPS)

    def __call__(
        self, x: Float[Array, "*batch d"], angles: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        """Run attention; ``angles``: cosines and sines of the rotated dims, of `RopeConfig.angles`."""
        wanted, k = self.latents(all_tokens(x), angles)
        mixed, cache = attend(self.queries(wanted, angles), k, None, cache, self.layer, self.scale)
        return self.out(mixed), cache

    def latents(
        self, x: Float[Array, "*batch d"], angles: tuple[jax.Array, jax.Array]
    ) -> tuple[Float[Array, "*batch wanted"], Float[Array, "*batch 1 latent"]]:
        """Return the input of the query projection, and the key latents with their rotated keys."""
        down = matmul(x, self.weight("down"), self.weight("down_bias") if self.bias else None)
        first, rank = self.q_rank or 0, self.layer.latent_rank
        assert rank is not None
        wanted, latent, key = jnp.split(down, [first, first + rank], axis=-1)
        key = rotate(key[..., None, :], *angles, interleaved=self.interleaved)
        k = jnp.concatenate([self.kv_norm(latent)[..., None, :], key], axis=-1)
        return x if self.q_rank is None else self.q_norm(wanted), k

    def out(self, mixed: Float[Array, "*batch heads rank"]) -> Float[Array, "*batch d"]:
        """Project attention outputs over latents to the layer output."""
        values = matmul_heads(mixed, self.weight("up_value"))
        out = own_tokens(matmul(values.reshape(*values.shape[:-2], -1), self.weight("out")))
        return plus_bias(out, self.weight("out_bias")) if self.bias else out

    def queries(
        self, x: Float[Array, "*batch k"], angles: tuple[jax.Array, jax.Array]
    ) -> Float[Array, "*batch heads latent"]:
        """Return absorbed queries, which are scored against latents and rotated keys."""
        q = matmul(x, self.weight("q"))
        absorbed = matmul_heads(q[..., : self.nope], self.weight("up_key"))
        return jnp.concatenate([absorbed, rotate(q[..., self.nope :], *angles, interleaved=self.interleaved)], axis=-1)
