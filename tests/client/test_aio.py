"""Tests of the asyncio client against the real server over the fake engine: the same calls, and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from jaxinfer import client as c
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.v1 import inference_pb2 as pb
from tests.client.serving import SEED, expected, scripted
from tests.client.test_sync import cancelling
from tests.serve.fake_engine import FIRST_BYTE, Mischief
from tests.serve.grpc.running import Running, running

SLOW = Mischief(seconds=0.01)


@contextlib.asynccontextmanager
async def serving(mischief: Mischief | None = None, **how: Any) -> AsyncIterator[tuple[Running, c.AsyncClient]]:
    async with running(mischief or Mischief(), **how) as run:
        async with c.AsyncClient(f"127.0.0.1:{run.servers.port}", timeout=20) as client:
            yield run, client
        await run.baseline()


def test_generate_and_the_other_calls() -> None:
    async def main() -> None:
        async with serving() as (_, client):
            completion = await client.generate("Hi ö", max_tokens=24, seed=SEED, n=2)
            assert [output.text for output in completion.outputs] == [expected("Hi ö", 24, k) for k in range(2)]
            chat = await client.generate(messages=[{"role": "user", "content": "Hi"}], max_tokens=9, seed=SEED)
            assert chat.text == expected("[user] Hi\n[a] ", 9)
            ids = await client.tokenize("Hö")
            assert await client.detokenize(ids) == "Hö"
            (scored,) = await client.score("Hi", continuations=["ab"])
            assert [token.token_id for token in scored.tokens] == [FIRST_BYTE + 97, FIRST_BYTE + 98]
            assert (await client.model_info()).name == "fake"

    asyncio.run(main())


def test_stream() -> None:
    async def main() -> None:
        async with serving(SLOW) as (_, client):
            async with client.stream("Hi", max_tokens=24, seed=SEED) as stream:
                assert (stream.seed, stream.prompt_tokens) == (SEED, 2)
                deltas = [delta async for delta in stream]
            assert len(deltas) > 1
            assert "".join(delta.text for delta in deltas) == expected("Hi", 24)
            assert (await stream.completion()).text == expected("Hi", 24)
            assert stream.usage is not None

    asyncio.run(main())


def test_leaving_a_stream_ends_the_request() -> None:
    async def main() -> None:
        async with serving(SLOW) as (run, client):
            async with client.stream("Hi", max_tokens=1500) as stream:
                await anext(stream)
                assert run.frontend.active
            await run.baseline()

    asyncio.run(main())


def test_cancelling_a_stream_is_no_cancellation_of_the_task() -> None:
    async def main() -> None:
        async with serving(SLOW) as (run, client):
            async with client.stream("Hi", max_tokens=1500) as stream:
                await anext(stream)
                asyncio.get_running_loop().call_later(0.05, stream.cancel)
                with pytest.raises(c.Cancelled):
                    await stream.completion()
            await run.baseline()

    asyncio.run(main())


def test_cancelling_the_task_cancels_the_call() -> None:
    async def main() -> None:
        async with serving(SLOW) as (run, client):
            task = asyncio.create_task(client.generate("Hi", max_tokens=1500))
            while not run.frontend.active:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await run.baseline()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.generate("Hi", max_tokens=1500)
            await run.baseline()

    asyncio.run(main())


def test_batch() -> None:
    async def prompts() -> AsyncIterator[Any]:
        for k in range(10):
            yield f"prompt {k}"
        yield ""
        raise KeyError("mine")

    async def main() -> None:
        async with serving() as (_, client):
            found = {}
            with pytest.raises(KeyError, match="mine"):
                found.update(
                    {item.index: item async for item in client.generate_batch(prompts(), max_tokens=8, seed=SEED)}
                )
            items = [item async for item in client.generate_batch(["a", ""], max_tokens=8, seed=SEED)]
            found = {item.index: item for item in items}
            assert found[0].result().text == expected("a", 8)
            assert isinstance(found[1].error, c.InvalidRequest)

    asyncio.run(main())


def test_leaving_a_batch_early_cancels_the_rest() -> None:
    async def main() -> None:
        async with serving(SLOW) as (run, client):
            async with contextlib.aclosing(client.generate_batch(["takes 15 s", ""], max_tokens=1500)) as items:
                assert (await anext(items)).index == 1
                assert run.frontend.active
            await run.baseline()

    asyncio.run(main())


def test_errors_are_typed() -> None:
    async def main() -> None:
        async with serving() as (run, client):
            with pytest.raises(c.InvalidRequest, match="top_p=2") as caught:
                await client.generate("Hi", top_p=2)
            assert caught.value.field == "top_p"
            with pytest.raises(c.NotFound):
                await client.model_info(model="other")
            with pytest.raises(c.DeadlineExceeded):
                await client.generate("Hi", max_tokens=1500, timeout=1e-6)

            async def full(call: Any) -> Any:
                raise ServeError(Kind.QUEUE_FULL, "full", retry_after=0.01)

            run.frontend.generate = full  # type: ignore[method-assign]
            with pytest.raises(c.QueueFull) as queue:
                await client.generate("Hi")
            assert queue.value.retry_after == 0.01

    asyncio.run(main())


def test_what_a_stopping_server_cancels_is_tried_again() -> None:
    async def main() -> None:
        calls: list[int] = []
        with scripted(Generate=cancelling(calls, 2)) as target:
            async with c.AsyncClient(target) as client:
                assert (await client.generate("Hi")).text == "Hi"
        assert len(calls) == 3

    asyncio.run(main())


def test_a_client_has_a_timeout_and_a_call_may_have_another() -> None:
    async def main() -> None:
        async with running(SLOW) as run, c.AsyncClient(f"127.0.0.1:{run.servers.port}", timeout=0.1) as client:
            with pytest.raises(c.DeadlineExceeded):
                await client.generate("Hi", max_tokens=1500)
            assert (await client.generate("Hi", max_tokens=20, seed=SEED, timeout=20)).text == expected("Hi", 20)

    asyncio.run(main())


def test_a_truncated_stream_is_an_error() -> None:
    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(started=pb.Started(seed=1, prompt_tokens=2))
        yield pb.GenerateResponse(delta=pb.Delta(text="half"))

    async def main(target: str) -> None:
        async with c.AsyncClient(target) as client, client.stream("Hi") as stream:
            assert (await anext(stream)).text == "half"
            with pytest.raises(c.Truncated):
                await anext(stream)

    with scripted(Generate=generate) as target:
        asyncio.run(main(target))


def test_wait_ready() -> None:
    async def main() -> None:
        async with serving() as (run, client):
            run.supervisor.state = "starting"
            while await client.health() is c.Health.SERVING:
                await asyncio.sleep(0.01)
            with pytest.raises(c.DeadlineExceeded, match=r"0\.2 s"):
                await client.wait_ready(0.2)
            asyncio.get_running_loop().call_later(0.1, setattr, run.supervisor, "state", "ready")
            await client.wait_ready(10)
            assert await client.health("") is c.Health.SERVING
        async with c.AsyncClient("127.0.0.1:1") as nobody:
            with pytest.raises(c.DeadlineExceeded):
                await nobody.wait_ready(0.2)

    asyncio.run(main())
