"""Tests of a core with the fake engine in a second process: results that clients get over the link, and faults."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxinfer.sampling_params import QueueFullError, RequestError, SamplingParams
from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.core.async_engine import AsyncEngine
from jaxinfer.serve.core.backend import Backend, BackendStream
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.core.supervisor import Supervisor, SupervisorTimeouts
from jaxinfer.types import FinishReason, Request
from tests.serve import fake_engine as fake
from tests.serve.core.fake_core import command, make_config

QUICK = SupervisorTimeouts(first_pause=0.05, tick=0.02, dump=0.3)
BOUND = 60.0  # seconds; limit for operations that take one second on an idle machine


def make_request(name: str, prompt=(5, 6, 7), tokens: int = 20, **changes) -> Request:
    fields = {field.name for field in dataclasses.fields(Request)}
    own = {key: value for key, value in changes.items() if key in fields}
    params = {key: value for key, value in changes.items() if key not in fields}
    sampling = SamplingParams(**{"seed": 1, "max_tokens": tokens, **params})
    return Request(name, tuple(prompt), sampling, frozenset({fake.EOS}), **own)


async def collect(backend: Backend, request: Request) -> dict[int, list]:
    """Return the tokens of each output, followed by the other fields of its deltas."""
    got: dict[int, list] = {index: [[], [], None, None, None] for index in range(request.params.n)}
    async with await backend.submit(request) as stream:
        async for delta in stream:
            tokens, logprobs, *_ = mine = got[delta.index]
            tokens += delta.token_ids
            logprobs += delta.logprobs
            mine[2] = mine[2] if delta.prompt_logprobs is None else delta.prompt_logprobs
            mine[3] = mine[3] if delta.cached_tokens is None else delta.cached_tokens
            mine[4] = (delta.finish_reason, delta.stop_reason)
    return got


def tokens(request: Request, index: int = 0) -> list[int]:
    params = request.params
    return fake.expected_tokens(request.prompt_token_ids, params.seed, index, params.max_tokens)


@contextlib.asynccontextmanager
async def supervised(*options: str, log=None, patience=QUICK, **changes):
    supervisor = Supervisor(make_config(**changes), command(*options, log=log), patience)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


@contextlib.asynccontextmanager
async def ready(*options: str, **changes):
    async with supervised(*options, **changes) as supervisor:
        await asyncio.wait_for(supervisor.until_ready(), BOUND)
        yield supervisor


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 2 * BOUND))


async def until(condition, seconds: float = BOUND) -> float:
    """Wait until the condition holds; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "it did not come true"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


async def nothing_is_left(backend: Backend) -> None:
    """Wait until no sequence runs or waits and no page is held."""
    end = time.monotonic() + BOUND
    while True:
        stats = await backend.stats()
        if (stats.running, sum(stats.waiting.values()), stats.kv.held) == (0, 0, 0):
            return
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.01)


def process_of(supervisor: Supervisor):
    return supervisor._child.process


# ---- results of clients


def test_streams_are_those_of_an_engine_in_this_process_and_other_calls_work():
    async def main():
        requests = [
            make_request(
                f"r{i}", range(3, 4 + i * 9), 1 + 3 * i, n=1 + i % 3, seed=i, logprobs=i % 3 or None,
                prompt_logprobs=1 if i % 4 == 0 else None,
            )
            for i in range(16)
        ]  # fmt: skip
        async with AsyncEngine(fake.FakeEngine()) as near:
            want = [await collect(near, request) for request in requests]
        async with ready(profile_dir="/traces") as supervisor:
            far = supervisor.backend
            assert [await collect(far, request) for request in requests] == want
            assert want[5][1][0] == tokens(requests[5], 1)
            assert supervisor.card == dataclasses.replace(
                fake.fake_card(fake.resolved(num_pages=16384)), engine=supervisor.card.engine
            )
            assert supervisor.card.engine["prefill_sizes"] == [32, 128]
            assert supervisor.folder == "nowhere"
            async with await far.submit(make_request("unset", seed=None)) as stream:
                assert isinstance(stream, BackendStream)
                assert stream.request.params.seed == 1000
                got = [token async for delta in stream for token in delta.token_ids]
                assert got == tokens(stream.request)
            await nothing_is_left(far)
            await supervisor._link().check()
            assert await far.reset_prefix_cache() > 0
            assert (await far.stats()).generated_tokens > 500
            await supervisor.start_profile()
            with pytest.raises(ServeError, match="is being taken"):
                await supervisor.start_profile()
            assert await supervisor.stop_profile() == "/traces"
            await supervisor.start_profile(5)
            await collect(far, make_request("profiled", tokens=50))
            assert supervisor._profile is not None
            await supervisor._profile  # it has ended by itself
            assert await supervisor.stop_profile() == "/traces"
            with pytest.raises(ServeError, match="no profile"):
                await supervisor.stop_profile()

    run(main())


def test_refusals_and_deadlines():
    async def main():
        async with ready("--seconds", "0.01") as supervisor:
            backend = supervisor.backend
            async with await backend.submit(make_request("a", tokens=1000)) as stream:
                with pytest.raises(RequestError, match=r"^request_id='a' is in use") as refusal:
                    await backend.submit(make_request("a"))
                assert refusal.value.field == "request_id"
                with pytest.raises(RequestError, match="KV pages"):
                    await backend.submit(make_request("long", tokens=10**6))
                await anext(stream)
            late = make_request("late", tokens=1500, deadline=time.monotonic() + 0.3)
            (got,) = (await collect(backend, late)).values()
            assert got[4] == (FinishReason.DEADLINE, None)
            assert 0 < len(got[0]) < 1500
            assert got[0] == tokens(late)[: len(got[0])]
            with pytest.raises(ServeError, match="profiling is off"):
                await supervisor.start_profile()
            await nothing_is_left(backend)

    run(main())


def test_a_full_queue_is_told():
    async def main():
        engine = dataclasses.replace(make_config().engine, max_waiting_requests=1)
        async with ready("--seconds", "0.05", engine=engine) as supervisor:
            requests = [make_request(f"r{i}", tokens=100) for i in range(80)]
            asked = [asyncio.create_task(supervisor.backend.submit(request)) for request in requests]
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert any(isinstance(result, QueueFullError) for result in results)
            for result in results:
                if not isinstance(result, Exception):
                    await result.aclose()
            await nothing_is_left(supervisor.backend)

    run(main())


@pytest.mark.parametrize("how", ["aclose", "abort", "abort one", "cancel"])
def test_who_leaves_frees_everything(how):
    async def main():
        # Without an abort it takes longer than the test waits, except for the output that is not aborted.
        seconds, length = ("0.005", 100) if how == "abort one" else ("0.05", 1500)
        async with ready("--seconds", seconds) as supervisor:
            backend, request = supervisor.backend, make_request("a", tokens=length, n=2)
            if how == "cancel":
                task = asyncio.create_task(collect(backend, request))
                await asyncio.sleep(0.05)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                async with await backend.submit(request) as stream:
                    await anext(stream)
                    if how != "aclose":
                        await backend.abort("a", None if how == "abort" else 1)
                        reasons = {d.index: d.finish_reason async for d in stream if d.finish_reason is not None}
                        assert reasons[1] is FinishReason.ABORT
                        assert reasons[0] is (FinishReason.ABORT if how == "abort" else FinishReason.LENGTH)
            await nothing_is_left(backend)
            assert supervisor._link()._streams == {}

    run(main())


def test_two_hundred_streams_some_of_which_are_left():
    async def main():
        async with ready() as supervisor:
            requests = [make_request(f"r{i}", range(3, 5 + i % 40), 20 + i % 60, seed=i) for i in range(200)]

            async def client(request: Request, leaves: bool) -> None:
                if leaves:
                    async with await supervisor.backend.submit(request) as stream:
                        await anext(stream)
                    return
                assert (await collect(supervisor.backend, request))[0][0] == tokens(request)

            await asyncio.gather(*(client(request, i % 5 == 0) for i, request in enumerate(requests)))
            await nothing_is_left(supervisor.backend)
            assert supervisor._link()._streams == {}

    run(main())


def test_what_a_slow_reader_has_not_fetched_is_one_delta():
    async def main():
        async with ready() as supervisor:
            request = make_request("a", tokens=300)
            async with await supervisor.backend.submit(request) as stream:
                await until(lambda: stream.ended)
                deltas = [delta async for delta in stream]
            assert [(d.token_ids, d.finish_reason) for d in deltas] == [(tokens(request), FinishReason.LENGTH)]

    run(main())


# ---- faults


async def survives(supervisor: Supervisor) -> None:
    """Check that the core restarts and serves as before."""
    await until(lambda: supervisor.state == "ready" and supervisor.restarts == 1)
    request = make_request("again")
    assert (await collect(supervisor.backend, request))[0][0] == tokens(request)
    await nothing_is_left(supervisor.backend)


def test_a_killed_core_ends_its_streams_at_once_and_is_started_again():
    async def main():
        async with ready("--seconds", "0.005") as supervisor:
            states: list[str] = []
            supervisor.subscribe(states.append)
            requests = [make_request(f"r{i}", tokens=1500, seed=i) for i in range(20)]
            streams = [await supervisor.backend.submit(request) for request in requests]
            got = {request.request_id: (await anext(s)).token_ids for request, s in zip(requests, streams, strict=True)}

            async def read(stream) -> None:
                async for delta in stream:
                    got[delta.request_id] += delta.token_ids

            readers = [asyncio.create_task(read(stream)) for stream in streams]
            process_of(supervisor).send_signal(signal.SIGKILL)
            assert await until(lambda: supervisor.state != "ready") < 1
            for result in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(result, EngineDeadError)
            for request in requests:  # tokens received before the kill are correct
                mine = got[request.request_id]
                assert mine == tokens(request)[: len(mine)]
            with pytest.raises(EngineDeadError):
                await supervisor.backend.submit(make_request("late"))
            await survives(supervisor)
            assert states == ["dead", "starting", "ready"]

    run(main())


def test_a_hanging_engine_is_shown_killed_and_started_again(tmp_path):
    log = tmp_path / "log"

    async def main():
        options = ("--hang-at", "10", "--once", str(tmp_path / "once"))
        async with ready(*options, log=log, step_timeout=1.0) as supervisor:
            with pytest.raises(EngineDeadError, match="hangs"):
                await collect(supervisor.backend, make_request("a", tokens=100))
            assert supervisor.state == "dead"
            await survives(supervisor)

    run(main())
    assert "fake_engine.py" in log.read_text()
    assert "in read" in log.read_text()  # location of the hang


def test_a_core_that_stands_still_altogether_hangs_too():
    async def main():
        async with ready(step_timeout=1.0) as supervisor:
            process_of(supervisor).send_signal(signal.SIGSTOP)
            await until(lambda: supervisor.state == "dead")
            await survives(supervisor)

    run(main())


GROUP = {"num_processes": 2, "coordinator_address": "127.0.0.1:1", "group_key_file": "none", "group_timeout": 1.0}


async def died(supervisor: Supervisor, seconds: float) -> str | None:
    """Return the reason why the core is dead, or None if it is alive after ``seconds``."""
    for _ in range(int(seconds / 0.02)):
        await asyncio.sleep(0.02)
        if supervisor.state == "dead":
            return supervisor._reason
    return None


def test_one_of_a_group_that_stands_still_during_its_start_hangs():
    """A start may take long, but a stopped process reports no progress at all and counts as hung."""

    async def main():
        async with supervised("--slow", "90", **GROUP) as supervisor:
            await until(lambda: supervisor._heard > 0)
            assert await died(supervisor, 2.5) is None, "it gets on slowly, and lives"
            process_of(supervisor).send_signal(signal.SIGSTOP)
            assert "it said nothing for 1" in str(await died(supervisor, BOUND))

    run(main())


def test_one_that_follows_is_ready_lives_and_takes_no_requests():
    async def main():
        async with ready("--follow", **GROUP) as supervisor:
            assert await died(supervisor, 2.5) is None, "it has nothing to say but that it lives"
            with pytest.raises(EngineDeadError):
                await collect(supervisor.backend, make_request("a"))
            process_of(supervisor).send_signal(signal.SIGSTOP)
            assert "hangs" in str(await died(supervisor, BOUND))

    run(main())


def test_one_that_follows_stops_when_it_is_told():
    async def main():
        async with ready("--follow", **GROUP) as supervisor:
            process = process_of(supervisor)
        assert process.returncode == 0

    run(main())


def test_a_fault_in_a_step_is_told_and_logged(tmp_path):
    log = tmp_path / "log"

    async def main():
        async with ready("--fault-at", "10", "--once", str(tmp_path / "once"), log=log) as supervisor:
            with pytest.raises(EngineDeadError, match="fault in step 10"):
                await collect(supervisor.backend, make_request("a", tokens=100))
            await survives(supervisor)

    run(main())
    assert "ZeroDivisionError: the fake engine's fault in step 10" in log.read_text()


def test_a_busy_core_does_not_hang_nor_does_an_idle_one():
    async def main():
        async with ready("--seconds", "0.3", step_timeout=1.5) as supervisor:
            await collect(supervisor.backend, make_request("a", tokens=6))
            await asyncio.sleep(1.8)
            assert (supervisor.state, supervisor.restarts) == ("ready", 0)

    run(main())


# ---- starts and ends


def test_a_start_is_told_step_by_step():
    async def main():
        async with supervised("--slow", "0.3") as supervisor:
            with pytest.raises(EngineDeadError, match="starting"):
                await supervisor.backend.submit(make_request("early"))
            with pytest.raises(EngineDeadError, match="starting"):
                _ = supervisor.card
            events = [event async for event in supervisor.watch_startup()]
            assert [events[0].phase, events[-1].phase] == ["starting", "ready"]
            done = [event.bytes_done for event in events if event.phase == "loading_weights"]
            assert len(done) > 3
            assert done == sorted(done)
            assert {e.bytes_total for e in events if e.phase == "loading_weights"} == {10}

    run(main())


def test_a_start_that_can_only_fail_is_not_tried_again():
    async def main():
        async with supervised("--broken", "num_pages = 1 is too few") as supervisor:
            events = [event async for event in supervisor.watch_startup()]
            assert (events[-1].phase, events[-1].message) == ("failed", "num_pages = 1 is too few")
            assert await supervisor.until_stopped() == "num_pages = 1 is too few"
            assert (supervisor.state, supervisor.restarts) == ("stopped", 0)
            with pytest.raises(EngineDeadError, match="too few"):
                await supervisor.until_ready()

    run(main())


@pytest.mark.parametrize("options", [["--crash"], ["--mute", "--slow", "1000"]])
def test_a_start_that_ends_by_a_fault_or_hangs_is_tried_again(options, tmp_path):
    async def main():
        crashes = options == ["--crash"]  # detected without a timeout, so the speed of the machine does not matter
        config = make_config(startup_timeout=BOUND if crashes else 3.0)
        supervisor = Supervisor(config, command(*options, "--once", str(tmp_path / "once")), QUICK)
        await supervisor.start()
        if crashes:
            await asyncio.wait_for(supervisor.until_ready(), BOUND)
            assert supervisor.restarts == 1
        else:
            await until(lambda: supervisor.restarts == 1)
        await supervisor.stop()

    run(main())


def test_a_command_that_is_not_there_is_a_failure():
    async def main():
        supervisor = Supervisor(make_config(), ["/does/not/exist"], QUICK)
        await supervisor.start()
        assert "/does/not/exist" in (await supervisor.until_stopped() or "")

    run(main())


def test_stop_ends_the_core_and_its_streams_and_leaves_no_socket():
    async def main():
        async with ready("--seconds", "0.005") as supervisor:
            folder, process = supervisor._child._folder.path, process_of(supervisor)
            assert (folder.stat().st_mode & 0o777) == 0o700
            reading = asyncio.create_task(collect(supervisor.backend, make_request("a", tokens=1500)))
            await until(lambda: supervisor._link()._streams)
            await supervisor.stop()
            assert supervisor.state == "stopped"
            assert (await reading)[0][4] == (FinishReason.ABORT, None)
            assert process.returncode == 0
            assert not folder.exists()
            assert await supervisor.until_stopped() is None

    run(main())


def test_a_core_ignores_signals_that_are_meant_for_the_server():
    async def main():
        async with ready("--seconds", "0.002") as supervisor:
            for number in (signal.SIGTERM, signal.SIGINT):
                process_of(supervisor).send_signal(number)
            request = make_request("a", tokens=100)
            assert (await collect(supervisor.backend, request))[0][0] == tokens(request)

    run(main())


@pytest.mark.parametrize("options", [[], ["--slow", "1000"]])
def test_a_core_whose_parent_dies_ends(options, tmp_path):
    settings = CoreSettings(socket=str(tmp_path / "core"), model="fake")
    core = subprocess.Popen(command(*options), stdin=subprocess.PIPE)
    assert core.stdin is not None
    core.stdin.write(settings.to_json().encode() + b"\n")
    core.stdin.flush()
    end = time.monotonic() + BOUND
    while not os.path.exists(settings.socket):
        assert time.monotonic() < end
        time.sleep(0.01)
    core.stdin.close()  # as the kernel does for a killed parent
    assert core.wait(BOUND) == 3


def test_settings_that_a_core_does_not_know_end_it():
    core = subprocess.run(command(), input=b'{"modle": 1}\n', capture_output=True, timeout=BOUND, check=False)
    assert core.returncode == 2
    assert b"modle" in core.stderr


# ---- the real core


@pytest.mark.slow
def test_the_demo_model_in_a_process_of_its_own_gives_what_llm_gives():
    from jaxinfer import LLM, EngineConfig

    engine = EngineConfig(max_num_seqs=3, prefill_sizes=(16,), page_size=16, max_model_len=96)
    llm = LLM("demo", config=engine)
    prompts = [[1 + i, 2, 3 + i] * (1 + i % 4) for i in range(6)]
    params = [
        SamplingParams(seed=i, max_tokens=5 + i, n=1 + i % 2, logprobs=2 if i % 3 else None, ignore_eos=True)
        for i in range(6)
    ]
    want = llm.generate(prompts, params)

    async def main():
        config = make_config(model="demo", engine=engine)
        supervisor = Supervisor(config, [sys.executable, "-m", "jaxinfer.serve.core"])
        await supervisor.start()
        events = [event async for event in supervisor.watch_startup()]
        assert events[-1].phase == "ready", events[-1]
        assert {"loading_weights", "compiling", "checking"} & {event.phase for event in events}
        requests = [Request(f"r{i}", tuple(prompts[i]), params[i]) for i in range(6)]
        got = await asyncio.gather(*(collect(supervisor.backend, request) for request in requests))
        assert [[mine[0] for mine in each.values()] for each in got] == [
            [sample.token_ids for sample in output.outputs] for output in want
        ]
        card = supervisor.card
        assert (card.name, card.dtype, card.max_model_len) == ("demo", str(llm.model.dtype), 96)
        assert card.vocab_size == llm.model.config.vocab_size
        assert card.eos_token_ids == list(llm.tokenizer.eos_ids)
        await nothing_is_left(supervisor.backend)
        assert (await supervisor.backend.stats()).compilations == 0
        await supervisor.stop()

    run(main())


def test_a_bad_model_is_one_sentence():
    async def main():
        supervisor = Supervisor(make_config(model="/does/not/exist"))
        await supervisor.start()
        assert "/does/not/exist" in (await supervisor.until_stopped() or "")

    run(main())
