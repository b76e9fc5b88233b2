"""Vision transformers of learned positions, for squares of one size: CLIP (Radford et al. 2021) and SigLIP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.brief import ShortRepr
from jaxinfer.formats.multimodal import text_model
from jaxinfer.layers.mlp import ACTIVATIONS, MLP
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import attention, layer_norm, plain_mlp
from jaxinfer.models.vision.layers import PADDING, TowerBlock
from jaxinfer.models.vision.tower import Grid, Tower, vision_config
from jaxinfer.quant import matmul_transposed
from jaxinfer.types import ParamSpec, Source


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class VitConfig(ShortRepr):
    """Fields common to the towers of this kind: see `jaxinfer.models.vision.tower.TowerConfig`.

    Attributes:
        width: hidden size of the text model.
        depth: layers that are run.
        patch: pixels of a patch's side.
    """

    width: int
    hidden_size: int
    intermediate_size: int
    depth: int
    heads: int
    patch: int
    norm_eps: float
    activation: str
    merged: int = 1
    deep: int = 0
    bidirectional: bool = False

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def values(self) -> int:
        return 3 * self.patch**2


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SquareConfig(VitConfig):
    """The config of a tower for squares. ``side``: patches of a square's side."""

    side: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ProjectedConfig(VitConfig):
    """The config of a tower whose projector is an MLP."""

    projector_activation: str
    projector_bias: bool


SQUARE_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
"""Fields that a ``vision_config`` of CLIP or SigLIP may lack."""

SQUARE_PREFIX = "vision_tower.vision_model"
"""Prefix of the tensors of CLIP and SigLIP."""


def vision_reader(config_json: Mapping[str, Any], kinds: tuple[str, ...], defaults: Mapping[str, Any]) -> ConfigReader:
    """Return a reader of ``vision_config``.

    Raises:
        ConfigError: it is no object, or its model type is none of ``kinds``.
    """
    read = vision_config(config_json, defaults)
    read.choice("model_type", kinds[0], kinds)
    return read


def vit_fields(read: ConfigReader, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of `VitConfig` that all families have, all layers included.

    Raises:
        ConfigError: a field is invalid or not supported.
    """
    d, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    read.require(d % heads == 0, "num_attention_heads", f"must divide hidden_size ({d})")
    read.require(read.positive("num_channels", 3) == 3, "num_channels", "must be 3")
    return {
        "width": ConfigReader(text_model(config_json), {"hidden_size": 2304}).positive("hidden_size"),
        "hidden_size": d,
        "intermediate_size": read.positive("intermediate_size"),
        "depth": read.positive("num_hidden_layers"),
        "heads": heads,
        "patch": read.positive("patch_size"),
        "activation": read.choice("hidden_act", "gelu", tuple(ACTIVATIONS)),
    }


def square_side(read: ConfigReader) -> int:
    """Read the number of patches of a square's side."""
    size, patch = read.positive("image_size"), read.positive("patch_size")
    read.require(size % patch == 0, "image_size", f"must be a multiple of patch_size ({patch})")
    return size // patch


def layers_up_to(config_json: Mapping[str, Any], depth: int, default: int) -> int:
    """Return the number of layers that ``vision_feature_layer`` selects the output of.

    Raises:
        ConfigError: it is no layer, or a list of layers.
    """
    read = ConfigReader(config_json)
    layer = read.get("vision_feature_layer", default)
    known = type(layer) is int and -depth - 1 <= layer <= depth
    read.require(known, "vision_feature_layer", f"must be an integer from {-depth - 1} to {depth}")
    return int(layer) if layer >= 0 else depth + 1 + int(layer)


def projector_fields(config_json: Mapping[str, Any], bias: bool) -> dict[str, Any]:
    """Read the fields of `ProjectedConfig`; ``bias``: the default of ``projector_bias``."""
    read = ConfigReader(config_json)
    return {
        "projector_activation": read.choice("projector_hidden_act", "gelu", tuple(ACTIVATIONS)),
        "projector_bias": read.flag("multimodal_projector_bias", bias),
    }


def projector(cfg: ProjectedConfig) -> MLP:
    return MLP(cfg.projector_activation, cfg.projector_bias)


def projector_specs(cfg: ProjectedConfig) -> dict[str, Any]:
    """Return the parameters of a `projector`."""
    names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
    return plain_mlp(*names, cfg.hidden_size, cfg.width, cfg.projector_bias, cfg.width)


def patch_weight(name: str, cfg: VitConfig) -> ParamSpec:
    """Return the spec of the projection of patches [d, values], a convolution in the checkpoint."""
    source = Source(name, (cfg.hidden_size, 3, cfg.patch, cfg.patch), reshape=(cfg.hidden_size, cfg.values))
    return ParamSpec((cfg.hidden_size, cfg.values), (None, None), sources=(source,))


def square_specs(cfg: SquareConfig, prefix: str = SQUARE_PREFIX) -> dict[str, Any]:
    """Return the parameters that CLIP and SigLIP have in common: the projection of patches, and the layers."""
    layers = {f"layers_{i}": _layer_specs(cfg, f"{prefix}.encoder.layers.{i}") for i in range(cfg.depth)}
    return {"patch": patch_weight(f"{prefix}.embeddings.patch_embedding.weight", cfg), **layers}


def _layer_specs(cfg: VitConfig, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    return {
        "attention_norm": layer_norm(f"{prefix}.layer_norm1", d),
        "attention": attention(cfg, f"{prefix}.self_attn", qkv_bias=True, out_bias=True, out="out_proj"),
        "mlp_norm": layer_norm(f"{prefix}.layer_norm2", d),
        "mlp": plain_mlp(f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2", d, cfg.intermediate_size),
    }


def blocks(cfg: VitConfig, rms: bool = False) -> list[TowerBlock]:
    """Make the layers of a tower: of CLIP and SigLIP, or with RMS norms and gated MLPs, without biases."""
    return [
        TowerBlock(cfg.heads, cfg.head_dim, cfg.activation, cfg.norm_eps, rms=rms, gated=rms, bias=not rms)
        for _ in range(cfg.depth)
    ]


def projected(patches: Float[Array, "rows values"], weight: Float[Array, "d values"]) -> Float[Array, "rows d"]:
    """Embed patches, in the dtype of the weight."""
    return matmul_transposed(patches.astype(weight.dtype), weight)


def segments(count: int, rows: int) -> Int[np.ndarray, " rows"]:
    """Return the segments of an image of ``count`` patches in a program for ``rows``."""
    return np.where(np.arange(rows) < count, 0, PADDING).astype(np.int32)


def patch_order(height: int, width: int, merge: int) -> Int[np.ndarray, "rows 2"]:
    """Return row and column of each patch, in an order in which the patches of a token are consecutive."""
    at = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    return np.moveaxis(at, 3, 2).reshape(2, -1).T.astype(np.int32)


class SquareTower(Tower):
    """A tower whose images have one number of patches."""

    config: SquareConfig

    def layout(self, grid: Grid, rows: int) -> dict[str, np.ndarray]:
        return {"segments": segments(grid[1] * grid[2], rows)}


def run(layers: Sequence[TowerBlock], x: Float[Array, "rows d"], rope: Any, attend: Any) -> Float[Array, "rows d"]:
    """Run the layers of a tower."""
    for layer in layers:
        x = layer(x, rope, attend)
    return x
