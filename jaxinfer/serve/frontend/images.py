"""Images and videos of requests: checks, fetching, preparation in helper processes, places in prompts. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.config.images import KINDS
from jaxinfer.images.expansion import for_vocabulary, place_images
from jaxinfer.images.processor import ImageError, VideoProcessor, options_for
from jaxinfer.images.registry import ProcessorSource
from jaxinfer.images.source import is_data_url
from jaxinfer.request_checks import check_prompt_length
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.frontend.chat.messages import by_place
from jaxinfer.serve.runtime.fetch import MediaFetcher
from jaxinfer.serve.workers.tasks import ImagePreparer
from jaxinfer.text.contents import VIDEO, GivenImage
from jaxinfer.types import ImageInput, PlacedImage

OPTIONS = "mm_processor_kwargs"
"""Field of requests with the options of the processor for all images."""

_MOST_KEPT = 64 << 20
_NUMBERED = re.compile(r"images\[([0-9]{1,9})\]")
_OPTIONS = ("min_pixels", "max_pixels")
_RATE = "fps"
_NO_URLS = "is a URL, and this server fetches none (allowed_media_domains): send the image as a data URL"


class Images:
    """The images of a model's requests.

    Args:
        source: source of the model's processor.
        id_of: looks up a token of the vocabulary.
        most: images and videos of one prompt, by kind, as far as they are limited.
        length: most tokens of a prompt.
        media: fetches URLs (None: they are rejected).
    """

    def __init__(
        self,
        source: ProcessorSource,
        limits: ServeLimits,
        id_of: Callable[[str], int | None],
        most: Mapping[str, int] | None = None,
        length: int | None = None,
        media: MediaFetcher | None = None,
    ) -> None:
        self._processor = for_vocabulary(source.processor(), id_of)
        self._limits, self._most, self._length, self._media = limits, most or {}, length, media
        self._kept = KeptMedia()
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
        """Check the images and videos of a request before any work.

        Args:
            options: options of the processor for all of them.

        Raises:
            ServeError: INVALID: there are too many, the model does not read videos, one is a URL that is not fetched,
                or an option is not supported.
        """
        with by_place():
            _check_options(OPTIONS, options)
            for kind in KINDS:
                own = [image for image in images if image.video == (kind == VIDEO)]
                if (most := self._most.get(kind)) is not None and len(own) > most:
                    found = f"is {kind} {most + 1} of the prompt, which may have {most} (limit_mm_per_prompt)"
                    raise RequestError(own[most].path, found)
            for image in images:
                _check_options(image.path, image.options)
                if image.video:
                    self._check_video(image, options)
                for field, source in _sources(image):
                    self._check_source(field, source)

    def _check_video(self, image: GivenImage, options: Mapping[str, Any]) -> None:
        if not isinstance(self._processor, VideoProcessor):
            raise RequestError(f"{image.path}.type", f"={image.kind!r} is not served: the model reads no videos")
        if image.source is None:
            return
        try:
            self._processor.timestamps(*_timing(image, options))
        except ImageError as error:
            raise RequestError(image.field, f": {error}") from error

    def _check_source(self, field: str, source: Any) -> None:
        if isinstance(source, str) and not is_data_url(source) and self._media is None:
            raise RequestError(field, _NO_URLS)
        if isinstance(source, bytes) and len(source) > self._limits.image_bytes:
            raise RequestError(field, f"has {len(source)} bytes, and may have {self._limits.image_bytes}")

    def with_timestamps(self, text: str, images: Sequence[GivenImage], options: Mapping[str, Any]) -> str:
        """Return the text of a prompt with the timestamps of videos, where the model reads them."""
        if not isinstance(self._processor, VideoProcessor):
            return text
        return self._processor.with_timestamps(text, [_timing(image, options) for image in images if image.video])

    def resolved(self, images: Sequence[GivenImage], tenant: str) -> list[GivenImage]:
        """Return images with their data: that of earlier requests in place of a ``uuid`` alone.

        Raises:
            ServeError: INVALID: none is kept under a ``uuid``.
        """
        with by_place():
            return [self._kept.found(image, tenant) for image in images]

    async def prepare(self, images: Sequence[GivenImage], options: Mapping[str, Any], tenant: str) -> list[ImageInput]:
        """Return the images for the engine, in order.

        Raises:
            ServeError: INVALID: an image cannot be fetched or decoded, names its field; or they have more tokens than a
                prompt may have. Or an error of `Pool.ask`.
        """
        count = 0

        async def prepared(image: GivenImage) -> ImageInput:
            nonlocal count
            made = await self._prepared(image, options, tenant)
            count += sum(map(len, self._processor.expand(made)))
            if self._length is not None:  # before more of them are held
                check_prompt_length(count, self._length)
            self._kept.keep(image, tenant)
            return made

        tasks = [asyncio.ensure_future(prepared(image)) for image in images]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepared(self, image: GivenImage, options: Mapping[str, Any], tenant: str) -> ImageInput:
        with by_place():
            sources = [await self._read(field, source, tenant) for field, source in _sources(image)]
            own = options_for(image.video, options, image.options)
            return await self._preparer.prepare(image.field, sources if image.video else sources[0], own, tenant)

    async def _read(self, field: str, source: str | bytes, tenant: str) -> str | bytes:
        """Return a data URL or bytes as they are, and what another URL has."""
        if isinstance(source, bytes) or is_data_url(source):
            return source
        return await self._fetched(field, source, tenant)

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


def _sources(image: GivenImage) -> list[tuple[str, Any]]:
    """Return the sources of an image or of the frames of a video, with their fields."""
    if not image.video:
        return [(image.field, image.source)]
    return [(f"{image.field}[{rank}]", frame) for rank, frame in enumerate(image.source or ())]


def _timing(image: GivenImage, options: Mapping[str, Any]) -> tuple[int, float]:
    """Return the number of frames of a video, and frames per second."""
    return len(image.source), options_for(True, options, image.options)[_RATE]


def _check_options(path: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in (*_OPTIONS, _RATE):
            raise RequestError(f"{path}.{name}", f"is no option: they are {', '.join((*_OPTIONS, _RATE))}")
        if name == _RATE and not (type(value) in (int, float) and 0 < value < math.inf):
            raise RequestError(f"{path}.{name}", f"={value!r} must be a positive number of frames per second")
        if name != _RATE and (type(value) is not int or value < 1):
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


class KeptMedia:
    """Images and videos by tenant and ``uuid``, as they were sent, the least recently used first, within `_MOST_KEPT`
    bytes."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, str], GivenImage] = OrderedDict()
        self._bytes = 0

    def keep(self, image: GivenImage, tenant: str) -> None:
        """Keep an image that has a ``uuid``, in place of an earlier one."""
        if image.uuid is None or (size := _size(image)) > _MOST_KEPT:
            return
        if (old := self._found.pop((tenant, image.uuid), None)) is not None:
            self._bytes -= _size(old)
        self._found[tenant, image.uuid] = image
        self._bytes += size
        while self._bytes > _MOST_KEPT:
            self._bytes -= _size(self._found.popitem(last=False)[1])

    def found(self, image: GivenImage, tenant: str) -> GivenImage:
        """Return an image with its data, that of an earlier request if it has but a ``uuid``; RequestError if none is
        kept."""
        if image.source is not None:
            return image
        kept = self._found.get((tenant, str(image.uuid)))
        if kept is None or kept.video != image.video:
            kind = VIDEO if image.video else "image"
            raise RequestError(image.field, f"={image.uuid!r}: no {kind} is kept under it, send its data again")
        return dataclasses.replace(image, source=kept.source)


def _size(image: GivenImage) -> int:
    return sum(len(source) for _, source in _sources(image))
