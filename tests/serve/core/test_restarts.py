"""Tests of cores whose restart fails for a transient reason: the server stays up, reports it, and serves again."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import pathlib
import resource
import shutil
import signal
import tempfile

import pytest

from jaxinfer.serve.core.supervisor import Supervisor
from tests.serve.core.fake_core import command, make_config
from tests.serve.core.test_core import BOUND, QUICK, collect, make_request, process_of, ready, run, tokens, until

EAGER = dataclasses.replace(QUICK, longest_pause=0.2)
PASSING = [errno.EAGAIN, errno.ENOMEM, errno.EMFILE]


async def serves(supervisor: Supervisor) -> None:
    request = make_request("again")
    assert (await collect(supervisor.backend, request))[0][0] == tokens(request)


@contextlib.asynccontextmanager
async def dead_for_a_while(supervisor: Supervisor):
    """Kill the core; the context in the block keeps the next cores from starting."""
    before = supervisor.restarts
    process_of(supervisor).send_signal(signal.SIGKILL)
    await until(lambda: supervisor.restarts >= before + 3 or supervisor.state == "stopped")
    assert supervisor.state in ("dead", "starting")
    assert supervisor.failure is None
    yield
    await until(lambda: supervisor.state == "ready")
    await serves(supervisor)


@contextlib.contextmanager
def no_process(monkeypatch: pytest.MonkeyPatch, number: int):
    """Make process creation fail."""

    async def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", refuse)
        yield


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_core_that_cannot_be_started_again_for_want_of_something_is_tried_until_it_is_there(monkeypatch, number):
    async def main():
        async with ready(patience=EAGER) as supervisor:
            with contextlib.ExitStack() as stack:
                stack.enter_context(no_process(monkeypatch, number))
                async with dead_for_a_while(supervisor):
                    assert errno.errorcode[number] in supervisor.condition.reason
                    stack.close()

    run(main())


def test_the_folder_for_temporary_files_is_deleted_while_a_model_is_served(monkeypatch):
    place = pathlib.Path(tempfile.mkdtemp(prefix="secret-"))  # short: a socket path has at most 107 bytes
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    async def main():
        async with ready(patience=EAGER) as supervisor:
            shutil.rmtree(place)
            async with dead_for_a_while(supervisor):
                condition = supervisor.condition
                assert "ENOENT" in condition.reason
                assert "secret" not in condition.reason, "everybody may ask for health"
                assert condition.retry_after >= 1
                place.mkdir()

    run(main())
    shutil.rmtree(place)


def test_no_descriptor_is_left_at_some_point_of_a_start():
    """A core restarts after the descriptors run out; gRPC's runtime aborts its process without a free descriptor."""

    async def main():
        async with ready(patience=dataclasses.replace(EAGER, first_pause=0.3)) as supervisor:
            for spare in (0, 3, 5, 7):
                process_of(supervisor).send_signal(signal.SIGKILL)
                await until(lambda: supervisor._child is None)
                before = supervisor.restarts
                with descriptors_left(spare):
                    await until(lambda before=before: supervisor.restarts > before + 1)
                    assert "EMFILE" in supervisor.condition.reason
                await until(lambda: supervisor.state == "ready")
                await serves(supervisor)

    run(main())


@contextlib.contextmanager
def descriptors_left(spare: int):
    """Allow only ``spare`` more open file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 1 + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_the_first_start_is_tried_again_where_the_reason_may_pass(monkeypatch, number):
    """The first start is retried after a transient failure, so that the server keeps its ports open."""

    async def main():
        supervisor = Supervisor(make_config(), command(), EAGER)
        with no_process(monkeypatch, number):
            await supervisor.start()
            await until(lambda: supervisor.restarts >= 2 or supervisor.state == "stopped")
            assert supervisor.failure is None
        await asyncio.wait_for(supervisor.until_ready(), BOUND)
        await serves(supervisor)
        await supervisor.stop()

    run(main())


def test_before_the_first_ready_any_other_reason_is_final(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))

    async def main():
        supervisor = Supervisor(make_config(), command(), EAGER)
        await supervisor.start()
        assert "cannot be started" in str(await asyncio.wait_for(supervisor.until_stopped(), BOUND))
        assert supervisor.restarts == 0

    run(main())
