"""Vision of LLaVA-1.5 (Liu et al. 2023): an inner layer of CLIP's tower, and an MLP.

The class token attends and is attended to, and is no row of the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.images.clip import make
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import layer_norm, matrix, plain
from jaxinfer.models.vision.layers import replicated, within
from jaxinfer.models.vision.tower import VisionFamily
from jaxinfer.models.vision.vit import (
    SQUARE_DEFAULTS,
    SQUARE_PREFIX,
    ProjectedConfig,
    SquareConfig,
    SquareTower,
    blocks,
    layers_up_to,
    projected,
    projector,
    projector_fields,
    projector_specs,
    run,
    square_side,
    square_specs,
    vision_reader,
    vit_fields,
)
from jaxinfer.types import ParamTree

_DEFAULTS = {**SQUARE_DEFAULTS, "patch_size": 32, "hidden_act": "quick_gelu"}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ClipConfig(SquareConfig, ProjectedConfig):
    """The tower and the projector of a checkpoint: see `VitConfig`."""

    @staticmethod
    def from_json(config_json: Mapping[str, Any]) -> ClipConfig:
        """Read the config.json of a LlavaForConditionalGeneration.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = vision_reader(config_json, ("clip_vision_model",), _DEFAULTS)
        ConfigReader(config_json).choice("vision_feature_select_strategy", "default", ("default",))
        fields = vit_fields(read, config_json)
        return ClipConfig(
            **fields | {"depth": layers_up_to(config_json, fields["depth"], -2)},
            norm_eps=read.number("layer_norm_eps", 1e-5),
            side=square_side(read),
            **projector_fields(config_json, bias=True),
        )


class ClipTower(SquareTower):
    """CLIP's tower with LLaVA's projector."""

    config: ClipConfig

    def setup(self) -> None:
        self.pre_norm = LayerNorm(self.config.norm_eps)
        self.layers = blocks(self.config)
        self.projector = projector(self.config)

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "rows width"]:
        x = projected(patches, self.weight("patch"))
        x = jnp.concatenate([self.weight("class")[None], x])
        table = self.weight("positions")
        x = self.pre_norm(x + jnp.pad(table, ((0, x.shape[0] - table.shape[0]), (0, 0))))
        x = run(self.layers, x, None, within(jnp.pad(layout["segments"], (1, 0))))
        return self.projector(x[1:])


def param_specs(cfg: ClipConfig) -> ParamTree:
    d, prefix = cfg.hidden_size, SQUARE_PREFIX
    tree: dict[str, Any] = {
        "class": plain(f"{prefix}.embeddings.class_embedding", (d,), (None,)),
        "positions": matrix(f"{prefix}.embeddings.position_embedding.weight", (cfg.side**2 + 1, d), (None, None)),
        "pre_norm": layer_norm(f"{prefix}.pre_layrnorm", d),
        "projector": projector_specs(cfg),
    }
    return replicated({**tree, **square_specs(cfg)})


LLAVA = VisionFamily(ClipConfig.from_json, param_specs, ClipTower, make)
