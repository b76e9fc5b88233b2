"""Tests of non-finite logits in every API: an internal error, unary or streamed, without effects on other requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.text.output import NOT_FINITE
from tests.serve.fake_engine import Mischief
from tests.serve.grpc.running import running
from tests.serve.http.support import run, serving

FAULT = Mischief(overflow_after=3)
CHAT = [{"role": "user", "content": "Hi!"}]
FINE = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Callable[[list[dict[str, str]]], dict[str, Any]]] = {
    "completions": lambda messages: {"prompt": messages[0]["content"], "max_tokens": 9},
    "chat/completions": lambda messages: {"messages": messages, "max_tokens": 9},
    "responses": lambda messages: {"input": messages, "max_output_tokens": 9},
    "messages": lambda messages: {"messages": messages, "max_tokens": 9, "model": "fake"},
}


@pytest.mark.parametrize("path", BODIES)
def test_http(path: str) -> None:
    async def test() -> None:
        async with serving(FAULT) as server, server.http() as client:
            bad, good = (BODIES[path](each) for each in (CHAT, FINE))
            answers = await asyncio.gather(*(client.post(f"/v1/{path}", json=body) for body in (good, bad, good)))
            assert [answer.status_code for answer in answers] == [200, 500, 200]
            assert NOT_FINITE in json.dumps(answers[1].json()["error"])
            answer = await client.post(f"/v1/{path}", json={**bad, "stream": True})
            assert NOT_FINITE in answer.text
            assert "NaN" not in answer.text.replace(NOT_FINITE, "")
            metrics = (await client.get("/metrics")).text
            assert 'jaxinfer:not_finite_outputs_total{model_name="fake"} 2.0' in metrics
            await server.quiet()

    run(test)


def test_grpc() -> None:
    async def test() -> None:
        async with running(FAULT) as server:
            for prompt in ("Hi", "Hi!", "Hi"):
                request = pb.GenerateRequest(prompt=prompt, sampling=pb.SamplingParams(max_tokens=9, seed=1))
                pieces = [event async for event in _until_error(server.inference.Generate(request))]
                tokens = sum(len(event.delta.token_ids) for event in pieces if isinstance(event, pb.GenerateResponse))
                assert tokens == (3 if "!" in prompt else 9)
                if "!" in prompt:
                    assert pieces[-1].code() is grpc.StatusCode.INTERNAL
                    assert NOT_FINITE in pieces[-1].details()

    asyncio.run(asyncio.wait_for(test(), 30))


async def _until_error(stream: Any) -> AsyncIterator[Any]:
    """Yield the events, and the error that ends the stream."""
    try:
        async for event in stream:
            yield event
    except grpc.aio.AioRpcError as error:
        yield error
