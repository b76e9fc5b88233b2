"""Processor of images: from pixels to the patches that a vision tower reads, and to the tokens that stand for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.types import ImageInput

if TYPE_CHECKING:  # an engine of a text model does not need Pillow
    from PIL.Image import Image

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model folder that describe its image processor."""
DEFAULT_FPS = 2.0
"""Frames per second of a video without a rate, as in transformers."""


class ImageError(ValueError):
    """An image cannot be decoded or is not supported; the message is one sentence with the reason."""


def options_for(video: bool, *given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for an image or a video, of which later ones override: ``fps`` is of videos alone."""
    options = {"fps": DEFAULT_FPS} | {name: value for each in given for name, value in each.items()}
    return options if video else {name: value for name, value in options.items() if name != "fps"}


@runtime_checkable
class Processor(Protocol):
    """Image processor of a checkpoint: a frozen dataclass of its preprocessor_config.json.

    Attributes:
        image_token: id of the placeholder in a prompt, as the chat template writes it and as `expand` repeats it.
        table: [channels, 256] float32, the normalised value of each pixel value, with the rounding of transformers.
        channels: [values] int, channel of each value of a patch row.
        identity: names the processor and all of its options; part of every digest.
        most_rows: the largest number of patch rows that an image, or a tile of one, can have.
    """

    @property
    def image_token(self) -> int: ...

    @property
    def table(self) -> np.ndarray: ...

    @property
    def channels(self) -> np.ndarray: ...

    @property
    def identity(self) -> str: ...

    @property
    def most_rows(self) -> int: ...

    def prepare(self, picture: Image | np.ndarray, /, **options: Any) -> ImageInput:
        """Resize an RGB picture, or an array [height, width, 3] uint8, and cut it into patches.

        Args:
            options: fields of the processor that the request overrides (``min_pixels``, ``max_pixels``).

        Raises:
            ImageError: the picture's shape is not supported, or an option is unknown or out of range.
        """

    def expand(self, image: ImageInput) -> list[list[int]]:
        """Return the token ids that replace each placeholder of an image: one list, or several of a video."""


@runtime_checkable
class VideoProcessor(Processor, Protocol):
    """Processor of a model that reads videos, too.

    Attributes:
        video_token: id of the placeholder of a video.
    """

    @property
    def video_token(self) -> int: ...

    def prepare_video(
        self, frames: Iterable[Image | np.ndarray], count: int, /, *, fps: float, **options: Any
    ) -> ImageInput:
        """Resize frames, of which one is read at a time, and cut them into patches.

        Args:
            frames: ``count`` of them.
            fps: frames per second.
            options: see `Processor.prepare`.

        Raises:
            ImageError: as `timestamps`; frames have several sizes, the video has too many tokens, or see
                `Processor.prepare`.
        """

    def timestamps(self, count: int, fps: float) -> tuple[float, ...]:
        """Return the seconds of each step in time.

        Raises:
            ImageError: there are no frames or too many, or the rate is not positive.
        """

    def with_timestamps(self, text: str, videos: Sequence[tuple[int, float]]) -> str:
        """Return a prompt's text with the timestamps of videos before their placeholders, where the model reads them.

        Args:
            videos: number of frames, and frames per second, of each.
        """


class Identified(Protocol):
    """Protocol of an object whose name says all of its options."""

    @property
    def identity(self) -> str: ...


def smallest_image(processor: Processor) -> ImageInput:
    """Return an image, or a tile of one, with as few patches as the processor makes."""
    return processor.prepare(np.zeros((1, 1, 3), np.uint8)).frames[0]


def normalised(processor: Processor, patches: np.ndarray) -> np.ndarray:
    """Return the values that a tower reads, [rows, values] float32, of resized pixels."""
    return processor.table[processor.channels, patches]


def digest_of(processor: Identified, patches: np.ndarray, grid: tuple[int, ...]) -> str:
    """Return the content hash of an image, see `ImageInput`."""
    found = hashlib.blake2b(digest_size=16)
    for part in (processor.identity, str(grid), str(patches.dtype), str(patches.shape)):
        found.update(f"{len(part)}:{part}".encode())
    found.update(np.ascontiguousarray(patches).data)
    return found.hexdigest()
