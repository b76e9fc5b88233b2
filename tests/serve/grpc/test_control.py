"""Tests of `jaxinfer.v1.Control` on a real server."""

import asyncio
import dataclasses

import grpc
import pytest
from google.protobuf import duration_pb2

from jaxinfer.client.control import as_dict
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.protos.v1 import control_pb2 as pb
from jaxinfer.protos.v1 import inference_pb2
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.control import _fill
from tests.serve.fake_engine import Mischief
from tests.serve.grpc.running import collected, failure, request, running
from tests.serve.telemetry.test_metrics import busy

SLOW = Mischief(seconds=0.005)
ENDLESS = {"max_tokens": 2000}


def test_abort_ends_one_output_or_all() -> None:
    async def story() -> None:
        async with running(SLOW) as server:
            call = server.inference.Generate(request(request_id="mine", sampling={**ENDLESS, "n": 2}))
            await call.read()
            await server.control.Abort(pb.AbortRequest(request_id="mine", output_index=1))
            assert await reasons(call, 1) == {1: inference_pb2.FINISH_REASON_ABORT}
            await server.control.Abort(pb.AbortRequest(request_id="mine"))
            assert await reasons(call, 1) == {0: inference_pb2.FINISH_REASON_ABORT}
            assert (await call.read()).WhichOneof("event") == "finished"
            await server.control.Abort(pb.AbortRequest(request_id="unknown"))
            await server.baseline()

    asyncio.run(story())


async def reasons(call: grpc.aio.UnaryStreamCall, count: int) -> dict[int, int]:
    """Return the finish reasons of the next ``count`` outputs that end."""
    found: dict[int, int] = {}
    while len(found) < count:
        delta = (await call.read()).delta
        if delta.HasField("finish_reason"):
            found[delta.output_index] = delta.finish_reason
    return found


def test_stats_have_what_each_device_reports_and_nothing_else() -> None:
    stats, found = busy(), pb.Stats()
    _fill(found, stats)
    gpu, cpu = found.devices
    assert (gpu.process, gpu.device, gpu.kind, dict(gpu.parts)) == (
        0,
        3,
        "NVIDIA H200",
        {"weights": 40, "temporaries": 2},
    )
    assert (gpu.in_use, gpu.peak, gpu.limit, gpu.busy_seconds, found.seconds) == (47, 53, 71, 12.5, 20.0)
    assert (gpu.driver.utilization, gpu.driver.memory_used, gpu.driver.memory_total) == (0.75, 61, 83)
    assert (gpu.driver.watts, gpu.driver.celsius) == (310.5, 64)
    assert not any(cpu.HasField(name) for name in ("in_use", "peak", "limit", "driver"))
    assert [(host.process, dict(host.parts)) for host in found.hosts] == [(0, {"kv_pages": 19}), (1, {})]
    plain = as_dict(found)
    assert plain["devices"][0]["driver"]["watts"] == 310.5
    assert plain["devices"][1]["parts"] == {"kv_cache": 9}
    assert "driver" not in plain["devices"][1]


def test_stats_tell_what_the_engine_did_and_whether_it_lives() -> None:
    async def story() -> None:
        async with running() as server:
            await collected(server.inference.Generate(request(sampling={"max_tokens": 7})))
            stats = await server.control.GetStats(pb.GetStatsRequest())
            assert (stats.state, stats.running, stats.prompt_tokens, stats.generated_tokens) == ("ready", 0, 2, 7)
            assert stats.finished["length"] == 1
            assert stats.kv_pages["total"] == stats.kv_pages["free"] + stats.kv_pages["cached"] > 0
            assert stats.steps >= 7
            server.frontend.draining = True
            assert (await server.control.GetStats(pb.GetStatsRequest())).state == "draining"
            server.supervisor.state, server.supervisor.restarts = "dead", 3
            assert await server.control.GetStats(pb.GetStatsRequest()) == pb.Stats(state="dead", restarts=3)

    asyncio.run(story())


def test_every_figure_of_the_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> pb.Stats:
        async with running() as server:

            async def stats() -> EngineStats:
                return busy()

            monkeypatch.setattr(server.frontend, "stats", stats)
            return await server.control.GetStats(pb.GetStatsRequest())

    told, figures = asyncio.run(story()), busy()
    for name in {field.name for field in told.DESCRIPTOR.fields if field.name != "weights"} & {
        field.name for field in dataclasses.fields(figures)
    }:
        value = getattr(figures, name)
        if name == "finished":
            value = {reason.value: count for reason, count in value.items()}
        heard = getattr(told, name)
        assert (type(value)(heard) if isinstance(value, dict | tuple) else heard) == value, name
    kv = {"total": 16, "free": 1, "cached": 3, "held": 12, "host_total": 11, "host_used": 4}
    assert (dict(told.kv_pages), dict(told.waiting)) == (kv, {"slot": 8, "pages": 5})
    weights = pb.WeightStats(weight_version=26, is_paused=False, asleep=["kv_cache"], updates=2, update_seconds=1.75)
    assert told.weights == weights
    assert told.lora_usage == pb.LoraUsage(
        loaded=21,
        slots=2,
        slots_used=1,
        loads=25,
        evictions=24,
        running={"a": 4, "b": 3},
        waiting={"b": 1, "c": 5, "d": 2, "e": 2},
    )


def test_stats_before_there_is_a_front_end() -> None:
    def none_yet() -> Frontend:
        raise ServeError(Kind.UNAVAILABLE, "the model is being loaded", retry_after=1.0)

    async def story() -> None:
        async with running(frontend=lambda made: none_yet) as server:
            server.supervisor.state = "starting"
            assert await server.control.GetStats(pb.GetStatsRequest()) == pb.Stats(state="starting")
            assert (
                await failure(server.control.FlushPrefixCache(pb.FlushPrefixCacheRequest()))
            ).code.name == "UNAVAILABLE"

    asyncio.run(story())


def test_watch_startup_tells_the_way_and_ends() -> None:
    async def story() -> None:
        async with running() as server:
            events = [event async for event in server.control.WatchStartup(pb.WatchStartupRequest())]
            phases = pb.StartupEvent
            assert [event.phase for event in events] == [phases.STARTING, phases.LOADING_WEIGHTS, phases.READY]
            assert (events[1].bytes_done, events[1].bytes_total) == (1, 2)

    asyncio.run(story())


def test_drain_waits_then_aborts_and_refuses_what_comes() -> None:
    async def story() -> None:
        async with running(SLOW) as server:
            short = asyncio.create_task(collected(server.inference.Generate(request(sampling={"max_tokens": 20}))))
            long = server.inference.Generate(request(sampling=ENDLESS))
            await long.read()
            timeout = duration_pb2.Duration(nanos=500_000_000)
            drained = await server.control.Drain(pb.DrainRequest(timeout=timeout))
            assert drained.aborted == 1
            assert (await failure(long)).code is grpc.StatusCode.UNAVAILABLE
            assert (await short)[2].usage.completion_tokens == 20
            found = await failure(server.inference.Generate(request()))
            assert (found.code, "RetryInfo" in found.details) == (grpc.StatusCode.UNAVAILABLE, True)
            await server.baseline()
            found = await failure(server.control.Drain(pb.DrainRequest(timeout=duration_pb2.Duration(seconds=-1))))
            assert (found.code, set(found.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, {"timeout"})

    asyncio.run(story())


def test_flush_forgets_cached_pages() -> None:
    async def story() -> None:
        async with running() as server:
            await collected(server.inference.Generate(request(prompt="x" * 100)))
            await server.baseline()
            assert (await server.control.FlushPrefixCache(pb.FlushPrefixCacheRequest())).pages > 0
            assert (await server.control.FlushPrefixCache(pb.FlushPrefixCacheRequest())).pages == 0

    asyncio.run(story())


def test_profiles_need_a_folder() -> None:
    async def story() -> None:
        async with running() as server:
            for call in (
                server.control.StartProfile(pb.StartProfileRequest()),
                server.control.StopProfile(pb.StopProfileRequest()),
            ):
                found = await failure(call)
                assert (found.code, "profile_dir" in found.message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            assert server.supervisor.profiles == []
        async with running(profile_dir="profiles") as server:
            await server.control.StartProfile(pb.StartProfileRequest())
            await server.control.StartProfile(pb.StartProfileRequest(steps=3))
            assert (await server.control.StopProfile(pb.StopProfileRequest())).folder == "profiles/1"
            assert server.supervisor.profiles == ["start 1000", "start 3", "stop"]
            for steps in (0, -1, 1001):
                found = await failure(server.control.StartProfile(pb.StartProfileRequest(steps=steps)))
                assert (found.code, list(found.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["steps"])

    asyncio.run(story())
