"""Tests of `AsyncEngine` over an engine with known tokens and steps that the test controls."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import QueueFullError, RequestError, SamplingParams
from jaxinfer.serve.core.async_engine import AsyncEngine, EngineDeadError, _StepTimes
from jaxinfer.types import FinishReason, Request, SequenceDelta
from tests.engine.gated_engine import QUEUE, FakeEngine, Sample, expected, make_request
from tests.fakes import random_model
from tests.serve import fake_engine as paced
from tests.yardstick import slowness


async def collect(served: AsyncEngine, request: Request, deltas: int | None = None) -> dict[int, list[int]]:
    """Return the tokens of each sample; of the first ``deltas`` deltas only, if given."""
    tokens: dict[int, list[int]] = {index: [] for index in range(request.params.n)}
    stream = served.generate(request)
    async for delta in stream:
        tokens[delta.index] += delta.token_ids
        if deltas is not None:
            deltas -= 1
            if deltas == 0:
                break
    await stream.aclose()
    return tokens


def whole(request: Request) -> dict[int, list[int]]:
    return {index: expected(request, index) for index in range(request.params.n)}


async def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.001)


def nothing_is_left(served: AsyncEngine, fake: FakeEngine) -> bool:
    return not served._streams and not fake.has_work and served._inbox.empty()


# ---- results of clients


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_gets_every_token_of_every_sample(n):
    async def main():
        fake, request = FakeEngine(), make_request("a", n=n)
        async with AsyncEngine(fake) as served:
            assert await collect(served, request) == whole(request)
            assert nothing_is_left(served, fake)

    asyncio.run(main())


def test_a_submitted_stream_knows_its_resolved_request():
    async def main():
        async with AsyncEngine(FakeEngine()) as served, await served.submit(make_request("a")) as stream:
            assert stream.request.params.seed == 7
            assert [token async for delta in stream for token in delta.token_ids] == expected(stream.request, 0)

    asyncio.run(main())


def test_a_thousand_clients():
    async def main():
        fake = FakeEngine()
        requests = [make_request(f"r{i}", prompt=1 + i % 9, tokens=1 + i % 5) for i in range(1000)]
        async with AsyncEngine(fake) as served:
            got = await asyncio.gather(*(collect(served, request) for request in requests))
            assert got == [whole(request) for request in requests]
            assert nothing_is_left(served, fake)

    asyncio.run(main())


def test_two_event_loops_in_two_threads_interleave():
    fake = FakeEngine(gated=True)
    served = AsyncEngine(fake)
    served.start()
    requests = [[make_request(f"{loop}-{i}", tokens=6) for i in range(20)] for loop in "ab"]
    got: dict[int, list] = {}

    def client(number: int) -> None:
        async def main():
            got[number] = await asyncio.gather(*(collect(served, request) for request in requests[number]))

        asyncio.run(main())

    threads = [threading.Thread(target=client, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    fake.open_gate()
    for thread in threads:
        thread.join(10)
    assert got == {number: [whole(request) for request in requests[number]] for number in (0, 1)}
    asyncio.run(served.stop())


def test_what_a_slow_client_has_not_fetched_is_one_delta():
    async def main():
        fake, request = FakeEngine(gated=True), make_request("a", prompt=1, tokens=40, n=2)
        async with AsyncEngine(fake) as served, await served.submit(request) as stream:
            fake.allow(31)  # the first step only assigns the slots
            await until(lambda: fake.steps == 31)
            fake.open_gate()
            await until(lambda: not fake.has_work)
            await asyncio.sleep(0.01)
            deltas = [delta async for delta in stream]
        assert sorted((d.index, d.token_ids, d.finish_reason) for d in deltas) == [
            (index, expected(request, index), FinishReason.LENGTH) for index in (0, 1)
        ]

    asyncio.run(main())


def test_a_slow_client_does_not_hold_up_another():
    async def main():
        fake, slow, quick = FakeEngine(), make_request("slow", tokens=50), make_request("quick", tokens=50)
        async with AsyncEngine(fake) as served, await served.submit(slow) as stream:
            assert await collect(served, quick) == whole(quick)
            assert [token async for delta in stream for token in delta.token_ids] == expected(slow, 0)

    asyncio.run(main())


# ---- rejections


def test_a_refused_request_is_an_error_at_once_and_disturbs_nobody():
    async def main():
        fake, request = FakeEngine(gated=True), make_request("a")
        async with AsyncEngine(fake) as served:
            first = asyncio.create_task(collect(served, request))
            await until(lambda: served._streams)
            twin = asyncio.create_task(served.submit(request))
            await asyncio.sleep(0.01)
            fake.open_gate()
            with pytest.raises(RequestError, match="in use"):
                await twin
            assert await first == whole(request)
            assert await collect(served, request) == whole(request)  # the id is free again

    asyncio.run(main())


def test_a_full_queue_is_told_to_the_client_while_a_step_runs():
    async def main():
        fake = FakeEngine(gated=True)
        fake.waiting = [Sample(make_request(f"w{i}"), 0, 2) for i in range(QUEUE - 1)]
        served = AsyncEngine(fake)
        served.start()
        last = asyncio.create_task(served.submit(make_request("a")))  # in the inbox: no step has ended yet
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="too many wait"):
            await asyncio.wait_for(served.submit(make_request("b")), 2)
        assert fake.steps == 0
        fake.open_gate()
        assert (await last).request.request_id == "a"
        await (await served.submit(make_request("c"))).aclose()  # the rejected request is no longer counted
        await served.stop(drain=False)

    asyncio.run(main())


def test_who_gives_up_before_being_added_leaves_the_place():
    async def main():
        fake = FakeEngine(gated=True)
        fake.running = [Sample(make_request("r"), 0, 2)]
        fake.waiting = [Sample(make_request(f"w{i}"), 0, 2) for i in range(QUEUE - 1)]
        served = AsyncEngine(fake)
        served.start()
        await asyncio.sleep(0.05)  # before a call the thread sleeps or is within a step
        first = asyncio.create_task(served.submit(make_request("a")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(served.submit(make_request("b")))
        await asyncio.sleep(0)
        assert not second.done()
        fake.open_gate()
        assert (await asyncio.wait_for(second, 5)).request.request_id == "b"
        await served.stop(drain=False)

    asyncio.run(main())


# ---- aborts


@pytest.mark.parametrize("stage", ["queued", "prefilling", "decoding", "ended"])
@pytest.mark.parametrize("how", ["abort", "cancel", "aclose"])
def test_an_abort_at_any_stage_frees_everything_within_two_steps(stage, how):
    steps = {"queued": 0, "prefilling": 3, "decoding": 12, "ended": 10**4}[stage]

    async def main():
        fake, request = FakeEngine(gated=True), make_request("a", prompt=20, tokens=30, n=2)
        async with AsyncEngine(fake) as served:
            stream = await served.submit(request)
            fake.allow(steps)
            await until(lambda: fake.steps == steps or not fake.has_work)
            before = fake.steps
            reasons: list = []

            async def read():
                async for delta in stream:
                    reasons.append(delta.finish_reason)

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.01)
            if how == "abort":
                ending = asyncio.create_task(served.abort("a"))
            elif how == "cancel":
                reader.cancel()
                ending = asyncio.create_task(stream.aclose())
            else:
                ending = asyncio.create_task(stream.aclose())
            await asyncio.sleep(0.01)
            fake.allow(2)  # it may be in a step that was allowed before the abort
            await until(lambda: nothing_is_left(served, fake))
            assert fake.steps <= before + 2
            await ending
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            if how == "abort":
                ends = [reason for reason in reasons if reason is not None]
                assert ends == [FinishReason.LENGTH if stage == "ended" else FinishReason.ABORT] * 2
            fake.open_gate()

    asyncio.run(main())


def test_one_sample_can_be_aborted():
    async def main():
        fake, request = FakeEngine(gated=True), make_request("a", prompt=1, tokens=9, n=2)
        async with AsyncEngine(fake) as served, await served.submit(request) as stream:
            fake.allow(3)
            ending = asyncio.create_task(served.abort("a", 0))
            await asyncio.sleep(0.01)
            fake.open_gate()
            await ending
            tokens: dict[int, list[int]] = {0: [], 1: []}
            reasons = {}
            async for delta in stream:
                tokens[delta.index] += delta.token_ids
                reasons[delta.index] = delta.finish_reason
        assert reasons == {0: FinishReason.ABORT, 1: FinishReason.LENGTH}
        assert tokens[1] == expected(request, 1)
        assert tokens[0] == expected(request, 0)[: len(tokens[0])]
        assert len(tokens[0]) < 9

    asyncio.run(main())


def test_an_unknown_id_is_no_error():
    async def main():
        async with AsyncEngine(FakeEngine()) as served:
            await served.abort("nobody")

    asyncio.run(main())


def test_a_client_cancelled_before_its_request_was_taken_leaves_nothing():
    async def main():
        fake = FakeEngine(gated=True)
        async with AsyncEngine(fake) as served:
            first = asyncio.create_task(collect(served, make_request("first")))
            await until(lambda: served._streams)  # now the thread is blocked in a step
            late = asyncio.create_task(collect(served, make_request("late")))
            await asyncio.sleep(0.01)
            late.cancel()
            await asyncio.sleep(0.01)
            fake.open_gate()
            await first
            await until(lambda: nothing_is_left(served, fake))

    asyncio.run(main())


def test_a_client_cancelled_after_its_request_was_taken_and_before_it_heard_so_leaves_nothing():
    async def main():
        fake = FakeEngine()
        async with AsyncEngine(fake) as served:
            task = asyncio.create_task(served.submit(make_request("a", tokens=10**6)))
            await asyncio.sleep(0)
            time.sleep(0.05)  # blocks the event loop but not the engine's thread
            assert served._streams
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: nothing_is_left(served, fake))

    asyncio.run(main())


def test_a_break_out_of_the_loop_aborts():
    async def main():
        fake = FakeEngine()
        async with AsyncEngine(fake) as served:
            async for _ in served.generate(make_request("a", tokens=10**6)):
                break  # the loop closes the generator when it is unreferenced
            await until(lambda: nothing_is_left(served, fake))

    asyncio.run(main())


def test_a_client_whose_loop_was_closed_is_forgotten():
    fake = FakeEngine(gated=True)
    served = AsyncEngine(fake)
    served.start()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(served.submit(make_request("a", tokens=10**6)))
    loop.close()
    fake.open_gate()
    asyncio.run(until(lambda: nothing_is_left(served, fake)))
    asyncio.run(served.stop())


def test_streams_are_not_kept():
    async def main():
        async with AsyncEngine(FakeEngine()) as served:
            stream = await served.submit(make_request("a"))
            seen = weakref.ref(stream)
            async with stream:
                async for _ in stream:
                    pass
            del stream
            await served.check()
            await asyncio.sleep(0)
            gc.collect()
            assert seen() is None

    asyncio.run(main())


# ---- faults


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_a_step_reaches_every_client_and_every_later_call():
    async def main():
        fake = FakeEngine(gated=True)
        served = AsyncEngine(fake)
        served.start()
        tasks = [asyncio.create_task(collect(served, make_request(f"r{i}"))) for i in range(20)]
        await until(lambda: served._streams)
        fake.fault = ZeroDivisionError("in the step")
        fake.open_gate()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "in the step" in str(result)
            assert isinstance(result.__cause__, ZeroDivisionError)
        for call in (collect(served, make_request("late")), served.stats(), served.abort("r0"), served.check()):
            with pytest.raises(EngineDeadError) as raised:
                await call
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineDeadError):
            served.stats_now(1.0)
        await served.stop()
        assert not served._streams
        assert served._inbox.empty()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tokens_that_came_before_the_fault_are_not_lost():
    async def main():
        fake, request = FakeEngine(gated=True), make_request("a", prompt=1, tokens=9)
        served = AsyncEngine(fake)
        served.start()
        stream = await served.submit(request)
        fake.allow(4)
        await until(lambda: fake.steps == 4)
        fake.fault = ZeroDivisionError()
        fake.open_gate()
        await served.stop()
        assert (await anext(stream)).token_ids == expected(request, 0)[:3]
        with pytest.raises(EngineDeadError):
            await anext(stream)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_a_call_reaches_its_caller_too():
    async def main():
        fake = FakeEngine()
        served = AsyncEngine(fake)
        served.start()
        with pytest.raises(EngineDeadError) as raised:
            await served.stats()
        assert isinstance(raised.value.__cause__, NotImplementedError)
        await served.stop()

    asyncio.run(main())


# ---- lifecycle


def test_before_the_start_and_after_the_stop_calls_are_refused():
    async def main():
        served = AsyncEngine(FakeEngine())
        with pytest.raises(EngineDeadError, match="not started"):
            await served.submit(make_request("a"))
        await served.stop()  # nothing to do
        served.start()
        with pytest.raises(EngineDeadError, match="started before"):
            served.start()
        assert await served.reset_prefix_cache() == 3
        await served.stop()
        await served.stop()
        with pytest.raises(EngineDeadError, match="was stopped"):
            await collect(served, make_request("a"))

    asyncio.run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_stop_drains_or_aborts_and_refuses_new_requests(drain):
    async def main():
        fake, requests = FakeEngine(gated=True), [make_request(f"r{i}", tokens=20) for i in range(12)]
        served = AsyncEngine(fake)
        served.start()
        fake.allow(8)
        tasks = [asyncio.create_task(collect(served, request)) for request in requests]
        await until(lambda: fake.steps == 8)
        stopping = asyncio.create_task(served.stop(drain=drain))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(served.submit(make_request("late")))
        await asyncio.sleep(0.01)
        fake.open_gate()
        with pytest.raises(EngineDeadError, match="stopp"):
            await late
        got = await asyncio.gather(*tasks)
        await stopping
        if drain:
            assert got == [whole(request) for request in requests]
        else:
            assert all(0 <= len(tokens[0]) < 20 for tokens in got)
            assert fake.steps <= 10
        assert nothing_is_left(served, fake)

    asyncio.run(main())


def test_an_idle_engine_sleeps_and_wakes_at_once():
    async def main():
        fake = FakeEngine()
        async with AsyncEngine(fake) as served:
            await collect(served, make_request("a"))
            steps, cpu = fake.steps, time.process_time()
            await asyncio.sleep(0.3)
            assert fake.steps == steps
            assert time.process_time() - cpu < 0.1 * slowness()
            async with asyncio.timeout(60):
                await collect(served, make_request("b"))

    asyncio.run(main())


# ---- properties

deltas_of_one_sample = st.lists(
    st.tuples(st.lists(st.integers(0, 99), max_size=4), st.booleans()), min_size=1, max_size=8
)


@given(deltas_of_one_sample)
def test_merged_deltas_lose_nothing(parts):
    deltas = [SequenceDelta("a", 0, list(tokens), []) for tokens, _ in parts]
    deltas[-1].finish_reason, deltas[-1].stop_reason = FinishReason.STOP, 5
    deltas[0].prompt_logprobs = [None]
    for delta in deltas:
        delta.draft_tokens, delta.draft_accepted = 3, 2
    merged, *rest = deltas
    for delta in rest:
        merged = merged.extended(delta)
    assert merged.token_ids == [token for tokens, _ in parts for token in tokens]
    assert (merged.finish_reason, merged.stop_reason) == (FinishReason.STOP, 5)
    assert merged.prompt_logprobs == [None]
    assert (merged.draft_tokens, merged.draft_accepted) == (3 * len(parts), 2 * len(parts))


clients = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt tokens
        st.integers(1, 8),  # output tokens
        st.integers(1, 3),  # samples
        st.sampled_from(["read", "leave", "cancel", "abort"]),
        st.integers(1, 10),  # deltas read before it leaves
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(clients)
def test_whoever_leaves_whenever_others_get_their_tokens_and_nothing_is_left(plans):
    async def client(served: AsyncEngine, name: str, plan) -> None:
        prompt, tokens, n, how, after = plan
        request = make_request(name, prompt, tokens, n)
        if how == "cancel":
            task = asyncio.create_task(collect(served, request))
            for _ in range(after):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return
        if how == "abort":
            task = asyncio.create_task(collect(served, request))
            await asyncio.sleep(after * 1e-4)
            await served.abort(name)
            got = await task
        else:
            got = await collect(served, request, deltas=None if how == "read" else after)
        for index, mine in got.items():
            assert mine == expected(request, index)[: len(mine)]
        assert how != "read" or got == whole(request)

    async def main() -> None:
        fake = FakeEngine()
        async with AsyncEngine(fake) as served:
            await asyncio.gather(*(client(served, f"r{i}", plan) for i, plan in enumerate(plans)))
            await served.check()
            assert nothing_is_left(served, fake)

    asyncio.run(main())


# ---- with a model


def test_a_model_serves_clients_as_llm_does():
    llm = LLM(random_model(num_hidden_layers=1), max_num_seqs=3, prefill_sizes=(16,), page_size=16, max_model_len=96)
    prompts = [[1 + i, 2, 3 + i] * (1 + 2 * (i % 4)) for i in range(12)]
    params = [SamplingParams(seed=i, max_tokens=4 + i, n=1 + i % 2, logprobs=2 if i % 3 else None) for i in range(12)]
    want = llm.generate(prompts, params)

    async def main():
        requests = [Request(f"r{i}", tuple(prompts[i]), params[i]) for i in range(12)]
        async with AsyncEngine(llm.engine) as served:
            leaver = asyncio.create_task(
                collect(served, Request("leaver", (5,) * 40, SamplingParams(max_tokens=50)), 3)
            )
            got = await asyncio.gather(*(collect(served, request) for request in requests))
            await leaver
            await served.check()
            stats = await served.stats()
            assert await served.reset_prefix_cache() > 0
            return got, stats

    got, stats = asyncio.run(main())
    assert got == [{sample.index: sample.token_ids for sample in output.outputs} for output in want]
    assert (stats.running, sum(stats.waiting.values()), stats.kv.held) == (0, 0, 0)
    assert not llm.engine.has_work


# ---- how long steps take


def test_the_99th_percentile_of_steps_is_theirs_within_a_tenth():
    times = _StepTimes()
    assert times.p99() == 0.0
    times.add(2.0)
    assert 2.0 <= times.p99() <= 2.2
    for _ in range(98):
        times.add(0.02)
    assert 2.0 <= times.p99() <= 2.2, "one of 99 is within the last hundredth"
    times.add(0.02)
    assert 0.02 <= times.p99() <= 0.022
    for _ in range(10):
        times.add(1e6)
    assert times.p99() > 800, "beyond all bounds"


def test_a_pulse_tells_what_steps_take():
    async def story():
        async with AsyncEngine(paced.FakeEngine(paced.Mischief(seconds=0.05))) as engine:
            assert engine.pulse().p99 == 0.0
            _ = [delta async for delta in engine.generate(Request("a", (5, 6), SamplingParams(seed=1, max_tokens=5)))]
            assert engine.pulse().p99 >= 0.05

    asyncio.run(story())
