"""Tests of pauses and new weights over the link to a core with the fake engine in a second process."""

import asyncio
import contextlib
import shutil
import signal

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.core.operations import AbortAll, Look, Pause, Resume, SetVersion, Sleep, UpdateWeights, WakeUp
from jaxinfer.serve.core.supervisor import Supervisor
from jaxinfer.serve.frontend.operations import Operations
from jaxinfer.types import FinishReason
from tests.serve.core.fake_core import command, make_config
from tests.serve.core.test_core import (
    BOUND,
    QUICK,
    collect,
    make_request,
    nothing_is_left,
    process_of,
    ready,
    run,
    tokens,
    until,
)
from tests.serve.fake_weights import digest_of, write_fake_weights


@pytest.fixture
def root(tmp_path):
    for name in ("a", "b"):
        write_fake_weights(tmp_path / "root" / name, name)
    return tmp_path / "root"


@contextlib.asynccontextmanager
async def operated(root, *options, **changes):
    """Yield a supervisor whose cores get the last weights, and its operations."""

    async def prepare(link, card, get_on):
        await operations.restore(link)

    supervisor = Supervisor(make_config(**changes), command(*options), QUICK, prepare)
    operations = Operations(supervisor, root)
    await supervisor.start()
    try:
        await asyncio.wait_for(supervisor.until_ready(), BOUND)
        yield supervisor, operations
    finally:
        await supervisor.stop()


def test_a_paused_core_is_not_taken_for_one_that_hangs():
    async def main():
        async with ready("--slots", "1", step_timeout=0.5) as supervisor:
            assert (await supervisor.operate(Pause("keep"))).paused
            requests = [make_request(f"r{number}") for number in range(4)]
            asked = [asyncio.ensure_future(collect(supervisor.backend, request)) for request in requests]
            await asyncio.sleep(2.0)
            assert (supervisor.state, supervisor.restarts) == ("ready", 0)
            assert sum((await supervisor.backend.stats()).waiting.values()) == 4
            asked[3].cancel()  # its client leaves
            await supervisor.backend.abort("r2")
            assert (await asked[2])[0][4][0] is FinishReason.ABORT
            assert not (await supervisor.operate(Resume())).paused
            found = await asyncio.gather(*asked[:2])
            assert [each[0][0] for each in found] == [tokens(request) for request in requests[:2]]
            await nothing_is_left(supervisor.backend)

    run(main())


def test_a_paused_core_takes_no_more_than_its_queue_and_stops_at_once():
    async def main():
        async with ready(engine=EngineConfig(max_waiting_requests=2)) as supervisor:
            await supervisor.operate(Pause("keep"))
            streams = [await supervisor.backend.submit(make_request(f"r{number}")) for number in range(2)]
            with pytest.raises(QueueFullError):
                await supervisor.backend.submit(make_request("r2"))
        for stream in streams:
            assert [delta.finish_reason async for delta in stream] == [FinishReason.ABORT]

    run(main())


def test_new_weights_reach_the_tokens_of_a_stream(root):
    async def main():
        async with operated(root, "--seconds", "0.002") as (supervisor, operations):
            request, versions, state = make_request("r", tokens=600), [], None
            async with await supervisor.backend.submit(request) as stream:
                async for delta in stream:
                    ranges = delta.weight_versions or ((0, len(delta.token_ids)),)
                    versions += [version for version, count in ranges for _ in range(count)]
                    if len(versions) > 20 and state is None:
                        state = await operations.run(UpdateWeights("a", mode="keep"))
            assert (state.version, state.bytes) == (1, 1)
            assert len(versions) == 600
            assert set(versions) == {0, 1}
            assert versions == sorted(versions)

    run(main())


def test_states_and_refusals_arrive(root):
    async def main():
        async with operated(root) as (supervisor, operations):
            assert (await operations.run(Look(checksums=True))).checksums == {"text": digest_of("start")}
            assert list((await operations.run(Sleep(tags=("weights",)))).asleep) == ["weights"]
            for operation, field in ((Resume(), "engine"), (UpdateWeights("a"), "params")):
                with pytest.raises(RequestError) as refused:
                    await supervisor.operate(operation)
                assert refused.value.field == field
            assert list((await operations.run(WakeUp())).asleep) == []
            assert (await operations.run(SetVersion(8))).version == 8
            (root / "a" / "model.safetensors").write_text("no weights")
            with pytest.raises(RequestError) as refused:
                await supervisor.operate(UpdateWeights(str(root / "a")))
            assert refused.value.field == "path"
            assert (await operations.run(AbortAll())).aborted == 0

    run(main())


def test_the_next_core_serves_the_last_weights_and_none_is_ready_before(root):
    async def main():
        async with operated(root) as (supervisor, operations):
            await operations.run(UpdateWeights("b", version=5))
            process_of(supervisor).send_signal(signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1 and supervisor.state == "ready")
            state = await operations.run(Look(checksums=True))
            assert (state.version, state.checksums) == (5, {"text": digest_of("b")})
            shutil.move(root / "b", root / "gone")
            process_of(supervisor).send_signal(signal.SIGKILL)
            await until(lambda: supervisor.restarts >= 3)
            assert supervisor.state in ("dead", "starting")
            shutil.move(root / "gone", root / "b")
            await until(lambda: supervisor.state == "ready")
            assert (await operations.run(Look())).version == 5

    run(main())
