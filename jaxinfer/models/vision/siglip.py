"""Vision of Gemma 3: SigLIP's tower (Zhai et al. 2023), an average over squares of patches, a norm and a projection.

The text model attends in both directions within an image.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.images.siglip import make
from jaxinfer.layers.norm import LayerNorm, RMSNorm
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import layer_norm, plain, rms_norm
from jaxinfer.models.vision.layers import replicated, within
from jaxinfer.models.vision.tower import VisionFamily
from jaxinfer.models.vision.vit import (
    SQUARE_DEFAULTS,
    SQUARE_PREFIX,
    SquareConfig,
    SquareTower,
    blocks,
    patch_order,
    projected,
    run,
    square_side,
    square_specs,
    vision_reader,
    vit_fields,
)
from jaxinfer.quant import matmul, plus_bias
from jaxinfer.types import ParamTree

_DEFAULTS = {**SQUARE_DEFAULTS, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh"}
_OFFSET = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SiglipConfig(SquareConfig):
    """The tower and the projector of a checkpoint: see `VitConfig`."""

    @staticmethod
    def from_json(config_json: Mapping[str, Any]) -> SiglipConfig:
        """Read the config.json of a Gemma3ForConditionalGeneration.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read, outer = vision_reader(config_json, ("siglip_vision_model",), _DEFAULTS), ConfigReader(config_json)
        side, tokens = square_side(read), outer.positive("mm_tokens_per_image", 256)
        of_token = side // math.isqrt(tokens)
        what = f"must be the square of a divisor of {side}, the patches of an image's side"
        square = math.isqrt(tokens) ** 2 == tokens and of_token**2 * tokens == side**2
        outer.require(square, "mm_tokens_per_image", what)
        return SiglipConfig(
            **vit_fields(read, config_json),
            norm_eps=read.number("layer_norm_eps", 1e-6),
            side=side,
            merged=of_token**2,
            bidirectional=True,
        )


class SiglipEncoder(SquareTower):
    """SigLIP's tower, without a projector. The patches of a token are consecutive."""

    config: SquareConfig

    def setup(self) -> None:
        self.layers = blocks(self.config)
        self.post_norm = LayerNorm(self.config.norm_eps)

    def hidden(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "rows d"]:
        """Return the hidden states of all patches."""
        cfg = self.config
        x = plus_bias(projected(patches, self.weight("patch")), self.weight("patch_bias"))
        at = patch_order(cfg.side, cfg.side, math.isqrt(cfg.merged)) @ np.array([cfg.side, 1])
        positions = self.weight("positions")[at]
        x = x + jnp.pad(positions, ((0, x.shape[0] - at.size), (0, 0)))
        return self.post_norm(run(self.layers, x, None, within(layout["segments"])))


class SiglipTower(SiglipEncoder):
    """SigLIP's tower with Gemma 3's projector."""

    config: SiglipConfig

    def setup(self) -> None:
        super().setup()
        self.soft_norm = RMSNorm(self.config.norm_eps, _OFFSET)

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        x = self.hidden(patches, layout)
        pooled = x.astype(jnp.float32).reshape(-1, self.config.merged, x.shape[-1]).mean(1).astype(x.dtype)
        return matmul(self.soft_norm(pooled), self.weight("project"))


def encoder_specs(cfg: SquareConfig, prefix: str) -> dict[str, Any]:
    """Return the parameters of `SiglipEncoder`, whose tensors begin with ``prefix``."""
    d = cfg.hidden_size
    return {
        **square_specs(cfg, prefix),
        "patch_bias": plain(f"{prefix}.embeddings.patch_embedding.bias", (d,), (None,), "zeros"),
        "positions": plain(f"{prefix}.embeddings.position_embedding.weight", (cfg.side**2, d), (None, None)),
        "post_norm": layer_norm(f"{prefix}.post_layernorm", d),
    }


def param_specs(cfg: SiglipConfig) -> ParamTree:
    d = cfg.hidden_size
    tree: dict[str, Any] = {
        **encoder_specs(cfg, SQUARE_PREFIX),
        "soft_norm": rms_norm("multi_modal_projector.mm_soft_emb_norm", d, "zeros"),
        "project": plain("multi_modal_projector.mm_input_projection_weight", (d, cfg.width), (None, None)),
    }
    return replicated(tree)


GEMMA3 = VisionFamily(SiglipConfig.from_json, param_specs, SiglipTower, make)
