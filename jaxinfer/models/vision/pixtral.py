"""Vision of Mistral Small 3.1 and Ministral 3: Pixtral's tower (Agrawal et al. 2024), and merged squares of patches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.formats.multimodal import text_model
from jaxinfer.images.pixtral import make
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import attention, gated_mlp, matrix, rms_norm
from jaxinfer.models.vision.layers import replicated, within
from jaxinfer.models.vision.tower import Grid, Tower, VisionFamily
from jaxinfer.models.vision.vit import (
    ProjectedConfig,
    blocks,
    layers_up_to,
    patch_order,
    patch_weight,
    projected,
    projector,
    projector_fields,
    projector_specs,
    run,
    segments,
    vision_reader,
    vit_fields,
)
from jaxinfer.quant import matmul_transposed
from jaxinfer.types import ParamTree

_EPS = 1e-5
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PixtralConfig(ProjectedConfig):
    """The tower and the projector of a checkpoint: see `VitConfig`.

    Attributes:
        theta: base of the frequencies of the tower's rotary embedding.
        projector_eps: epsilon of the projector's norm.
    """

    theta: float
    projector_eps: float

    @staticmethod
    def from_json(config_json: Mapping[str, Any]) -> PixtralConfig:
        """Read the config.json of a Mistral3ForConditionalGeneration.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read, outer = vision_reader(config_json, ("pixtral",), _DEFAULTS), ConfigReader(config_json)
        fields, text = vit_fields(read, config_json), ConfigReader(text_model(config_json))
        read.require(
            fields["hidden_size"] % (4 * fields["heads"]) == 0, "hidden_size", "must give heads of 4 n numbers"
        )
        return PixtralConfig(
            **fields | {"depth": layers_up_to(config_json, fields["depth"], -1)},
            norm_eps=_EPS,
            merged=outer.positive("spatial_merge_size", 2) ** 2,
            theta=_theta(read),
            projector_eps=text.number("rms_norm_eps", 1e-5),
            **projector_fields(config_json, bias=False),
        )


def _theta(read: ConfigReader) -> float:
    found = read.get("rope_parameters", {})
    read.require(isinstance(found, Mapping), "rope_parameters", "must be an object")
    rope = ConfigReader(found)
    rope.choice("rope_type", "axial", ("axial", "default"))
    theta = rope.number("rope_theta", read.number("rope_theta", 1e4))
    read.require(theta > 0, "rope_parameters", "must have a rope_theta > 0")
    return theta


class PixtralTower(Tower):
    """Pixtral's tower with Mistral 3's projector. The patches of a token are consecutive."""

    config: PixtralConfig

    def setup(self) -> None:
        cfg = self.config
        self.pre_norm = RMSNorm(_EPS)
        self.layers = blocks(cfg, rms=True)
        self.norm = RMSNorm(cfg.projector_eps)
        self.projector = projector(cfg)

    def layout(self, grid: Grid, rows: int) -> dict[str, np.ndarray]:
        at = patch_order(*grid[1:], math.isqrt(self.config.merged))
        return {"segments": segments(len(at), rows), "at": np.pad(at, ((0, rows - len(at)), (0, 0)))}

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        x = self.pre_norm(projected(patches, self.weight("patch")))
        x = self.norm(run(self.layers, x, self._angles(layout["at"]), within(layout["segments"])))
        # The merging layer's inputs are the numbers of a channel in all patches, channel after channel.
        squares = x.reshape(-1, self.config.merged, x.shape[-1]).swapaxes(1, 2)
        return self.projector(matmul_transposed(squares.reshape(squares.shape[0], -1), self.weight("merge")))

    def _angles(self, at: Int[Array, "rows 2"]) -> tuple[Float[Array, "rows half"], Float[Array, "rows half"]]:
        """Return cosines and sines: even frequencies turn with the row, odd ones with the column."""
        cfg = self.config
        inverse = RopeConfig(cfg.theta).inverse_frequencies(cfg.head_dim).reshape(-1, 2).T
        angles = (at[:, :, None].astype(jnp.float32) * jnp.asarray(inverse)).reshape(at.shape[0], -1)
        return jnp.cos(angles), jnp.sin(angles)


def param_specs(cfg: PixtralConfig) -> ParamTree:
    d, prefix = cfg.hidden_size, "multi_modal_projector"
    tree: dict[str, Any] = {
        "patch": patch_weight("vision_tower.patch_conv.weight", cfg),
        "pre_norm": rms_norm("vision_tower.ln_pre", d),
        "norm": rms_norm(f"{prefix}.norm", d),
        "merge": matrix(f"{prefix}.patch_merger.merging_layer.weight", (d, cfg.merged * d), (None, None)),
        "projector": projector_specs(cfg),
    }
    layers = {f"layers_{i}": _layer(cfg, f"vision_tower.transformer.layers.{i}") for i in range(cfg.depth)}
    return replicated({**tree, **layers})


def _layer(cfg: PixtralConfig, prefix: str) -> dict[str, Any]:
    return {
        "attention_norm": rms_norm(f"{prefix}.attention_norm", cfg.hidden_size),
        "attention": attention(cfg, f"{prefix}.attention"),
        "mlp_norm": rms_norm(f"{prefix}.ffn_norm", cfg.hidden_size),
        "mlp": gated_mlp(f"{prefix}.feed_forward", cfg.hidden_size, cfg.intermediate_size),
    }


MISTRAL3 = VisionFamily(PixtralConfig.from_json, param_specs, PixtralTower, make)
