"""Tests of the task that prepares images in helper processes: the same result as in this process, and its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.workers.codec import decode, encode
from jaxinfer.serve.workers.images import decoded, encoded, preparer
from jaxinfer.serve.workers.tasks import ImagePreparer
from jaxinfer.types import ImageInput
from tests.fake_vision_processor import FakeProcessor, fake_source
from tests.images.pictures import picture
from tests.images.test_decode import mutated, seeds
from tests.serve.vision import LIMITS, file_of, url_of

FILE = file_of(6, 4)
OWN = FakeProcessor().prepare(picture(6, 4))


@contextlib.asynccontextmanager
async def preparing() -> AsyncIterator[ImagePreparer]:
    found = ImagePreparer(fake_source(), LIMITS)
    try:
        yield found
    finally:
        found.close()


def test_an_image_is_that_of_this_process() -> None:
    async def run() -> None:
        async with preparing() as preparer:
            for source in (FILE, url_of(FILE)):
                found = await preparer.prepare("image", source, {}, "")
                assert (found.grid, found.digest) == (OWN.grid, OWN.digest)
                np.testing.assert_array_equal(found.patches, OWN.patches)

    asyncio.run(run())


def test_many_images_of_two_tenants_at_once() -> None:
    async def run() -> None:
        async with preparing() as preparer:
            asked = [preparer.prepare("image", FILE, {}, tenant) for tenant in "ab" * 8]
            assert {found.digest for found in await asyncio.gather(*asked)} == {OWN.digest}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (b"", {}),
        (FILE[:-40], {}),
        ("data:image/png;base64,####", {}),
        ("/etc/passwd", {}),
        (bytes((1 << 16) + 1), {}),
        (file_of(200, 100), {}),
        (FILE, {"max_pixels": 2}),
        (FILE, {"colour": 1}),
    ],
)
def test_what_is_refused_names_its_field(source: str | bytes, options: dict[str, int]) -> None:
    prepare = preparer(dataclasses.asdict(fake_source()), (LIMITS.image_bytes, LIMITS.image_pixels))
    with pytest.raises(RequestError) as refused:
        prepare(encode(("a[0].b", source, options)))
    assert refused.value.place == "a[0].b"
    assert all(name in refused.value.reason for name in options)


@pytest.mark.slow
def test_many_fuzzed_files_end_no_helper(seed: int) -> None:
    """Ten thousand mutated files: each is prepared or refused by its field, by the processes that were there before."""

    async def run() -> None:
        draw, files, refused = random.Random(seed), seeds(), 0
        async with preparing() as preparer:
            for _ in range(3):
                await asyncio.gather(*(preparer.prepare("a", FILE, {}, tenant) for tenant in "abcd"))
            before = [helper._process for helper in preparer._helpers]

            async def one(number: int) -> bool:
                data = mutated(draw.choice(files), draw)
                try:
                    await preparer.prepare("a", data, {}, f"{number % 4}")
                except RequestError as error:
                    return error.place == "a" and len(error.reason) < 300
                return False

            for first in range(0, 10_000, 100):
                refused += sum(await asyncio.gather(*map(one, range(first, first + 100))))
            assert refused > 2_000
            assert [helper._process for helper in preparer._helpers] == before

    asyncio.run(run())


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_as_plain_data(dtype: type) -> None:
    patches = np.arange(24).astype(dtype).reshape(6, 4)
    for given in (patches, patches[::-1, ::2]):
        image = ImageInput(given, (1, 2, 3), "digest", tiles=(2, 3))
        found = decoded(decode(encode(encoded(image))))
        assert found == image
        assert found.patches.dtype == dtype
        np.testing.assert_array_equal(found.patches, given)
        assert all(getattr(found, f.name) == getattr(image, f.name) for f in dataclasses.fields(image)[1:])
