"""Vision towers of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): a ViT with 2-D RoPE.

A square of patches becomes one token. Most layers of Qwen2.5-VL attend within windows; its patches are in the order of
windows throughout the tower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.images.qwen import make
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, MLP
from jaxinfer.layers.norm import LayerNorm, RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.specs import gated_mlp, layer_norm, linear, matrix, plain, plain_mlp, rms_norm
from jaxinfer.models.vision.layers import PADDING, TowerBlock, replicated, within
from jaxinfer.models.vision.tower import Grid, PlaceAxes, Tower, VisionFamily, vision_config
from jaxinfer.quant import matmul_transposed, plus_bias
from jaxinfer.types import ImageInput, ParamSpec, ParamTree, PlacedImage, Source

_EPS = 1e-6
_MOST_LAYERS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenTowerConfig:
    """The tower of a checkpoint: see `jaxinfer.models.vision.tower.TowerConfig`.

    Attributes:
        d, hidden, out: widths of the tower, of its MLPs and of a token.
        patch, merge, temporal: pixels of a patch's side, patches of a token's side, and frames of a patch.
        rms_gated: norms are RMS norms, and MLPs are gated.
        window: tokens of a window's side; 0: all layers attend to the whole frame.
        full: layers that attend to the whole frame all the same.
        patch_bias: the projection of patches has a bias.
        side: rows and columns of the grid of learned position embeddings; 0: none.
        deep_layers: layers whose outputs become further numbers of a token, in the order of their mergers (deepstack).
    """

    depth: int
    d: int
    hidden: int
    heads: int
    activation: str
    colours: int
    patch: int
    merge: int
    temporal: int
    out: int
    theta: float
    rms_gated: bool = False
    window: int = 0
    full: tuple[int, ...] = ()
    patch_bias: bool = False
    side: int = 0
    deep_layers: tuple[int, ...] = ()
    bidirectional: bool = False

    @property
    def merged(self) -> int:
        return self.merge**2

    @property
    def values(self) -> int:
        return self.colours * self.temporal * self.patch**2

    @property
    def deep(self) -> int:
        return len(self.deep_layers)

    @property
    def width(self) -> int:
        return self.out * (1 + self.deep)


def tower_fields(read: ConfigReader, d: int, out: int) -> dict[str, Any]:
    """Read the fields of `QwenTowerConfig` that all of Qwen's towers have.

    Args:
        read: reader of the ``vision_config``.
        d, out: widths of the tower and of a token.

    Raises:
        ConfigError: a field is invalid or not supported.
    """
    heads, colours = read.positive("num_heads", 16), read.positive("in_channels", 3)
    read.require(d % (4 * heads) == 0, "num_heads", f"must cut the width ({d}) into heads of a multiple of 4")
    read.require(colours == 3, "in_channels", "must be 3")
    depth = read.positive("depth")
    read.require(depth <= _MOST_LAYERS, "depth", f"must be at most {_MOST_LAYERS}")
    rope = ConfigReader(read.get("rope_parameters", {}))
    rope.choice("rope_type", "axial", ("axial",))
    return {
        "depth": depth,
        "d": d,
        "heads": heads,
        "activation": read.choice("hidden_act", "silu", tuple(ACTIVATIONS)),
        "colours": colours,
        "patch": read.positive("patch_size"),
        "merge": read.positive("spatial_merge_size", 2),
        "temporal": read.positive("temporal_patch_size", 2),
        "out": out,
        "theta": rope.number("rope_theta", 10000.0),
    }


def layer_list(read: ConfigReader, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read a list of different layers of the tower."""
    found = read.get(name, default)
    depth = read.positive("depth")
    good = isinstance(found, list | tuple) and all(type(each) is int and 0 <= each < depth for each in found)
    read.require(good and len(set(found)) == len(found), name, f"must be different layers from 0 to {depth - 1}")
    return tuple(found)


def _qwen2_config(config_json: Mapping[str, Any]) -> QwenTowerConfig:
    """Read the tower of a Qwen2VLForConditionalGeneration; raises as `tower_fields`."""
    defaults = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "patch_size": 14}
    read = vision_config(config_json, defaults)
    d = read.positive("embed_dim")
    fields = tower_fields(read, d, read.positive("hidden_size"))
    return QwenTowerConfig(**fields, hidden=int(d * read.number("mlp_ratio", 4)))


def _qwen2_5_config(config_json: Mapping[str, Any]) -> QwenTowerConfig:
    """Read the tower of a Qwen2_5_VLForConditionalGeneration; raises as `tower_fields`."""
    read = vision_config(config_json, {"depth": 32, "hidden_size": 3584, "out_hidden_size": 3584, "patch_size": 14})
    fields = tower_fields(read, read.positive("hidden_size"), read.positive("out_hidden_size"))
    window = read.positive("window_size", 112) // fields["merge"] // fields["patch"]
    read.require(window > 0, "window_size", "is smaller than a token")
    return QwenTowerConfig(
        **fields,
        hidden=read.positive("intermediate_size", 3420),
        rms_gated=True,
        window=window,
        full=layer_list(read, "fullatt_block_indexes", (7, 15, 23, 31)),
    )


class Merger(Layer):
    """Turn the patches of a square into one token: a norm of each patch, or of them together, and an MLP."""

    config: QwenTowerConfig
    together: bool = False

    def setup(self) -> None:
        self.norm = RMSNorm(_EPS) if self.config.rms_gated else LayerNorm(_EPS)
        self.mlp = MLP("gelu")

    def __call__(self, x: Float[Array, "rows d"]) -> Float[Array, "tokens out"]:
        wide = (-1, self.config.merged * self.config.d)
        return self.mlp(self.norm(x.reshape(wide)) if self.together else self.norm(x).reshape(wide))


class QwenTower(Tower):
    config: QwenTowerConfig

    def setup(self) -> None:
        cfg = self.config
        sizes = (cfg.heads, cfg.d // cfg.heads, cfg.activation, _EPS)
        self.blocks = [TowerBlock(*sizes, rms=cfg.rms_gated, gated=cfg.rms_gated) for _ in range(cfg.depth)]
        self.merger = Merger(cfg)
        self.deep = [Merger(cfg, together=True) for _ in range(cfg.deep)]

    def layout(self, grid: Grid, rows: int) -> dict[str, np.ndarray]:
        cfg = self.config
        at, frames = patch_places(grid, cfg.merge)
        if not cfg.window:
            return {"at": _filled(at, rows, 0), "frames": _filled(frames, rows, PADDING)}
        order, windows = window_order((grid[0], grid[1] // cfg.merge, grid[2] // cfg.merge), cfg.window)
        order = np.concatenate([order, np.arange(len(order), rows // cfg.merged)]).astype(np.int32)
        patches = (order[:, None] * cfg.merged + np.arange(cfg.merged)).reshape(-1)
        return {
            "order": order,
            "back": np.argsort(order).astype(np.int32),
            "at": _filled(at, rows, 0)[patches],
            "frames": _filled(frames, rows, PADDING)[patches],
            "windows": _filled(np.repeat(windows, cfg.merged), rows, PADDING),
        }

    def __call__(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "out width"]:
        cfg = self.config
        x = self.embedded(patches, layout)
        if cfg.window:
            x = x.reshape(-1, cfg.merged, cfg.d)[layout["order"]].reshape(-1, cfg.d)
        rope, parts = self._angles(layout["at"]), {}
        frame, window = within(layout["frames"]), None
        if cfg.window:
            window = within(layout["windows"], cfg.window**2 * cfg.merged)
        for index, block in enumerate(self.blocks):
            x = block(x, rope, frame if window is None or index in cfg.full else window)
            if index in cfg.deep_layers:
                parts[index] = self.deep[cfg.deep_layers.index(index)](x)
        out = jnp.concatenate([self.merger(x), *parts.values()], axis=-1)
        return out[layout["back"]] if cfg.window else out

    def embedded(self, patches: Float[Array, "rows values"], layout: Mapping[str, Array]) -> Float[Array, "rows d"]:
        """Return the embeddings of patches."""
        weight = self.weight("patch")
        x = matmul_transposed(patches.astype(weight.dtype), weight)
        return plus_bias(x, self.weight("patch_bias")) if self.config.patch_bias else x

    def _angles(self, at: Int[Array, "rows 2"]) -> tuple[jax.Array, jax.Array]:
        """Return cosines and sines: half of a head's frequencies turn with the row, half with the column."""
        cfg = self.config
        cos, sin = RopeConfig(cfg.theta).angles(at, cfg.d // cfg.heads // 2)
        return cos.reshape(at.shape[0], -1), sin.reshape(at.shape[0], -1)


def patch_places(grid: Grid, merge: int) -> tuple[Int[np.ndarray, "rows 2"], Int[np.ndarray, " rows"]]:
    """Return row and column, and the frame, of each patch; the patches of a token are consecutive."""
    frames, height, width = grid
    places = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    of_frame = places.transpose(0, 1, 3, 2, 4).reshape(2, -1).T
    return np.tile(of_frame, (frames, 1)).astype(np.int32), np.repeat(np.arange(frames), height * width)


def window_order(grid: Grid, window: int) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " tokens"]]:
    """Return the tokens of a grid in the order of windows, and the window of each of them in that order."""
    frame, row, column = np.indices(grid).reshape(3, -1)
    windows = (grid[0], *(math.ceil(side / window) for side in grid[1:]))
    of_token = np.ravel_multi_index((frame, row // window, column // window), windows)
    order = np.argsort(of_token, stable=True)
    return order, of_token[order]


def _filled(values: np.ndarray, rows: int, padding: int) -> np.ndarray:
    """Return int32 values for ``rows`` rows."""
    widths = [(0, rows - len(values)), *[(0, 0)] * (values.ndim - 1)]
    return np.pad(values, widths, constant_values=padding).astype(np.int32)


def place_axes(cfg: QwenTowerConfig) -> PlaceAxes:
    """Return the function that places a prompt's tokens on three axes.

    Text continues after the longer side of an image or of a video, however many frames the video has. Where text
    stands between its frames, each frame is as an image of its own (Qwen3-VL).
    """

    def place(tokens: Sequence[int], images: Sequence[PlacedImage]) -> Int[np.ndarray, "3 length"]:
        axes, position, end = np.zeros((3, len(tokens)), np.int32), 0, 0
        for start, stop, frames, image in _runs(np.asarray(tokens), images):
            axes[:, end:start] = position + np.arange(start - end)
            position += start - end
            height, width = (side // cfg.merge for side in image.grid[1:])
            at = np.indices((frames, height, width)).reshape(3, -1)
            at[0] = (at[0].astype(np.float32) * np.float32(image.step)).astype(np.int32)
            axes[:, start:stop] = position + at
            position, end = position + max(height, width), stop
        axes[:, end:] = position + np.arange(len(tokens) - end)
        return axes

    return place


def _runs(
    tokens: Int[np.ndarray, " length"], images: Sequence[PlacedImage]
) -> Iterator[tuple[int, int, int, ImageInput]]:
    """Yield ranges of placeholders without text between them, with the number of their frames and their image."""
    for start, stop, image in images:
        places = start + np.flatnonzero(tokens[start:stop] == tokens[start])
        parts = 1 if len(places) == stop - start else image.grid[0]
        for part in places.reshape(parts, -1):
            yield int(part[0]), int(part[-1]) + 1, image.grid[0] // parts, image


def patch_specs(prefix: str, cfg: QwenTowerConfig) -> dict[str, Any]:
    """Return the parameters of the projection of patches, a convolution in checkpoints."""
    form = (cfg.d, cfg.colours, cfg.temporal, cfg.patch, cfg.patch)
    source = Source(f"{prefix}.weight", form, reshape=(cfg.d, cfg.values))
    tree: dict[str, Any] = {"patch": ParamSpec((cfg.d, cfg.values), (None, None), sources=(source,))}
    if cfg.patch_bias:
        tree["patch_bias"] = plain(f"{prefix}.bias", (cfg.d,), (None,), "zeros")
    return tree


def attention_specs(prefix: str, d: int, heads: int) -> dict[str, Any]:
    """Return the parameters of `Attention` from a fused projection: all queries, all keys, all values."""
    shape, parts = (heads, 3, d // heads), range(3)
    places = [(slice(None), index) for index in parts]
    cuts = [(slice(index * d, (index + 1) * d),) for index in parts]
    weights = tuple(
        Source(f"{prefix}.qkv.weight", (3 * d, d), True, (d, heads, d // heads), (slice(None), *where), cut)
        for where, cut in zip(places, cuts, strict=True)
    )
    biases = tuple(
        Source(f"{prefix}.qkv.bias", (3 * d,), False, (heads, d // heads), where, cut)
        for where, cut in zip(places, cuts, strict=True)
    )
    return {
        "qkv": ParamSpec((d, *shape), (None,) * 4, sources=weights, inputs=0),
        "qkv_bias": ParamSpec(shape, (None,) * 3, init="zeros", sources=biases),
        "out": linear(f"{prefix}.proj.weight", (d, d), (None, None)),
        "out_bias": plain(f"{prefix}.proj.bias", (d,), (None,), "zeros"),
    }


def merger_specs(norm: dict[str, Any], up: str, down: str, cfg: QwenTowerConfig) -> dict[str, Any]:
    """Return the parameters of a `Merger`, with two layers of these names."""
    wide = cfg.merged * cfg.d
    return {
        "norm": norm,
        "mlp": {
            "up": matrix(f"{up}.weight", (wide, wide), (None, None)),
            "up_bias": plain(f"{up}.bias", (wide,), (None,), "zeros"),
            "down": linear(f"{down}.weight", (wide, cfg.out), (None, None)),
            "down_bias": plain(f"{down}.bias", (cfg.out,), (None,), "zeros"),
        },
    }


def _param_specs(cfg: QwenTowerConfig) -> ParamTree:
    """Return every parameter of the tower with its shape and source checkpoint tensors."""
    norm = rms_norm if cfg.rms_gated else layer_norm
    tree = patch_specs("visual.patch_embed.proj", cfg)
    for index in range(cfg.depth):
        prefix = f"visual.blocks.{index}"
        gated = gated_mlp(f"{prefix}.mlp", cfg.d, cfg.hidden, bias=True)
        tree[f"blocks_{index}"] = {
            "attention_norm": norm(f"{prefix}.norm1", cfg.d),
            "attention": attention_specs(f"{prefix}.attn", cfg.d, cfg.heads),
            "mlp_norm": norm(f"{prefix}.norm2", cfg.d),
            "mlp": gated if cfg.rms_gated else plain_mlp(f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2", cfg.d, cfg.hidden),
        }
    merger = "visual.merger"
    tree["merger"] = merger_specs(norm(f"{merger}.ln_q", cfg.d), f"{merger}.mlp.0", f"{merger}.mlp.2", cfg)
    return replicated(tree)


QWEN2_VL = VisionFamily(_qwen2_config, _param_specs, QwenTower, make, place_axes)
QWEN2_5_VL = VisionFamily(_qwen2_5_config, _param_specs, QwenTower, make, place_axes)
