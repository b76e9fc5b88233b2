"""Image settings, and what an engine needs to know of a vision tower. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

KINDS = ("image", "video")
"""Names of `ImageConfig.limit_mm_per_prompt`: of an image, and of a video."""


class ImageNeeds(NamedTuple):
    """The part of a vision tower that shapes an engine.

    Attributes:
        tokens: ids of the placeholders in a prompt: of images, and of videos if the model reads them.
        merged: patch rows that become one row of the encoder's output.
        values: values of a patch row.
        least_rows, most_rows: patch rows of the smallest and of the largest image.
        axes: rotary positions have three axes (M-RoPE).
        both_ways: the tokens of an image attend to each other in both directions, so no chunk splits an image.
    """

    tokens: tuple[int, ...]
    merged: int
    values: int
    least_rows: int
    most_rows: int
    axes: bool = False
    both_ways: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Images of models with a vision tower.

    Attributes:
        limit_mm_per_prompt: most images and videos of a prompt, as image=N, video=N or {"image": N} (default: no
            limit). image=0: the vision tower is not loaded, and the model is served for text alone.
        encoder_sizes: patch rows of the encoder programs, ascending multiples of the rows that are merged into one; an
            image runs alone in the smallest that holds it, and one beyond the largest is rejected (default: powers
            of two from 256 to 16384, as far as the model's images and max_model_len reach).
        encoder_cache_size: image tokens of which the encoder's output is kept on the device, by content, for prompts
            that are computed in several chunks or repeat an image (default: at least 4096, and enough for a full chunk
            and two of the largest images).
    """

    limit_mm_per_prompt: tuple[str, ...] = ()
    encoder_sizes: tuple[int, ...] | None = None
    encoder_cache_size: int | None = None

    @property
    def mm_limits(self) -> Mapping[str, int]:
        """Limits of ``limit_mm_per_prompt`` that are given, of image and video.

        Raises:
            ValueError: the setting is malformed.
        """
        given: object = self.limit_mm_per_prompt
        texts = [given] if isinstance(given, Mapping | str) else list(self.limit_mm_per_prompt)
        limits = {name: count for text in texts for name, count in _limits(text).items()}
        if limits.keys() - set(KINDS):
            raise ValueError(f"may only limit {' and '.join(KINDS)}")
        found = {name: count for name, count in limits.items() if type(count) is int and count >= 0}
        if len(found) < len(limits):
            raise ValueError("must be numbers >= 0")
        return found


def _limits(text: Mapping[str, object] | str) -> Mapping[str, object]:
    """Parse ``image=N`` or a JSON object."""
    if isinstance(text, Mapping):
        return text
    if text.startswith("{"):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    name, _, count = text.partition("=")
    return {name: int(count) if count.isdecimal() else count}
