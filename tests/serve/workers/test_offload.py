"""Tests that helper processes parse long inputs with the same result as this process."""

import asyncio
import contextlib
import json
from array import array

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.workers.offload import BodyReader, LongTexts
from jaxinfer.text import find_tokenizer
from tests.serve.fake_engine import fake_tokenizer, write_fake_folder

VALUES = 100


@contextlib.asynccontextmanager
async def reading():
    reader = BodyReader(ServeLimits(values=VALUES))
    try:
        yield reader
    finally:
        reader.close()


def test_bodies():
    async def run() -> None:
        async with reading() as reader:
            text = "🦊 \n" * 300_000
            given = {"prompt": [text, [*range(50_000)], [2**40] * 20], "n": 2, "stop": ["a"], "x": [True] * 20}
            found = await reader.read(json.dumps(given).encode(), "")
            assert isinstance(found["prompt"][1], array)
            assert {**found, "prompt": [text, *map(list, found["prompt"][1:])]} == given
            for body, what, field in (
                (b'{"a": 1, "a": 2}', "'a' twice", None),
                (b'{"tools": [%s1]}' % (b"{}," * VALUES), "tools holds more than 100 values", "tools"),
                (b'{"tools": [%s1]}' % (b"{}," * 10 * VALUES), "the body holds more than 100 values", None),
                (b'{"a": 1' + b"9" * 5000 + b"}", "too many digits", None),
                (b'{"' + b"a" * 2000 + b'": 1}', "a name of 2000 characters", None),
            ):
                with pytest.raises(ServeError, match=what) as caught:
                    await reader.read(body, "")
                assert (caught.value.kind, caught.value.field) == (Kind.INVALID, field)

    asyncio.run(run())


def test_a_reader_that_is_killed_is_started_again():
    async def run() -> None:
        async with reading() as reader:
            assert await reader.read(b"[1]", "") == [1]
            for helper in reader._pool._helpers:
                helper.kill()
            assert await reader.read(b"[2]", "") == [2]

    asyncio.run(run())


def test_texts(tmp_path):
    """Texts are tokenized by the tokenizer of the folder, including its special tokens."""
    folder, here = write_fake_folder(tmp_path / "model"), fake_tokenizer()
    names = '{"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["Grüße"]}'
    (folder / "tokenizer_config.json").write_text(names, encoding="utf-8")
    declared = find_tokenizer(folder)

    async def run() -> None:
        texts = LongTexts(folder)
        try:
            text = "Grüße </s> 🦊 " * 10_000
            assert here.encode(text) != declared.encode(text)
            assert list(await texts.encode("prompt", text, False, "")) == declared.encode(text, False)
            assert list(await texts.encode("prompt", text, True, "")) == declared.encode(text, True)
            with pytest.raises(RequestError, match="prompt: the text has a lone surrogate at character 1"):
                await texts.encode("prompt", "a\ud800", True, "")
        finally:
            texts.close()

    asyncio.run(run())
