"""Tests of chat templates in helper processes: the same text as in this process, and bad templates end in time."""

import asyncio
import errno
import os
import pathlib
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from jaxinfer import helper_process
from jaxinfer.helper_process import READY, read_frame, write_frame
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.errors import RETRY_SECONDS, Kind, ServeError
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.workers import pool
from jaxinfer.serve.workers.codec import decode, encode
from jaxinfer.serve.workers.tasks import TASKS, Renderer
from jaxinfer.text.chat_template import ChatTemplate
from tests.serve.core.fake_core import REPO
from tests.serve.fake_engine import TEMPLATE, fake_template
from tests.serve.processes import is_alive, wait_until

HELLO = [{"role": "user", "content": 'Grüße 狐 \ud800\x00 "x"'}]
LOOP = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
BAD = {
    "loop": LOOP,
    "padding": "{{ 'x'.ljust(10**11) }}",
    "doubling": "{% set x = namespace(v='xxxxxxxx') %}{% for i in range(99) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
    "format": "{{ '%99999999999s' | format(1) }}",
    "compile": "{{ " + "(" * 10**4 + "1" + ")" * 10**4 + " }}",
}


async def rendered(renderer: Renderer, *conversations: Conversation) -> list[object]:
    try:
        return await asyncio.gather(*map(renderer.render, conversations), return_exceptions=True)
    finally:
        renderer.close()


def test_a_helper_writes_what_the_template_writes():
    source = TEMPLATE + "{{ bos_token }}{{ tools | tojson }}{{ mood }}{{ size + 1 }}"
    template = ChatTemplate({"default": source, "tool_use": source + "!"}, {"bos_token": "<s>"})
    tools, variables = [{"name": "f", "x": [1, 2.5, None, True]}], {"mood": "ß", "size": 2**70}
    for given in (None, tools):
        want = template.render(HELLO, False, given, extra=variables)
        got = asyncio.run(rendered(Renderer(template, 9.0), Conversation(HELLO, given, False, variables)))
        assert got == [want]


def test_a_request_may_bring_its_own():
    conversation = Conversation(HELLO, template="{{ messages[0].role }}!")
    assert asyncio.run(rendered(Renderer(fake_template(), 9.0), conversation)) == ["user!"]
    assert asyncio.run(rendered(Renderer(None, 9.0), conversation)) == ["user!"]


@pytest.mark.parametrize("kind", BAD)
def test_bad_templates_end_in_time_and_keep_nobody_waiting(kind):
    async def run() -> None:
        renderer = Renderer(fake_template(), 0.5)
        await renderer.warm()
        bad = asyncio.ensure_future(renderer.render(Conversation(HELLO, template=BAD[kind])))
        good = await renderer.render(Conversation(HELLO))
        assert good == fake_template().render(HELLO)
        with pytest.raises(RequestError, match="messages: the chat template"):
            await asyncio.wait_for(bad, 30)  # includes a helper's start on a busy machine; the next test is exact
        begun = time.monotonic()
        assert await rendered(renderer, Conversation(HELLO, template="next")) == ["next"]
        assert time.monotonic() - begun < 30

    asyncio.run(run())


def test_a_loop_is_stopped_when_its_time_is_over():
    async def run() -> None:
        renderer = Renderer(ChatTemplate("{% if messages[0].role == 'x' %}" + LOOP + "{% endif %}ok"), 0.5)
        await renderer.warm()
        begun = time.monotonic()
        answers = await rendered(renderer, Conversation([{"role": "x"}]), Conversation(HELLO))
        assert 0.5 <= time.monotonic() - begun < 30
        assert "ran for 0.5 s" in str(answers[0])
        assert answers[1] == "ok"

    asyncio.run(run())


def test_a_template_is_stopped_though_its_client_has_left():
    async def run() -> None:
        renderer = Renderer(None, 0.5)
        loop = Conversation(HELLO, template=LOOP)
        task = asyncio.ensure_future(renderer.render(loop))
        while not renderer._requests.busy:
            await asyncio.sleep(0.001)
        await asyncio.wait([task], timeout=0.3)
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(20):
            assert await rendered(renderer, Conversation(HELLO, template="next")) == ["next"]

    asyncio.run(run())


def test_the_memory_of_a_helper_is_bounded():
    [answer] = asyncio.run(rendered(Renderer(ChatTemplate("{{ 'x'.ljust(3 * 10**9) }}"), 9.0), Conversation(HELLO)))
    assert "MemoryError" in str(answer)


def test_too_many_may_not_wait(monkeypatch):
    monkeypatch.setitem(TASKS, "render", msgspec.structs.replace(TASKS["render"], waiting=2))
    answers = asyncio.run(rendered(Renderer(fake_template(), 9.0), *[Conversation(HELLO)] * 20))
    assert sum(isinstance(answer, QueueFullError) for answer in answers) >= 10
    assert answers.count(fake_template().render(HELLO)) >= 2


def test_who_leaves_the_queue_makes_room_in_it(monkeypatch):
    monkeypatch.setitem(TASKS, "render_own", msgspec.structs.replace(TASKS["render_own"], waiting=2))

    async def run() -> None:
        renderer = Renderer(None, 0.5)
        slow = asyncio.ensure_future(renderer.render(Conversation(HELLO, template=LOOP)))
        while not renderer._requests.busy:
            await asyncio.sleep(0.001)
        for _ in range(3):
            waiting = [asyncio.ensure_future(renderer.render(Conversation(HELLO, template="x"))) for _ in range(2)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            with pytest.raises(QueueFullError):
                await renderer.render(Conversation(HELLO, template="x"))
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        with pytest.raises(RequestError):
            await slow
        assert await rendered(renderer, Conversation(HELLO, template="next")) == ["next"]

    asyncio.run(run())


def test_a_helper_that_answers_in_time_lives_on():
    async def run() -> None:
        renderer = Renderer(None, 0.2)
        for text in ("one", "two"):
            assert await renderer.render(Conversation(HELLO, template=text)) == text
            await asyncio.sleep(0.3)  # longer than the limit of that conversation
            helper = renderer._requests._helpers[-1]
            assert helper._process is not None
            assert helper._process.poll() is None
        renderer.close()

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_helper_that_the_system_ends_is_no_fault_of_the_request(number: signal.Signals):
    async def run() -> None:
        renderer = Renderer(None, 1000.0)
        task = asyncio.ensure_future(renderer.render(Conversation(HELLO, template=LOOP)))
        helper = renderer._requests._helpers[-1]
        while helper._process is None or cpu_seconds(helper._process.pid) < 1.0:  # until it is in the loop
            await asyncio.sleep(0.01)
        os.kill(helper._process.pid, number)
        with pytest.raises(ServeError, match="killed by the system") as refused:
            await task
        assert (refused.value.kind, refused.value.retry_after) == (Kind.UNAVAILABLE, RETRY_SECONDS)
        assert await rendered(renderer, Conversation(HELLO, template="next")) == ["next"]

    asyncio.run(run())


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_helper_that_cannot_start_is_tried_again_and_no_fault_of_the_request(failures: int, monkeypatch):
    monkeypatch.setattr(pool, "_START_PAUSES", (0.0, 0.01, 0.01))
    left = iter(range(failures))
    popen = subprocess.Popen

    def no_descriptors(*arguments, **settings):
        if next(left, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return popen(*arguments, **settings)

    monkeypatch.setattr(helper_process.subprocess, "Popen", no_descriptors)

    async def run() -> str:
        return await Renderer(None, 10.0).render(Conversation(HELLO, template="fine"))

    if failures < 3:
        assert asyncio.run(run()) == "fine"
        return
    with pytest.raises(ServeError, match=r"cannot be started: .*Too many open files") as refused:
        asyncio.run(run())
    assert (refused.value.kind, refused.value.retry_after) == (Kind.UNAVAILABLE, RETRY_SECONDS)


def test_a_server_starts_without_the_helpers_that_it_would_warm(monkeypatch):
    monkeypatch.setattr(pool, "_START_PAUSES", (0.0,))
    monkeypatch.setattr(
        helper_process.subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError("no memory"))
    )
    asyncio.run(Renderer(fake_template(), 10.0).warm())


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [object(), b"x", nested(10**5)])
def test_what_is_no_json_is_refused(value):
    [answer] = asyncio.run(rendered(Renderer(fake_template(), 9.0), Conversation([{"role": "u", "content": value}])))
    assert isinstance(answer, RequestError)


def test_refusals_of_templates_are_told():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    [answer] = asyncio.run(rendered(Renderer(template, 9.0), Conversation(HELLO)))
    assert str(answer) == "messages: the chat template refuses the messages: roles must alternate"


def test_helpers_have_no_part_in_the_servers_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert "SECRET" not in helper_process._environment()


def test_helpers_end_with_the_renderer():
    async def run() -> list[int]:
        renderer = Renderer(fake_template(), 9.0)
        await renderer.warm()
        processes = [helper._process for helper in renderer._default._helpers if helper._process is not None]
        renderer.close()
        return [process.wait(10) for process in processes]

    assert asyncio.run(run()) == [-9, -9]


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="reads /proc")
def test_helpers_that_were_killed_leave_no_zombies():
    async def run() -> None:
        renderer = Renderer(fake_template(), 0.2)
        for _ in range(2):
            with pytest.raises(RequestError):
                await renderer.render(Conversation(HELLO, template=LOOP))
        renderer.close()

    before = children()
    asyncio.run(run())
    assert len(children() - before) <= 1  # the last child may not have been reaped yet


def children() -> set[str]:
    return set(pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


# ---- tenants


SLOW = "{% if messages[0].role == 'slow' %}" + LOOP + "{% endif %}ok"
"""Template of a checkpoint that a client can make loop."""


@pytest.mark.parametrize("own", [True, False])
def test_a_tenants_slow_templates_keep_no_other_waiting(own):
    """Slow templates of one tenant do not delay another tenant; with one shared helper they did."""

    async def run() -> None:
        renderer = Renderer(ChatTemplate(SLOW), 2.0)
        source = None if own else SLOW
        slow, quick = (Conversation([{"role": role}], template=source) for role in ("slow", "user"))
        flood = [asyncio.ensure_future(renderer.render(slow, "greedy")) for _ in range(40)]
        await asyncio.sleep(0)
        for _ in range(5):
            assert await asyncio.wait_for(renderer.render(quick, "light"), 30) == "ok"
        assert sum(task.done() for task in flood) < 30, "it waited for them"
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)
        renderer.close()

    asyncio.run(run())


def test_one_tenants_queue_does_not_fill_that_of_others(monkeypatch):
    monkeypatch.setitem(TASKS, "render_own", msgspec.structs.replace(TASKS["render_own"], waiting=8))

    async def run() -> None:
        renderer = Renderer(None, 1.0)
        loop, quick = (Conversation(HELLO, template=source) for source in (LOOP, "ok"))
        flood = [asyncio.ensure_future(renderer.render(loop, "greedy")) for _ in range(20)]
        await asyncio.sleep(0)
        answers = await asyncio.gather(*(renderer.render(quick, "light") for _ in range(4)))
        assert answers == ["ok"] * 4
        refused = await asyncio.gather(*flood, return_exceptions=True)
        assert sum(isinstance(each, QueueFullError) for each in refused) >= 11
        renderer.close()

    asyncio.run(run())


# ---- limits of a helper


PARENT = """
import asyncio, sys
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.workers.tasks import Renderer

async def main():
    renderer = Renderer(None, 1000.0)
    task = asyncio.ensure_future(renderer.render(Conversation([{"role": "user"}], template=sys.argv[1])))
    helper = renderer._requests._helpers[-1]
    while helper._process is None or not renderer._requests.busy:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(helper._process.pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the limit of the processor's time that ends it")
def test_a_helper_that_loops_dies_with_a_parent_that_is_killed():
    """A looping helper does not read its input, so the end of the input cannot stop it."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    run = [sys.executable, "-c", PARENT, LOOP]
    with subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        wait_until(lambda: cpu_seconds(helper) > 0.5)
        assert is_alive(helper)
        parent.kill()
    try:
        wait_until(lambda: not is_alive(helper), 10)
    finally:
        if is_alive(helper):
            os.kill(helper, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_processors_time_of_a_helper_is_bounded_for_each_conversation():
    """The limit does not depend on the parent, which may be stopped itself."""
    setup = encode((msgspec.structs.replace(TASKS["render"], seconds=1.0), {"sources": {}, "tokens": {}}))
    run = [sys.executable, "-m", pool._MODULE, str(os.getpid())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(run, **pipes, env=helper_process._environment()) as helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        asked = {"messages": [], "tools": None, "add_generation_prompt": True, "variables": {}}
        asked |= {"continue_final_message": False}
        write_frame(helper.stdin, setup)
        assert read_frame(helper.stdout) == READY
        spin = "{% for i in range(10**4) %}{% for j in range(60) %}{% endfor %}{% endfor %}ok"
        while cpu_seconds(helper.pid) < 2.5:  # time of earlier conversations does not count
            write_frame(helper.stdin, encode({**asked, "template": spin}))
            assert decode(read_frame(helper.stdout) or b"") == [True, "ok"]
        write_frame(helper.stdin, encode({**asked, "template": LOOP}))
        assert read_frame(helper.stdout) is None
        assert helper.wait(60) == -signal.SIGPROF


def test_a_helper_whose_parent_died_before_it_began_ends():
    run = [sys.executable, "-m", pool._MODULE, "1"]
    with subprocess.Popen(run, stdin=subprocess.PIPE, env=helper_process._environment()) as helper:
        assert helper.wait(60) == 1
