"""Vision of Idefics3 (Laurençon et al. 2024) and SmolVLM: SigLIP's tower, and a matrix for squares of patches.

A picture's tiles and the whole picture are encoded each by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxinfer.images.idefics3 import make
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import matrix
from jaxinfer.models.vision.layers import replicated
from jaxinfer.models.vision.siglip import SiglipEncoder, encoder_specs
from jaxinfer.models.vision.tower import VisionFamily
from jaxinfer.models.vision.vit import SquareConfig, vision_reader, vit_fields
from jaxinfer.quant import matmul_transposed
from jaxinfer.types import ParamTree

_KINDS = ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm", "siglip_vision_model")
"""Model types of the tower in published files: transformers reads none."""
_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
}
_SIDES = frozenset(range(1, 38)) - {19, 25, 29, 31}
"""Patches of a side at which transformers, which computes positions from fractions in float32, gives each its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Idefics3Config(SquareConfig):
    """The tower and the connector of a checkpoint: see `VitConfig`."""

    @staticmethod
    def from_json(config_json: Mapping[str, Any]) -> Idefics3Config:
        """Read the config.json of an Idefics3ForConditionalGeneration or SmolVLMForConditionalGeneration.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read, outer = vision_reader(config_json, _KINDS, _DEFAULTS), ConfigReader(config_json)
        side, factor = read.positive("image_size") // read.positive("patch_size"), outer.positive("scale_factor", 2)
        read.require(side in _SIDES, "image_size", f"must be 1 to 37 patches, and not 19, 25, 29 or 31, but is {side}")
        outer.require(side % factor == 0, "scale_factor", f"must divide {side}, the patches of a tile's side")
        return Idefics3Config(
            **vit_fields(read, config_json),
            norm_eps=read.number("layer_norm_eps", 1e-6),
            side=side,
            merged=factor**2,
        )


class Idefics3Tower(SiglipEncoder):
    """SigLIP's tower with the connector of Idefics3."""

    config: Idefics3Config

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        x = self.hidden(patches, layout)
        return matmul_transposed(x.reshape(-1, self.config.merged * x.shape[-1]), self.weight("project"))


def param_specs(cfg: Idefics3Config) -> ParamTree:
    shape = (cfg.width, cfg.merged * cfg.hidden_size)
    project = matrix("model.connector.modality_projection.proj.weight", shape, (None, None))
    return replicated({**encoder_specs(cfg, "model.vision_model"), "project": project})


IDEFICS3 = VisionFamily(Idefics3Config.from_json, param_specs, Idefics3Tower, make)
