"""Tests that helper processes parse long inputs with the same result as this process."""

import asyncio
import contextlib
import json
import os
import sys
from array import array

import pytest

from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Conversation, ServeLimits
from jaxinfer.serve.workers.pool import Pool
from jaxinfer.serve.workers.tasks import BodyReader, Grammars, LongTexts, Renderer
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
            for helper in reader._helpers:
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


@pytest.mark.skipif(sys.platform != "linux", reason="a scheduling policy of Linux")
def test_only_workers_that_check_grammars_have_idle_priority():
    async def run() -> None:
        grammars, renderer = Grammars(), Renderer(None, 9.0)
        try:
            good, bad = (SamplingParams(structured_outputs={"regex": text}) for text in ("a*", "("))
            await grammars.check(good, "")
            with pytest.raises(RequestError) as refused:
                await grammars.check(bad, "")
            assert refused.value.place == "structured_outputs.regex"
            assert await renderer.render(Conversation([], template="ok")) == "ok"
            assert [policy(grammars), policy(renderer._requests)] == [os.SCHED_IDLE, os.SCHED_OTHER]
        finally:
            grammars.close()
            renderer.close()

    asyncio.run(run())


def policy(pool: Pool) -> int:
    process = pool._helpers[-1]._process
    assert process is not None
    return os.sched_getscheduler(process.pid)
