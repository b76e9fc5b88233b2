"""Log probabilities of given continuations, from the engine's prompt logprobs. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Scored, ServeLimits
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.types import PositionLogprobs

_AT_ONCE = 8
"""Continuations of one call in flight, so that one call does not fill the queue."""
_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

Generate = Callable[[Call], Awaitable[Generation]]


def check_continuations(continuations: Sequence[str | Sequence[int]], limits: ServeLimits) -> None:
    """Check the number and the types of continuations.

    Raises:
        RequestError: there are none or too many, or one is empty or neither text nor token ids.
    """
    if not 0 < len(continuations) <= limits.score_continuations:
        raise RequestError("continuations", f"must be 1 to {limits.score_continuations}, not {len(continuations)}")
    for rank, continuation in enumerate(continuations):
        if isinstance(continuation, bytes) or not isinstance(continuation, Sequence):
            raise RequestError(f"continuations[{rank}]", "must be text or token ids")
        if len(continuation) == 0:
            raise RequestError(f"continuations[{rank}]", "is empty: there is nothing to score")


def check_lengths(context: Sequence[int], continuations: Sequence[Sequence[int]], max_model_len: int) -> None:
    """Check that each continuation fits after the context, with the one token that is generated.

    Raises:
        RequestError: a continuation does not fit, or the context leaves no capacity for any.
    """
    room = max_model_len - 1 - len(context)
    if room < 1:
        raise RequestError(
            "prompt_token_ids",
            f"has {len(context)} tokens, which leaves no room for a continuation: "
            f"all together have at most {max_model_len} (max_model_len)",
        )
    for rank, ids in enumerate(continuations):
        if len(ids) > room:
            raise RequestError(
                f"continuations[{rank}]",
                f"has {len(ids)} tokens, but behind a context of {len(context)} is room for "
                f"{room}: all together have at most {max_model_len} (max_model_len)",
            )


async def score_all(
    generate: Generate, call: Call, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[Scored]:
    """Score each continuation of ``context``, with requests like ``call``.

    Raises:
        ServeError: a request is rejected or fails; the other requests are aborted.
    """
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(ids: Sequence[int]) -> Scored:
        async with places:
            request = dataclasses.replace(call, prompt=[*context, *ids], sampling=_SAMPLING)
            return Scored((await _prompt_logprobs(generate, request))[len(context) - 1 :])

    tasks = [asyncio.ensure_future(one(ids)) for ids in continuations]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prompt_logprobs(generate: Generate, call: Call) -> list[PositionLogprobs]:
    """Return the log probabilities of each token of the prompt except the first."""
    found: Sequence[PositionLogprobs | None] = ()
    async with await generate(call) as generation:
        async for delta in generation:
            found = delta.prompt_logprobs or found
    scored = [position for position in found if position is not None]
    if not scored:
        raise ServeError(Kind.CANCELLED, "the request was aborted")
    return scored
