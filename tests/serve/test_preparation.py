"""Tests of `Frontend` before the engine accepts a call: the request for the engine, and calls that end before it."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation, ServeLimits
from jaxinfer.serve.api.tenants import cache_scope, engine_id
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.core.backend import BackendStream
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.text.tokenizer import LibraryBackend, SpecialIds, Tokenizer
from jaxinfer.types import Request
from tests.serve.fake_engine import BOS, EOS, FIRST_BYTE, FakeEngine, fake_card, fake_library, fake_template
from tests.serve.frontend.test_frontend import MESSAGES, refusal, served, whole


class Gate:
    """Replacement for a backend's ``submit``: records requests and blocks until it is opened."""

    def __init__(self, submit: Callable[[Request], Awaitable[BackendStream]]) -> None:
        self.requests: list[Request] = []
        self.opened = asyncio.Event()
        self._submit = submit

    async def __call__(self, request: Request) -> BackendStream:
        self.requests.append(request)
        await self.opened.wait()
        return await self._submit(request)


@pytest.fixture
def gated(monkeypatch):
    def put(backend: AsyncEngine) -> Gate:
        gate = Gate(backend.submit)
        monkeypatch.setattr(backend, "submit", gate)
        return gate

    return put


def test_the_engine_is_told_who_asks_how_urgently_and_until_when(gated):
    async def run() -> None:
        async with served() as s:
            gate = gated(s.backend)
            gate.opened.set()
            begun = time.monotonic()
            terms = {"priority": -3, "cache_salt": "salt", "tenant": "alice", "timeout": 50.0}
            await whole(s.frontend, Call("Hello", {"max_tokens": 2}, request_id="me", **terms))
            (request,) = gate.requests
            told = (request.request_id, request.priority, request.cache_salt, request.tenant, request.cache_scope)
            assert told == (engine_id("alice", "me"), -3, "salt", "alice", cache_scope("alice"))
            assert begun + 50 <= request.deadline <= time.monotonic() + 50

    asyncio.run(run())


def test_a_deadline_holds_though_the_engine_says_nothing(gated):
    async def run() -> None:
        async with served() as s:
            gate = gated(s.backend)
            async with asyncio.timeout(20):
                error = await refusal(s.frontend, Call("Hello", timeout=0.05))
            assert (error.kind, len(gate.requests), s.frontend.active) == (Kind.DEADLINE, 1, 0)

    asyncio.run(run())


def test_a_call_that_the_engine_accepts_after_the_end_of_draining_is_ended(gated):
    async def run() -> None:
        async with served() as s:
            gate = gated(s.backend)
            late = asyncio.ensure_future(refusal(s.frontend, Call("Hello")))
            while not gate.requests:
                await asyncio.sleep(0)
            assert await s.frontend.drain(0.0) == 0
            gate.opened.set()
            assert (await late).kind is Kind.UNAVAILABLE
            await s.pages_are_free()

    asyncio.run(run())


def test_of_two_bounds_on_log_probabilities_the_engines_may_be_the_lower():
    async def run() -> None:
        async with served(settings={"max_logprobs": 5}) as s:
            assert s.frontend.limits.logprobs == 5
            for field in ("logprobs", "prompt_logprobs"):
                await whole(s.frontend, Call("Hello", {field: 5, "max_tokens": 1}))
                assert (await refusal(s.frontend, Call("Hello", {field: 6}))).field == field

    asyncio.run(run())


def test_the_whole_vocabulary_is_up_to_the_operator():
    async def run() -> None:
        call = Call("Hello", {"logprobs": -1, "max_tokens": 2})
        async with served(settings={"enable_training_outputs": True}) as s:
            assert (await refusal(s.frontend, call)).field == "logprobs"
        settings = {"enable_training_outputs": True, "max_logprobs": -1}
        room = 4 * s.frontend.card.vocab_size * 2
        async with served(settings=settings, limits=ServeLimits(vocabulary_bytes=room)) as s:
            await whole(s.frontend, call)
            for more in ({"max_tokens": 3}, {"max_tokens": None}, {"n": 2}):
                longer = Call("Hello", {**call.sampling, **more})
                assert (await refusal(s.frontend, longer)).field == "logprobs"

    asyncio.run(run())


def test_a_list_of_ids_is_no_longer_than_a_text_may_be():
    async def run() -> None:
        async with served(limits=ServeLimits(prompt_characters=10)) as s:
            assert await s.frontend.detokenize([FIRST_BYTE + 65] * 10) == "A" * 10
            with pytest.raises(ServeError) as caught:
                await s.frontend.detokenize([FIRST_BYTE + 65] * 11)
            assert (caught.value.kind, caught.value.field) == (Kind.INVALID, "token_ids")

    asyncio.run(run())


def test_a_template_writes_its_special_tokens_itself():
    """A text prompt gets a BOS unless disabled; a chat prompt gets none unless enabled."""

    async def run() -> None:
        engine = FakeEngine()
        tokenizer = Tokenizer(LibraryBackend(fake_library()), SpecialIds(bos=BOS, eos=(EOS,)), prepend_bos=True)
        async with AsyncEngine(engine) as backend:
            frontend = Frontend(backend, fake_card(engine.config), tokenizer, fake_template())
            chat = Conversation(MESSAGES)
            asked = {"default": None, "with": True, "without": False}
            texts = {name: (await frontend.tokenize("Hi", add_special_tokens=how))[0] for name, how in asked.items()}
            chats = {name: (await frontend.tokenize(chat, add_special_tokens=how))[0] for name, how in asked.items()}
            assert [name for name, first in texts.items() if first == BOS] == ["default", "with"]
            assert [name for name, first in chats.items() if first == BOS] == ["with"]
            one = {"max_tokens": 1}
            plain = Call("Hi", one, add_special_tokens=False)
            for call, begins in ((Call("Hi", one), True), (plain, False), (Call(chat, one), False)):
                generation, _ = await whole(frontend, call)
                assert (generation.prompt_token_ids[0] == BOS) is begins
            await frontend.aclose()

    asyncio.run(run())
