"""Images of requests: checks, fetching, preparation in helper processes, and their places in prompts. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.config.images import ImageConfig
from jaxinfer.images.expansion import for_vocabulary
from jaxinfer.images.placed import place_images
from jaxinfer.images.processor import ImageError
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.images.source import is_data_url
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.requests import ModelCard, ServeLimits
from jaxinfer.serve.frontend.chat.messages import by_place
from jaxinfer.serve.runtime.fetch import MediaFetcher
from jaxinfer.serve.workers.tasks import ImagePreparer
from jaxinfer.text.contents import GivenImage
from jaxinfer.types import ImageInput, PlacedImage

OPTIONS = "mm_processor_kwargs"
"""Field of requests with the options of the processor for all images."""

_NUMBERED = re.compile(r"images\[([0-9]{1,9})\]")
_OPTIONS = ("min_pixels", "max_pixels")
_NO_URLS = "is a URL, and this server fetches none (allowed_media_domains): send the image as a data URL"


class Images:
    """The images of a model's requests.

    Args:
        source: source of the model's processor.
        id_of: looks up a token of the vocabulary.
        most: images of one prompt; None: any number.
        media: fetches URLs (None: they are rejected).
    """

    def __init__(
        self,
        source: ProcessorSource,
        limits: ServeLimits,
        id_of: Callable[[str], int | None],
        most: int | None = None,
        media: MediaFetcher | None = None,
    ) -> None:
        self._processor = for_vocabulary(source.processor(), id_of)
        self._limits, self._most, self._media = limits, most, media
        self._preparer = ImagePreparer(source, limits)

    async def warm(self) -> None:
        """Start the helper processes."""
        await self._preparer.warm()

    def close(self) -> None:
        """Kill the helper processes."""
        self._preparer.close()
        if self._media is not None:
            self._media.close()

    def check(self, images: Sequence[GivenImage], options: Mapping[str, Any]) -> None:
        """Check the images of a request before any work.

        Args:
            options: options of the processor for all images.

        Raises:
            ServeError: INVALID: there are too many, one is a URL that is not fetched, or an option is not supported.
        """
        with by_place():
            _check_options(OPTIONS, options)
            for rank, image in enumerate(images):
                if self._most is not None and rank >= self._most:
                    most = f"is image {rank + 1} of the prompt, which may have {self._most} (limit_mm_per_prompt)"
                    raise RequestError(image.path, most)
                _check_options(image.path, image.options)
                self._check_source(image)

    def _check_source(self, image: GivenImage) -> None:
        source = image.source
        if isinstance(source, str) and not is_data_url(source) and self._media is None:
            raise RequestError(image.field, _NO_URLS)
        if isinstance(source, bytes) and len(source) > self._limits.image_bytes:
            raise RequestError(image.field, f"has {len(source)} bytes, and may have {self._limits.image_bytes}")

    async def prepare(self, images: Sequence[GivenImage], options: Mapping[str, Any], tenant: str) -> list[ImageInput]:
        """Return the images for the engine, in order.

        Raises:
            ServeError: INVALID: an image cannot be fetched or decoded; names its field. Or an error of `Pool.ask`.
        """
        tasks = [asyncio.ensure_future(self._prepared(image, options, tenant)) for image in images]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepared(self, image: GivenImage, options: Mapping[str, Any], tenant: str) -> ImageInput:
        with by_place():
            source = image.source
            if isinstance(source, str) and not is_data_url(source):
                source = await self._fetched(image.field, source, tenant)
            return await self._preparer.prepare(image.field, source, {**options, **image.options}, tenant)

    async def _fetched(self, field: str, url: str, tenant: str) -> bytes:
        if self._media is None:
            raise RequestError(field, _NO_URLS)
        try:
            return await self._media.fetch(url, tenant)
        except ImageError as error:
            raise RequestError(field, f": {error}") from error

    def placed(
        self, field: str, ids: Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[Sequence[int], tuple[PlacedImage, ...]]:
        """See `place_images`."""
        return place_images(field, ids, self._processor, images)


def _check_options(path: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise RequestError(f"{path}.{name}", f"is no option: they are {', '.join(_OPTIONS)}")
        if type(value) is not int or value < 1:
            raise RequestError(f"{path}.{name}", f"={value!r} must be a positive number of pixels")


def refuse_images(images: Sequence[GivenImage], why: str = "the model reads text only") -> None:
    """Reject the images of a request where only text is read.

    Raises:
        ServeError: INVALID, naming the first.
    """
    with by_place():
        for image in images:
            raise RequestError(f"{image.path}.type", f"={image.kind!r} is not served: {why}")


@contextlib.contextmanager
def named_images(images: Sequence[GivenImage]) -> Iterator[None]:
    """Name the fields of a request in an engine's errors about its images, which it knows by their number."""
    try:
        yield
    except RequestError as error:
        found = _NUMBERED.match(error.place or "")
        if found is None or int(found[1]) >= len(images):
            raise
        with by_place():
            raise RequestError(images[int(found[1])].field, error.reason) from error


def most_images(card: ModelCard) -> int | None:
    """Return the number of images that a prompt may have; None: any number; 0: the engine serves text alone."""
    if card.engine.get("images") is None:
        return 0
    return ImageConfig(limit_mm_per_prompt=card.engine.get("limit_mm_per_prompt", ())).most_images
