"""Tests of GetLoads, FlushCache and profiles."""

import asyncio
import datetime

import grpc
import pytest

from jaxinfer.serve.grpc.vllm.loads import Loads
from jaxinfer.serve.grpc.vllm.messages import common, pb
from tests.serve.fake_engine import Mischief
from tests.serve.grpc.running import failure
from tests.serve.grpc.vllm.serving import IDS, request, serving


def test_a_busy_engine_tells_what_runs_and_what_waits() -> None:
    async def story() -> None:
        settings = {"max_num_seqs": 2, "num_pages": 256}
        async with serving(Mischief(seconds=0.05), settings=settings) as (run, stub, _):
            calls = [stub.Generate(request(stream=True, sampling={"max_tokens": 1000})) for _ in range(3)]
            async with asyncio.timeout(60):
                load = pb.SchedulerLoad()
                while not load.token_usage or (
                    (load.num_running_reqs, load.num_waiting_reqs, load.num_waiting_uncached_tokens) != (2, 1, len(IDS))
                ):
                    (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
            assert (load.dp_rank, load.num_total_reqs, load.max_running_requests, load.utilization) == (0, 3, 2, 1.0)
            assert 0 < load.num_used_tokens < load.max_total_num_tokens <= 256 * 16
            assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
            for call in calls:
                call.cancel()
            await run.baseline()

    asyncio.run(story())


def test_an_answer_has_a_time_and_one_rank() -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):
            found = await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
            assert (
                abs(datetime.datetime.fromisoformat(found.timestamp).timestamp() - datetime.datetime.now().timestamp())
                < 600
            )
            assert (found.dp_rank_count, len(found.loads)) == (1, 1)
            assert len((await stub.GetLoads(pb.GetLoadsRequest(dp_rank=0))).loads) == 1
            assert not (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads

    asyncio.run(story())


def test_rates_are_of_the_time_between_two_looks() -> None:
    now = [100.0]

    async def story() -> None:
        async with serving() as (run, stub, _):
            loads = Loads(lambda: now[0])

            async def rates(seconds: float) -> tuple[float, float]:
                now[0] += seconds
                load = await loads.load(run.frontend)
                return load.gen_throughput, load.cache_hit_rate

            async def generate() -> None:
                async for _ in stub.Generate(request(tokenized={"input_ids": IDS * 8}, sampling={"max_tokens": 20})):
                    pass

            assert await rates(0) == (0, 0)
            await generate()
            assert await rates(2) == (10, 0)
            await generate()
            assert await rates(0.5) == (10, 0)
            tokens, hits = await rates(4.5)
            assert (tokens, 0.5 < hits <= 1) == (4, True)
            assert await rates(1) == (0, 0)

    asyncio.run(story())


def test_the_cache_is_flushed() -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):

            async def cached() -> int:
                parts = [part async for part in stub.Generate(request(tokenized={"input_ids": IDS * 8}))]
                return parts[-1].complete.cached_tokens

            assert [await cached(), await cached()] == [0, 32]
            found = await stub.FlushCache(common.FlushCacheRequest())
            assert found.success
            assert found.message.endswith("pages forgotten")
            assert await cached() == 0

    asyncio.run(story())


@pytest.mark.parametrize("name", ["FlushCache", "StartProfile", "StopProfile"])
def test_operators_are_not_served_where_nothing_tells_them_apart(name: str) -> None:
    async def story() -> None:
        async with serving(profiling=True, operated=False) as (_, stub, state):
            found = await failure(getattr(stub, name)(getattr(common, f"{name}Request")()))
            assert found.code is grpc.StatusCode.PERMISSION_DENIED
            assert found.message.startswith(f"{name} is for operators")
            assert state.supervisor.profiles == []

    asyncio.run(story())


def test_profiles_need_a_folder_and_take_no_orders() -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):
            for call in (
                stub.StartProfile(common.StartProfileRequest()),
                stub.StopProfile(common.StopProfileRequest()),
            ):
                assert (await failure(call)).code is grpc.StatusCode.UNIMPLEMENTED
        async with serving(profiling=True) as (_, stub, state):
            assert (await stub.StartProfile(common.StartProfileRequest())).success
            stopped = await stub.StopProfile(common.StopProfileRequest())
            assert (stopped.success, stopped.message) == (True, "profiles/1")
            assert state.supervisor.profiles == ["start 1000", "stop"]
            refused = await failure(stub.StartProfile(common.StartProfileRequest(output_dir="/etc", num_steps=3)))
            assert (refused.code, list(refused.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["output_dir"])
            assert state.supervisor.profiles == ["start 1000", "stop"]
            assert (await stub.StartProfile(common.StartProfileRequest(num_steps=3))).success
            assert state.supervisor.profiles[-1] == "start 3"
            refused = await failure(stub.StartProfile(common.StartProfileRequest(num_steps=0)))
            assert (refused.code, list(refused.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["num_steps"])

    asyncio.run(story())
