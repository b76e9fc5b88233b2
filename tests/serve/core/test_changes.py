"""Tests of pauses, sleep and new weights of an `AsyncEngine`, over the real engine loop without a device."""

import asyncio
import contextlib

import pytest

from jaxinfer.sampling_params import QueueFullError, RequestError, SamplingParams
from jaxinfer.serve.core.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.types import FinishReason, Request
from tests.serve.core.test_async_engine import until
from tests.serve.fake_engine import FakeEngine, Mischief, expected_tokens
from tests.serve.fake_weights import FakeWeights, digest_of

PROMPT = (5, 6, 7)


def request(name: str, tokens: int = 40) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens=tokens, seed=3, ignore_eos=True))


@contextlib.asynccontextmanager
async def serving(**settings):
    engine = FakeEngine(Mischief(seconds=0.001), **settings)
    weights = FakeWeights(engine)
    async with AsyncEngine(engine, weights=weights) as served:
        yield served, engine, weights


class Client:
    """A request whose deltas are collected: ``tokens``, ``versions`` (one for each token) and ``reason``."""

    def __init__(self, served: AsyncEngine, name: str, tokens: int = 40) -> None:
        self.tokens, self.versions, self.reason = [], [], None
        self.task = asyncio.ensure_future(self._read(served, request(name, tokens)))

    async def _read(self, served, asked):
        async for delta in served.generate(asked):
            self.tokens += delta.token_ids
            for version, count in delta.weight_versions or ((0, len(delta.token_ids)),):
                self.versions += [version] * count
            self.reason = delta.finish_reason

    async def begun(self) -> None:
        await until(lambda: self.tokens)


def complete(client: Client, count: int) -> bool:
    return client.tokens == expected_tokens(PROMPT, 3, 0, count) and client.reason is FinishReason.LENGTH


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_pause_keeps_running_requests_and_queues_new_ones():
    async def main():
        async with serving() as (served, engine, _):
            first = Client(served, "a")
            await first.begun()
            await served.pause("keep")
            await asyncio.sleep(0.02)  # the step in flight ends
            count, steps = len(first.tokens), engine.steps
            second = Client(served, "b")
            await until(lambda: len(served._streams) == 2)
            await asyncio.sleep(0.05)
            assert served.is_paused
            assert served.pulse().busy == 0.0
            assert (len(first.tokens), second.tokens, engine.steps) == (count, [], steps)
            await served.resume()
            await asyncio.gather(first.task, second.task)
            assert complete(first, 40)
            assert complete(second, 40)
            assert not served.is_paused
            engine.check()

    run(main)


def test_a_pause_that_waits_ends_what_has_begun_and_nothing_else():
    async def main():
        async with serving(max_num_seqs=1) as (served, _engine, _):
            first, second = Client(served, "a"), Client(served, "b")
            await first.begun()
            await served.pause("wait")
            await first.task
            assert complete(first, 40)
            assert second.tokens == []
            assert served.is_paused
            await served.resume()
            await second.task
            assert complete(second, 40)

    run(main)


def test_a_pause_that_aborts_ends_every_request():
    async def main():
        async with serving(max_num_seqs=1) as (served, engine, _):
            clients = [Client(served, name, 400) for name in "abc"]
            await clients[0].begun()
            await until(lambda: len(served._streams) == 3)
            await served.pause("abort")
            await asyncio.gather(*(client.task for client in clients))
            assert [client.reason for client in clients] == [FinishReason.ABORT] * 3
            assert served.is_paused
            assert not served._streams
            engine.check()

    run(main)


def test_resume_ends_a_pause_that_still_waits():
    async def main():
        async with serving() as (served, _, _):
            first = Client(served, "a", 400)
            await first.begun()
            pausing = asyncio.ensure_future(served.pause("wait"))
            await asyncio.sleep(0.01)
            await served.resume()
            with pytest.raises(RequestError) as refused:
                await pausing
            assert refused.value.field == "mode"
            assert not served.is_paused
            await first.task
            assert complete(first, 400)

    run(main)


def test_while_paused_clients_may_leave_requests_may_be_aborted_and_the_queue_has_its_limit():
    async def main():
        async with serving(max_waiting_requests=2) as (served, engine, _):
            first = Client(served, "a", 400)
            await first.begun()
            await served.pause("keep")
            leaving, aborted = Client(served, "b"), Client(served, "c")
            await until(lambda: len(served._streams) == 3)
            with pytest.raises(QueueFullError):
                await served.submit(request("d"))
            leaving.task.cancel()
            await served.abort("c")
            await served.abort("a")
            await until(lambda: not served._streams)
            await asyncio.gather(first.task, aborted.task)
            assert first.reason is aborted.reason is FinishReason.ABORT
            assert await served.abort_all() == 0
            await served.resume()
            again = Client(served, "a")
            await again.task
            assert complete(again, 40)
            engine.check()

    run(main)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_paused_engine_can_be_stopped(mode):
    async def main():
        async with serving() as (served, _, _):
            first = Client(served, "a", 400)
            await first.begun()
            pausing = asyncio.ensure_future(served.pause(mode))
            await asyncio.sleep(0.005)
        with contextlib.suppress(RequestError, EngineDeadError):
            await pausing
        await first.task  # by a drain it ends, else it is aborted
        assert first.reason is (FinishReason.LENGTH if mode == "wait" else FinishReason.ABORT)

    run(main)


def test_new_weights_at_once_have_their_version_from_the_next_step_on():
    async def main():
        async with serving() as (served, _, weights):
            first = Client(served, "a", 400)
            await first.begun()
            made = await served.update_weights("new", version=7, mode="keep")
            assert (made.version, served.weight_version, weights.text) == (7, 7, "new")
            assert await served.weight_checksums() == {"text": digest_of("new")}
            await first.task
            assert complete(first, 400)
            assert set(first.versions) == {0, 7}
            assert first.versions == sorted(first.versions)

    run(main)


def test_new_weights_that_wait_change_no_request_that_has_begun():
    async def main():
        async with serving(max_num_seqs=1) as (served, _, _):
            first, second = Client(served, "a"), Client(served, "b")
            await first.begun()
            await served.update_weights("new")
            await asyncio.gather(first.task, second.task)
            assert complete(first, 40)
            assert complete(second, 40)
            assert (set(first.versions), set(second.versions)) == ({0}, {1})
            assert not served.is_paused

    run(main)


def test_new_weights_that_abort_end_every_request():
    async def main():
        async with serving() as (served, _, _):
            first = Client(served, "a", 400)
            await first.begun()
            await served.update_weights("new", mode="abort")
            await first.task
            assert first.reason is FinishReason.ABORT
            assert set(first.versions) == {0}
            assert not served.is_paused

    run(main)


def test_one_change_at_a_time():
    async def main():
        async with serving() as (served, _, weights):
            weights.may_stage.clear()
            first = asyncio.ensure_future(served.update_weights("new"))
            await until(lambda: weights.staging)
            for other in (served.update_weights("other"), served.sleep(), served.wake_up(), served.weight_checksums()):
                with pytest.raises(RequestError) as refused:
                    await other
                assert refused.value.field == "engine"
            asked = Client(served, "a")  # computes meanwhile
            await asked.task
            assert complete(asked, 40)
            assert set(asked.versions) == {0}
            weights.may_stage.set()
            assert (await first).version == 1
            assert (await served.update_weights("other")).version == 2
            assert weights.text == "other"

    run(main)


@pytest.mark.parametrize(("given", "version", "field"), [(5, None, "params"), ("new", 3, "version")])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_what_cannot_be_served_leaves_the_weights_and_the_requests(given, version, field, mode):
    async def main():
        async with serving() as (served, _, weights):
            await served.update_weights("old", version=3)
            first = Client(served, "a", 200)
            await first.begun()
            with pytest.raises(RequestError) as refused:
                await served.update_weights(given, version=version, mode=mode)
            assert refused.value.field == field
            assert weights.text == "old"
            assert served.weight_version == 3
            await first.task
            assert complete(first, 200)
            assert not served.is_paused

    run(main)


def test_a_version_taken_while_an_update_drained_is_refused_and_the_engine_goes_on():
    async def main():
        async with serving() as (served, engine, weights):
            first = Client(served, "a", 100)
            await first.begun()
            updating = asyncio.ensure_future(served.update_weights("new", version=5, mode="wait"))
            await asyncio.sleep(0.01)
            await served._ask(lambda: engine.swap((), 9, restart=False))
            with pytest.raises(RequestError) as refused:
                await updating
            assert refused.value.field == "version"
            await until(lambda: weights.discarded == ["new"])
            assert weights.text == "start"
            assert not served.is_paused
            await first.task
            assert complete(first, 100)

    run(main)


def test_an_operator_who_pauses_during_an_update_keeps_the_pause():
    async def main():
        async with serving() as (served, _, _):
            first = Client(served, "a", 100)
            await first.begun()
            updating = asyncio.ensure_future(served.update_weights("new", mode="wait"))
            await asyncio.sleep(0.01)
            await served.pause("wait")
            await updating
            assert served.is_paused
            assert served.weight_version == 1
            await first.task

    run(main)


def test_an_update_of_a_paused_engine_leaves_the_pause_and_keeps_requests_unless_it_must_wait():
    async def main():
        async with serving() as (served, _, _):
            first = Client(served, "a", 100)
            await first.begun()
            await served.pause("keep")
            with pytest.raises(RequestError) as refused:
                await served.update_weights("new", mode="wait")
            assert refused.value.field == "mode"
            assert served.is_paused
            assert served.weight_version == 0
            await served.update_weights("new")
            assert served.is_paused
            assert served.weight_version == 1
            await served.resume()
            await first.task
            assert complete(first, 100)
            assert set(first.versions) == {0, 1}

    run(main)


def test_an_update_whose_caller_leaves_while_it_waits_lets_the_engine_go_on():
    async def main():
        async with serving() as (served, _, weights):
            first = Client(served, "a", 200)
            await first.begun()
            updating = asyncio.ensure_future(served.update_weights("new", mode="wait"))
            await asyncio.sleep(0.01)
            updating.cancel()
            second = Client(served, "b", 20)
            await asyncio.gather(first.task, second.task)
            assert complete(first, 200)
            assert complete(second, 20)
            await until(lambda: weights.discarded == ["new"])
            assert weights.text == "start"

    run(main)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sleep_keeps_new_requests_until_all_is_awake(mode):
    async def main():
        async with serving(max_num_seqs=1) as (served, _, _):
            first = Client(served, "a", 100)
            await first.begun()
            await served.sleep(1, mode=mode)
            second = Client(served, "b")
            await until(lambda: "b" in served._streams)
            assert served.asleep == ["kv_cache", "weights"]
            assert served.is_paused
            with pytest.raises(RequestError):
                await served.resume()
            with pytest.raises(RequestError):
                await served.update_weights("new")
            await served.wake_up(["weights"])
            await served.update_weights("new")
            assert served.asleep == ["kv_cache"]
            assert second.tokens == []
            await served.wake_up()
            await asyncio.gather(first.task, second.task)
            assert complete(second, 40)
            assert set(second.versions) == {1}
            assert not served.is_paused
            assert first.reason is (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)
            assert (set(first.versions) == {0, 1}) == (mode == "keep")

    run(main)


@pytest.mark.parametrize(("level", "tags", "field"), [(3, None, "level"), (1, ["heads"], "tags")])
def test_a_wrong_sleep_changes_nothing(level, tags, field):
    async def main():
        async with serving() as (served, _, _):
            for mode in ("keep", "wait"):
                with pytest.raises(RequestError) as refused:
                    await served.sleep(level, tags, mode)
                assert refused.value.field == field
                assert not served.is_paused
                assert served.asleep == []

    run(main)


def test_a_version_alone():
    async def main():
        async with serving() as (served, _, weights):
            await served.set_weight_version(12)
            with pytest.raises(RequestError):
                await served.set_weight_version(12)
            assert served.weight_version == 12
            assert weights.text == "start"

    run(main)


def test_an_engine_without_weights_pauses_but_refuses_the_rest():
    async def main():
        async with AsyncEngine(FakeEngine()) as served:
            await served.pause("keep")
            await served.resume()
            for call in (served.update_weights("new"), served.sleep(), served.wake_up()):
                with pytest.raises(RequestError) as refused:
                    await call
                assert refused.value.field == "engine"
            assert served.asleep == []

    run(main)


def test_statistics_have_version_pauses_sleep_and_updates():
    async def main():
        async with serving() as (served, _, _):
            first = (await served.stats()).weights
            assert (first.version, first.paused, list(first.asleep), first.update_time.count) == (0, False, [], 0)
            for text in ("a", "b"):
                await served.update_weights(text)
            await served.pause("keep")
            await served.sleep(1, ["kv_cache"])
            asleep = (await served.stats()).weights
            assert (asleep.version, asleep.paused, list(asleep.asleep)) == (2, True, ["kv_cache"])
            assert asleep.update_time.count == 2
            await served.wake_up()
            with contextlib.suppress(RequestError):
                await served.update_weights("c", version=1)
            await served.resume()
            last = (await served.stats()).weights
            assert (last.paused, list(last.asleep), last.update_time) == (False, [], asleep.update_time)

    run(main)
