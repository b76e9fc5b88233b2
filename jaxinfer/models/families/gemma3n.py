"""Gemma 3n (text): layers compute one of four streams of hidden states, with a low-rank path parallel to attention.

AltUp (Baykal et al. 2023) predicts the streams before a layer and corrects them after it; LAuReL (Menghani et al. 2024)
is the low-rank path. Per-layer embeddings and reuse of the KV cache of earlier layers are as in Gemma 4.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions
from jaxinfer.layers.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import ConfigReader, sliding_layers
from jaxinfer.models.families.gemma import two_ropes
from jaxinfer.models.family import Family
from jaxinfer.models.per_layer import (
    Context,
    EmbeddingGate,
    PerLayerConfig,
    PerLayerDecoder,
    common_fields,
    embedding_specs,
    gate_specs,
    normed_attention,
    sandwich_specs,
    with_sources,
)
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, linear, plain, rms_norm
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, matmul_transposed
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}
_PATTERN, _SHARED, _SOFTCAP = 5, 15, 30.0
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_LEAST_SQUARE = 1e-5  # least mean square of a stream that is rescaled to the magnitude of another


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Gemma3nConfig(PerLayerConfig):
    """The resolved config.json of a checkpoint: see `PerLayerConfig`.

    Attributes:
        hidden_sizes: hidden size of each layer's MLP.
        sparsity: fraction of each layer's MLP that is zeroed for a token; 0: none.
        streams: number of streams of hidden states.
        active: index of the stream that layers compute.
        corrected_scale: the active stream is scaled at the input of the gate of per-layer embeddings.
        low_rank: rank of LAuReL.
    """

    hidden_sizes: tuple[int, ...]
    sparsity: tuple[float, ...]
    streams: int
    active: int
    corrected_scale: bool
    low_rank: int

    @property
    def ignored(self) -> tuple[str, ...]:
        return super().ignored if self.corrected_scale else (*super().ignored, "*.altup.correct_output_scale")

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> Gemma3nConfig:
        """Read config.json as `transformers` writes it, or as published on the Hub.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = ConfigReader(config, _DEFAULTS, {"hidden_act": "hidden_activation"})
        count, hidden_sizes = read.positive("num_hidden_layers"), _hidden_sizes(read)
        read = dataclasses.replace(read, fields={**config, "intermediate_size": hidden_sizes[0]})
        fields = common_fields(read, _SOFTCAP)
        read.require(fields["per_layer_size"] > 0, "hidden_size_per_layer_input", "must be > 0")
        rope, local_rope = two_ropes(read, fields["max_position"], fields["head_dim"])
        streams, active = read.positive("altup_num_inputs", 4), read.get("altup_active_idx", 0)
        read.require(type(active) is int and 0 <= active < streams, "altup_active_idx", f"must name one of {streams}")
        return Gemma3nConfig(
            **fields,
            layers=_layers(read, count),
            rope=rope,
            local_rope=local_rope,
            hidden_sizes=hidden_sizes,
            sparsity=_sparsity(read, count),
            streams=streams,
            active=active,
            corrected_scale=read.flag("altup_correct_scale", True),
            low_rank=read.positive("laurel_rank", 64),
        )


def _hidden_sizes(read: ConfigReader) -> tuple[int, ...]:
    count, sizes = read.positive("num_hidden_layers"), read.get("intermediate_size")
    sizes = sizes if isinstance(sizes, list) else [sizes] * count
    known = len(sizes) == count and all(type(size) is int and 0 < size < 2**31 for size in sizes)
    read.require(known, "intermediate_size", f"must be > 0, or as much for each of {count} layers")
    return tuple(sizes)


def _layers(read: ConfigReader, count: int) -> tuple[LayerSpec, ...]:
    local = sliding_layers(read) or [(index + 1) % _PATTERN != 0 for index in range(count)]
    window = read.positive("sliding_window")
    return with_sources(read, [LayerSpec(window if near else None) for near in local], _SHARED)


def _sparsity(read: ConfigReader, count: int) -> tuple[float, ...]:
    few = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    shares = read.get("activation_sparsity_pattern", [_SPARSITY] * few + [0.0] * (count - few))
    shares = shares if isinstance(shares, list) else [shares] * count
    known = len(shares) == count and all(type(share) in (int, float) and 0.0 <= share < 1.0 for share in shares)
    read.require(known, "activation_sparsity_pattern", f"must have {count} numbers from 0 and below 1")
    return tuple(float(share) for share in shares)


class SparseMLP(GatedMLP):
    """`GatedMLP` of a token's largest gates only: it subtracts the ``sparsity`` quantile of a normal distribution with
    the mean and deviation of the gates, and clips at 0."""

    sparsity: float = 0.0

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        gate_up = matmul_transposed(all_tokens(x), self.weight("gate_up"))
        gate, up = gate_up[..., 0, :].astype(jnp.float32), gate_up[..., 1, :]
        deviations = statistics.NormalDist().inv_cdf(self.sparsity)
        least = jnp.mean(gate, -1, keepdims=True) + deviations * jnp.std(gate, -1, keepdims=True)
        hidden = ACTIVATIONS[self.activation](jax.nn.relu(gate - least)).astype(x.dtype) * up
        return own_tokens(matmul(hidden, self.weight("down")))


class AltUp(Layer):
    """AltUp (alternating updates): a layer computes one stream; the others are predicted and corrected.

    Parameters: ``norm`` (`RMSNorm`), ``router`` [streams, d], ``prediction`` [streams ** 2, streams] and ``correction``
    [streams, streams].
    """

    eps: float
    active: int

    def setup(self) -> None:
        self.norm = RMSNorm(self.eps)

    def predicted(self, x: Float[Array, "*batch streams d"]) -> Float[Array, "*batch streams d"]:
        streams = x.shape[-2]
        shares = matmul_transposed(self._routed(x[..., self.active, :]), self.weight("prediction"))
        shares = shares.reshape(*shares.shape[:-1], streams, streams, 1).astype(jnp.float32)
        total = x.astype(jnp.float32)
        for stream in range(streams):
            total = total + shares[..., stream, :] * x[..., stream, None, :].astype(jnp.float32)
        return total.astype(x.dtype)

    def corrected(
        self, predicted: Float[Array, "*batch streams d"], computed: Hidden
    ) -> Float[Array, "*batch streams d"]:
        shares = matmul_transposed(self._routed(computed), self.weight("correction")) + 1.0
        change = computed - predicted[..., self.active, :]
        return predicted + shares[..., None] * change[..., None, :]

    def _routed(self, x: Hidden) -> Float[Array, "*batch streams"]:
        routed = matmul_transposed(self.norm(x) * (1.0 / x.shape[-1]), self.weight("router"))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)


class LowRank(Layer):
    """Low-rank residual path x + norm(right(left(x))) (LAuReL). ``left`` is [d, rank], ``right`` [rank, d]."""

    eps: float

    def setup(self) -> None:
        self.norm = RMSNorm(self.eps)

    def __call__(self, x: Hidden) -> Hidden:
        return x + self.norm(matmul(matmul(x, self.weight("left")), self.weight("right")))


class Gemma3nBlock(Layer):
    """A decoder layer. Subclass it and name it in `Gemma3n.overrides` to change what a layer does."""

    config: Gemma3nConfig
    layer: LayerSpec
    sparsity: float

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps
        self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            RMSNorm(eps) for _ in range(4)
        )
        self.attention, self.low_rank = normed_attention(cfg, self.layer), LowRank(eps)
        self.mlp = SparseMLP(cfg.activation, sparsity=self.sparsity) if self.sparsity else GatedMLP(cfg.activation)
        self.altup, self.embedding = AltUp(eps, cfg.active), EmbeddingGate(cfg.activation, eps)

    def __call__(
        self, x: Float[Array, "*batch streams d"], context: Context, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch streams d"], Any]:
        predicted, active = self.altup.predicted(x), self.config.active
        computed, cache = self.computed(predicted[..., active, :], context, attend, cache)
        x = self.altup.corrected(predicted, computed)
        first = x[..., active, :]
        if self.config.corrected_scale:
            first = first * self.weight("corrected_scale")
        added = self.embedding(first, context.embeddings)
        return x.at[..., 1:, :].add(added[..., None, :]), cache

    def computed(self, x: Hidden, context: Context, attend: Attend, cache: Any) -> HiddenAndCache:
        """Compute the active stream: attention, the low-rank path, the MLP."""
        normal = self.attention_norm(x)
        mixed, cache = self.attention(normal, context.ropes[self.layer.window is not None], attend, cache)
        x = (x + self.attention_out_norm(mixed) + self.low_rank(normal)) * math.sqrt(0.5)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), cache


class Gemma3n(PerLayerDecoder):
    """The Gemma3n decoder: see `PerLayerDecoder`. Between its layers there are ``streams`` hidden states.

    Parameters in addition to those of `PerLayerDecoder`: ``streams_in`` and ``streams_out``, each with a matrix [d, d]
    for every stream except the first.
    """

    config: Gemma3nConfig
    block_type = Gemma3nBlock
    block_fields = ("layers", "sparsity")

    embeddings = (*PerLayerDecoder.embeddings, "streams_in")

    def entered(self, x: Array, positions: Positions) -> tuple[Array, Context]:
        if self.taps:
            raise ValueError("a draft head that reads the layers' inputs is not supported: they are several streams")
        x, context = super().entered(x, positions)
        weights = self.weight("streams_in")
        others = [_as_large(matmul(x, weights[name]), x) for name in _names(self.config)]
        return jnp.stack([x, *others], axis=-2), context

    def normed(self, x: Float[Array, "*batch streams d"]) -> Hidden:
        first, weights = x[..., 0, :], self.weight("streams_out")
        streams = enumerate(_names(self.config), start=1)
        others = [_as_large(matmul(x[..., stream, :], weights[name]), first) for stream, name in streams]
        return super().normed(jnp.mean(jnp.stack([first, *others], axis=-2), axis=-2))


def _as_large(x: Hidden, other: Hidden) -> Hidden:
    """Rescale ``x`` to the root mean square of ``other``."""
    have, want = (jnp.mean(jnp.square(each.astype(jnp.float32)), -1, keepdims=True) for each in (x, other))
    return (x * (jnp.sqrt(want) / jnp.sqrt(jnp.maximum(have, _LEAST_SQUARE)))).astype(x.dtype)


def _names(cfg: Gemma3nConfig) -> list[str]:
    """Return the names of the streams that have matrices."""
    return [f"stream_{stream}" for stream in range(1, cfg.streams)]


def param_specs(cfg: Gemma3nConfig) -> ParamTree:
    tree = decoder(cfg, lambda index, prefix: _block_specs(cfg, index, prefix)) | embedding_specs(cfg)
    for name, tensor in (("streams_in", "altup_projections"), ("streams_out", "altup_unembed_projections")):
        shape = (cfg.hidden_size, cfg.hidden_size)
        tree[name] = {
            stream: linear(f"model.{tensor}.{index}.weight", shape, ("embed", None))
            for index, stream in enumerate(_names(cfg))
        }
    return tree


def _block_specs(cfg: Gemma3nConfig, index: int, prefix: str) -> dict[str, Any]:
    d, laurel = cfg.hidden_size, f"{prefix}.laurel"
    tree = {
        **sandwich_specs(cfg, cfg.layers[index], prefix),
        "mlp": gated_mlp(f"{prefix}.mlp", d, cfg.hidden_sizes[index]),
        "altup": _altup_specs(cfg, f"{prefix}.altup"),
        "low_rank": {
            "left": linear(f"{laurel}.linear_left.weight", (d, cfg.low_rank), ("embed", None)),
            "right": linear(f"{laurel}.linear_right.weight", (cfg.low_rank, d), (None, "embed")),
            "norm": rms_norm(f"{laurel}.post_laurel_norm", d),
        },
        "embedding": gate_specs(cfg, prefix),
    }
    if cfg.corrected_scale:
        tree["corrected_scale"] = plain(f"{prefix}.altup.correct_output_scale", (d,), ("norm",), "ones")
    return tree


def _altup_specs(cfg: Gemma3nConfig, prefix: str) -> dict[str, Any]:
    streams = cfg.streams
    return {
        "norm": rms_norm(f"{prefix}.router_norm", cfg.hidden_size),
        "router": plain(f"{prefix}.modality_router.weight", (streams, cfg.hidden_size), (None, "embed")),
        "prediction": plain(f"{prefix}.prediction_coefs.weight", (streams**2, streams), (None, None)),
        "correction": plain(f"{prefix}.correction_coefs.weight", (streams, streams), (None, None)),
    }


GEMMA3N = Family(Gemma3nConfig.from_json, param_specs, cache_spec, Gemma3n)
