"""Image settings, and what an engine needs to know of a vision tower. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple


class ImageNeeds(NamedTuple):
    """The part of a vision tower that shapes an engine.

    Attributes:
        token: id of the placeholders in a prompt.
        merged: patch rows that become one row of the encoder's output.
        values: values of a patch row.
        least_rows, most_rows: patch rows of the smallest and of the largest image.
        axes: rotary positions have three axes (M-RoPE).
        both_ways: the tokens of an image attend to each other in both directions, so no chunk splits an image.
    """

    token: int
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
        limit_mm_per_prompt: most images of a prompt, as image=N or {"image": N} (default: no limit). 0: the vision
            tower is not loaded, and the model is served for text alone.
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
    def most_images(self) -> int | None:
        """The limit of ``limit_mm_per_prompt``; None: there is none.

        Raises:
            ValueError: the setting is malformed.
        """
        given: object = self.limit_mm_per_prompt
        texts = [given] if isinstance(given, Mapping | str) else list(self.limit_mm_per_prompt)
        limits = {name: count for text in texts for name, count in _limits(text).items()}
        if limits.keys() - {"image"}:
            raise ValueError("may only limit image")
        count = limits.get("image")
        if count is not None and (type(count) is not int or count < 0):
            raise ValueError("must be a number of images >= 0")
        return count


def _limits(text: Mapping[str, object] | str) -> Mapping[str, object]:
    """Parse ``image=N`` or a JSON object."""
    if isinstance(text, Mapping):
        return text
    if text.startswith("{"):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    name, _, count = text.partition("=")
    return {name: int(count) if count.isdecimal() else count}
