"""Vision towers of Qwen3-VL and Qwen3.5: as Qwen2-VL's, with learned positions that are interpolated to the grid of an
image; Qwen3-VL hands the outputs of some layers to the first layers of the decoder (deepstack, Meng et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.images.qwen import make
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import layer_norm, plain, plain_mlp
from jaxinfer.models.vision.layers import replicated
from jaxinfer.models.vision.qwen2 import (
    QwenTower,
    QwenTowerConfig,
    attention_specs,
    layer_list,
    merger_specs,
    patch_places,
    patch_specs,
    place_axes,
    tower_fields,
)
from jaxinfer.models.vision.tower import Grid, VisionFamily, vision_config
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}


def _qwen3_config(config_json: Mapping[str, Any]) -> QwenTowerConfig:
    """Read the tower of a Qwen3VLForConditionalGeneration; raises as `tower_fields`."""
    read = vision_config(config_json, _DEFAULTS)
    return _config(read, layer_list(read, "deepstack_visual_indexes", (8, 16, 24)))


def _qwen3_5_config(config_json: Mapping[str, Any]) -> QwenTowerConfig:
    """Read the tower of a Qwen3_5ForConditionalGeneration, without deepstack; raises as `tower_fields`."""
    return _config(vision_config(config_json, _DEFAULTS), ())


def _config(read: ConfigReader, deep: tuple[int, ...]) -> QwenTowerConfig:
    d, out, hidden = (read.positive(name) for name in ("hidden_size", "out_hidden_size", "intermediate_size"))
    fields = tower_fields(read, d, out)
    side = math.isqrt(read.positive("num_position_embeddings"))
    read.require(side**2 == read.positive("num_position_embeddings"), "num_position_embeddings", "must be a square")
    return QwenTowerConfig(**fields, hidden=hidden, patch_bias=True, side=side, deep_layers=deep)


class Qwen3Tower(QwenTower):
    def layout(self, grid: Grid, rows: int) -> dict[str, np.ndarray]:
        taps, weights = interpolation(grid, self.config.merge, self.config.side)
        padding = ((0, rows - len(taps)), (0, 0))
        return {**super().layout(grid, rows), "taps": np.pad(taps, padding), "weights": np.pad(weights, padding)}

    def embedded(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "rows d"]:
        x = super().embedded(patches, layout)
        near = self.weight("positions")[layout["taps"]].astype(jnp.float32)
        return x + jnp.sum(near * layout["weights"][:, :, None], axis=1).astype(x.dtype)


def interpolation(grid: Grid, merge: int, side: int) -> tuple[Int[np.ndarray, "rows 4"], Float[np.ndarray, "rows 4"]]:
    """Return the learned positions around each patch, and their weights.

    The interpolation is bilinear, with the corners of both grids aligned, in float32 as in transformers.
    """
    at, _ = patch_places(grid, merge)
    places = at.astype(np.float32) * np.float32(side - 1) / np.maximum(np.array(grid[1:], np.float32) - 1, 1)
    first = np.floor(places)
    taps = np.clip(first[..., None].astype(np.int32) + np.arange(2, dtype=np.int32), 0, side - 1)
    weights = np.maximum(1 - np.abs((places - first)[..., None] - np.arange(2, dtype=np.float32)), 0)
    both = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    return both.reshape(-1, 4), (weights[:, 0, :, None] * weights[:, 1, None, :]).reshape(-1, 4)


def _param_specs(cfg: QwenTowerConfig) -> ParamTree:
    """Return every parameter of the tower with its shape and source checkpoint tensors."""
    tree = patch_specs("model.visual.patch_embed.proj", cfg)
    tree["positions"] = plain("model.visual.pos_embed.weight", (cfg.side**2, cfg.d), (None, None))
    for index in range(cfg.depth):
        prefix = f"model.visual.blocks.{index}"
        tree[f"blocks_{index}"] = {
            "attention_norm": layer_norm(f"{prefix}.norm1", cfg.d),
            "attention": attention_specs(f"{prefix}.attn", cfg.d, cfg.heads),
            "mlp_norm": layer_norm(f"{prefix}.norm2", cfg.d),
            "mlp": plain_mlp(f"{prefix}.mlp.linear_fc1", f"{prefix}.mlp.linear_fc2", cfg.d, cfg.hidden),
        }
    tree["merger"] = _merger(cfg, "model.visual.merger", cfg.d)
    for index in range(cfg.deep):
        tree[f"deep_{index}"] = _merger(cfg, f"model.visual.deepstack_merger_list.{index}", cfg.merged * cfg.d)
    return replicated(tree)


def _merger(cfg: QwenTowerConfig, prefix: str, size: int) -> dict[str, Any]:
    return merger_specs(layer_norm(f"{prefix}.norm", size), f"{prefix}.linear_fc1", f"{prefix}.linear_fc2", cfg)


QWEN3_VL = VisionFamily(_qwen3_config, _param_specs, Qwen3Tower, make, place_axes)
QWEN3_5 = VisionFamily(_qwen3_5_config, _param_specs, Qwen3Tower, make, place_axes)
