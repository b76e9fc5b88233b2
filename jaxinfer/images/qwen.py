"""Image processor of Qwen's vision models: any aspect ratio, within bounds on the number of pixels.

A video is a list of frames at a rate. Frames are resized like images (Pillow, bicubic); transformers has only a
torchvision implementation for them, which rounds differently.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from PIL import Image

from jaxinfer.images.patches import token_id, tower_sizes
from jaxinfer.images.pixels import COLOURS, image_settings, require, require_kind, rgb, value_table, whole
from jaxinfer.images.processor import ImageError, digest_of
from jaxinfer.types import ImageInput

MOST_ASPECT = 200
"""The longer side of a picture by the shorter one, at most."""
MOST_FRAMES = 768
"""Frames of a video, at most: the bound of transformers' samplers."""
_VIDEO_BLOCK = "<|vision_start|><|video_pad|><|vision_end|>"

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_KINDS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
_VIDEO = "video_preprocessor_config.json"


@dataclasses.dataclass(frozen=True)
class QwenProcessor:
    """See `jaxinfer.images.processor.Processor`.

    Attributes:
        patch, merge, temporal: pixels of a patch's side, patches of a token's side, and frames of a patch.
        pixels: fewest and most pixels of a resized image.
        video_pixels: the same for a frame of a video, or for all frames together if ``by_frame``.
        frame_pixels: most pixels of a resized frame of a video, beside ``video_pixels``; None: any number.
        most_tokens: most tokens of a video; None: any number.
        resample: Pillow's filter.
        values: normalised value of each pixel value in each channel.
        per_second: rotary positions on the time axis in a second of a video (Qwen2.5-VL); 0: a frame pair is one.
        by_frame: each pair of frames of a video has a placeholder, and a prompt tells the time before it (Qwen3-VL).
    """

    image_token: int
    video_token: int
    patch: int
    merge: int
    temporal: int
    pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    resample: int
    values: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)
    per_second: float = 0
    by_frame: bool = False
    frame_pixels: int | None = None
    most_tokens: int | None = None

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.asarray(self.values, np.float32)

    @property
    def channels(self) -> np.ndarray:
        return np.repeat(np.arange(COLOURS), self.temporal * self.patch**2)

    @functools.cached_property
    def identity(self) -> str:
        return f"{self!r} {self.values!r}"

    @property
    def factor(self) -> int:
        """Pixels of the side of a token."""
        return self.patch * self.merge

    @property
    def most_rows(self) -> int:
        least, most = (bound / self.factor**2 for bound in self.pixels)
        # A picture of the largest aspect ratio has at least a token on its short side, and sides are rounded up where
        # a picture is enlarged.
        thin, enlarged = math.sqrt(MOST_ASPECT * most), least + math.sqrt(MOST_ASPECT * least) + math.sqrt(least) + 1
        return int(max(most, thin, enlarged)) * self.merge**2

    def within(self, rows: int, tokens: int | None = None) -> Self:
        """See `jaxinfer.images.expansion.within`."""
        most = min(self.pixels[1], rows * self.patch**2)
        pixels = min(self.pixels[0], most), most
        return dataclasses.replace(self, pixels=pixels, frame_pixels=most, most_tokens=tokens)

    def prepare(self, picture: Image.Image | np.ndarray, /, **options: Any) -> ImageInput:
        """Resize a picture and cut it into patches.

        Args:
            options: ``min_pixels`` and ``max_pixels`` of the resized picture; at most those of the processor.

        Raises:
            ImageError: the picture's shape is not supported, or an option is unknown or out of range.
        """
        picture = rgb(picture)
        height, width = fitted(picture.height, picture.width, self.factor, self._bounds(self.pixels, options))
        return self._cut([self._resized(picture, height, width)])

    def prepare_video(
        self, frames: Iterable[Image.Image | np.ndarray], count: int, /, *, fps: float, **options: Any
    ) -> ImageInput:
        """See `jaxinfer.images.processor.VideoProcessor`. Pairs of frames become patches; the last frame is repeated to
        fill a pair."""
        pairs, pictures = len(self.timestamps(count, fps)), map(rgb, frames)
        first = next(pictures)
        bounds = self._bounds(self.video_pixels, options)
        height, width = self._video_size(count, first.height, first.width, bounds)
        if self.most_tokens is not None and (found := pairs * height * width // self.factor**2) > self.most_tokens:
            raise ImageError(f"a video of {found} tokens: it may have {self.most_tokens}")
        resized = [self._resized(picture, height, width) for picture in _alike(first, pictures)]
        resized += [resized[-1]] * (-count % self.temporal)
        step = self.per_second * self.temporal / fps if self.per_second else 1.0
        return dataclasses.replace(self._cut(resized, step), video=True)

    def timestamps(self, count: int, fps: float) -> tuple[float, ...]:
        """See `jaxinfer.images.processor.VideoProcessor`: the mean of each pair of frames."""
        if not 0 < count <= MOST_FRAMES:
            raise ImageError(f"a video of {count} frames: it must have 1 to {MOST_FRAMES}")
        if not (isinstance(fps, int | float) and math.isfinite(fps) and fps > 0):
            raise ImageError(f"fps = {fps!r} must be a positive number of frames per second")
        at = [min(index, count - 1) / fps for index in range(count + -count % self.temporal)]
        return tuple((at[index] + at[index + self.temporal - 1]) / 2 for index in range(0, len(at), self.temporal))

    def with_timestamps(self, text: str, videos: Sequence[tuple[int, float]]) -> str:
        """See `jaxinfer.images.processor.VideoProcessor`."""
        parts = text.split(_VIDEO_BLOCK)
        if not self.by_frame or len(parts) != len(videos) + 1:
            return text
        blocks = ("".join(f"<{at:.1f} seconds>{_VIDEO_BLOCK}" for at in self.timestamps(*each)) for each in videos)
        return "".join(part + block for part, block in zip(parts, (*blocks, ""), strict=True))

    def expand(self, image: ImageInput) -> list[list[int]]:
        steps, token = image.grid[0], self.video_token if image.video else self.image_token
        pieces = steps if self.by_frame else 1
        return [[token] * (math.prod(image.grid) // self.merge**2 // pieces)] * pieces

    def _video_size(self, frames: int, height: int, width: int, bounds: tuple[int, int]) -> tuple[int, int]:
        if not self.by_frame:
            return fitted(height, width, self.factor, self._of_frames(bounds, 1))
        if min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        padded = max(round(frames / self.temporal) * self.temporal, self.temporal)
        bounds = self._of_frames(bounds, padded)
        return fitted(height, width, self.factor, bounds, (padded, max(frames, self.temporal)))

    def _of_frames(self, bounds: tuple[int, int], frames: int) -> tuple[int, int]:
        """Return bounds on the pixels of all frames that keep ``frame_pixels``, too."""
        most = bounds[1] if self.frame_pixels is None else min(bounds[1], self.frame_pixels * frames)
        return min(bounds[0], most), most

    def _bounds(self, own: tuple[int, int], options: Mapping[str, Any]) -> tuple[int, int]:
        names = ("min_pixels", "max_pixels")
        for name, value in options.items():
            if name not in names:
                raise ImageError(f"option {name} is unknown (known: {', '.join(names)})")
            if type(value) is not int or not 0 < value <= own[1]:
                raise ImageError(f"{name} = {value!r} must be an integer from 1 to {own[1]}")
        least, most = (options.get(name, bound) for name, bound in zip(names, own, strict=True))
        return min(least, most), most

    def _resized(self, picture: Image.Image, height: int, width: int) -> np.ndarray:
        return np.asarray(picture.resize((width, height), Image.Resampling(self.resample)))

    def _cut(self, frames: list[np.ndarray], step: float = 1.0) -> ImageInput:
        """Cut resized frames [height, width, 3] into patches, by time, token, patch of a token, channel and pixel."""
        stack = np.stack(frames * (self.temporal if len(frames) == 1 else 1))
        height, width = stack.shape[1:3]
        grid = (len(stack) // self.temporal, height // self.patch, width // self.patch)
        rows, columns = (side // self.factor for side in (height, width))
        parts = (grid[0], self.temporal, rows, self.merge, self.patch, columns, self.merge, self.patch, COLOURS)
        cut = stack.reshape(parts).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        patches = np.ascontiguousarray(cut.reshape(math.prod(grid), -1))
        digest = digest_of(self, patches, grid)
        if step != 1.0:
            digest = hashlib.blake2b(f"{digest} {step.hex()}".encode(), digest_size=16).hexdigest()
        return ImageInput(patches, grid, digest, step)


def fitted(
    height: int, width: int, factor: int, bounds: tuple[int, int], frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return the size to which a picture is resized: multiples of ``factor``, within bounds on the number of pixels.

    Args:
        frames: frames that the bounds are for: as they are counted in the result, and in the picture.

    Raises:
        ImageError: the picture is too narrow.
    """
    if max(height, width) / min(height, width) > MOST_ASPECT:
        raise ImageError(f"a picture of {width} x {height} pixels is too narrow: sides are at most 1 to {MOST_ASPECT}")
    least, most = bounds
    tall, wide = (round(side / factor) * factor for side in (height, width))
    if frames[0] * tall * wide > most:
        shrink = math.sqrt(frames[1] * height * width / most)
        tall, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif frames[0] * tall * wide < least:
        grow = math.sqrt(least / (frames[1] * height * width))
        tall, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return tall, wide


# Defaults by architecture: pixels of a patch's side, the placeholder (that of videos follows it), positions in a second
# of a video, `by_frame`.
_FAMILIES: Mapping[str, tuple[int, int, int, bool]] = {
    "Qwen2VLForConditionalGeneration": (14, 151655, 0, False),
    "Qwen2_5_VLForConditionalGeneration": (14, 151655, 4, False),
    "Qwen3VLForConditionalGeneration": (16, 151655, 0, True),
    "Qwen3VLMoeForConditionalGeneration": (16, 151655, 0, True),
    "Qwen3_5ForConditionalGeneration": (16, 248056, 0, True),
    "Qwen3_5MoeForConditionalGeneration": (16, 248056, 0, True),
}


def make(config_json: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> QwenProcessor:
    """Make the processor of one of Qwen's models from config.json and the folder's other JSON files; fields that these
    lack are those of transformers.

    Raises:
        ValueError: a setting is invalid, not supported, or differs from the tower's; the message names it.
    """
    architecture = next(name for name in config_json["architectures"] if name in _FAMILIES)
    side, token, per_second, by_frame = _FAMILIES[architecture]
    names = {"patch_size": side, "spatial_merge_size": 2, "temporal_patch_size": 2}
    patch, merge, temporal = tower_sizes(config_json, names)
    if per_second:
        (per_second,) = tower_sizes(config_json, {"tokens_per_second": per_second})
    settings = image_settings(files)
    require_kind(settings, _KINDS)
    for name, own in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", temporal)):
        require(whole(settings, name, own) == own, settings, name, f"is not that of the tower, {own}")
    require(settings.get("do_resize") is not False, settings, "do_resize", "is not supported")
    resample = settings.get("resample")
    known = resample is None or (type(resample) is int and resample in set(Image.Resampling))
    require(known, settings, "resample", "is unknown")
    video_edges = 128 * 32 * 32 if by_frame else 128 * 28 * 28, 32 * 32 * 768 if by_frame else 28 * 28 * 768
    return QwenProcessor(
        image_token=token_id(config_json, "image_token", token),
        video_token=token_id(config_json, "video_token", token + 1),
        patch=patch,
        merge=merge,
        temporal=temporal,
        pixels=_edges(settings, (56 * 56, 28 * 28 * 1280)),
        video_pixels=_edges(files.get(_VIDEO, {}), video_edges),
        resample=int(Image.Resampling.BICUBIC if resample is None else resample),
        values=value_table(settings, _CLIP_MEAN, _CLIP_STD),
        per_second=per_second,
        by_frame=by_frame,
    )


def _edges(settings: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Read the fewest and most pixels: ``min_pixels`` and ``max_pixels`` override ``size``."""
    size = settings.get("size")
    size = size if isinstance(size, Mapping) else {}
    names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    least, most = (
        whole(settings, old, whole(size, name, whole(size, old, value)))
        for (old, name), value in zip(names, default, strict=True)
    )
    require(least <= most, {"size": (least, most)}, "size", "must be the fewest and the most pixels")
    return least, most


def _alike(first: Image.Image, others: Iterable[Image.Image]) -> Iterator[Image.Image]:
    """Yield frames, of which one is read at a time; ImageError if one has another size."""
    yield first
    for rank, picture in enumerate(others, 1):
        if picture.size != first.size:
            sizes = f"{picture.width} x {picture.height} pixels, and the first {first.width} x {first.height}"
            raise ImageError(f"frame {rank} has {sizes}: frames of a video have one size")
        yield picture
