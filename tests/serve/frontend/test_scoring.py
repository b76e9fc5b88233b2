"""Tests of scoring with scripted answers: the number of concurrent requests, and the effect of a failed one."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, ServeLimits
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.frontend.scoring import check_continuations, score_all
from jaxinfer.types import FinishReason
from tests.serve.frontend.test_generation import delta, generation_of, scripted

CALL = Call([3])
CONTEXT = [3]


def score(generate: Callable[[Call], Awaitable[Generation]], count: int) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await score_all(generate, CALL, CONTEXT, [[4 + rank] for rank in range(count)])

    asyncio.run(run())


def test_one_call_does_not_fill_the_queue():
    under_way = most = 0

    async def generate(call: Call) -> Generation:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        under_way -= 1
        raise ServeError(Kind.QUEUE_FULL, "full") if call.prompt == [3, 4 + 63] else asyncio.CancelledError

    with pytest.raises((ServeError, asyncio.CancelledError)):
        score(generate, 64)
    assert most == 8


def test_one_that_fails_ends_the_others():
    cancelled = 0

    async def generate(call: Call) -> Generation:
        nonlocal cancelled
        if call.prompt == [3, 5]:
            await asyncio.sleep(0)
            raise ServeError(Kind.QUEUE_FULL, "full")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError

    with pytest.raises(ServeError, match="full"):
        score(generate, 4)
    assert cancelled == 3


def test_a_request_that_was_aborted_has_no_score():
    async def generate(call: Call) -> Generation:
        return generation_of(scripted(delta(0, "", FinishReason.ABORT)))

    with pytest.raises(ServeError) as caught:
        score(generate, 1)
    assert caught.value.kind is Kind.CANCELLED


def test_the_bound_is_the_last_number_that_is_taken():
    check_continuations(["a"] * 3, ServeLimits(score_continuations=3))
    with pytest.raises(RequestError, match="continuations must be 1 to 3, not 4"):
        check_continuations(["a"] * 4, ServeLimits(score_continuations=3))
