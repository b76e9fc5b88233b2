"""Chat templates in helper processes: the same text as in this one, and bad templates that end in time."""

import asyncio
import os
import pathlib
import time

import pytest

from jaxinfer.serve import templates
from jaxinfer.serve.calls import Conversation
from jaxinfer.serve.templates import Renderer
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import QueueFullError, RequestError
from tests.serve.fake_engine import TEMPLATE, fake_template

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
            await asyncio.wait_for(bad, 30)  # a helper that starts on a busy machine; the next one is exact
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
        assert 0.5 <= time.monotonic() - begun < 0.5 + 2.0
        assert "ran for 0.5 s" in str(answers[0])
        assert answers[1] == "ok"

    asyncio.run(run())


def test_a_template_is_stopped_though_its_client_has_left():
    async def run() -> None:
        renderer = Renderer(None, 0.5)
        loop = Conversation(HELLO, template=LOOP)
        task = asyncio.ensure_future(renderer.render(loop))
        while renderer._requests._free:
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
    monkeypatch.setattr(templates, "MAX_WAITING", 2)
    answers = asyncio.run(rendered(Renderer(fake_template(), 9.0), *[Conversation(HELLO)] * 20))
    assert sum(isinstance(answer, QueueFullError) for answer in answers) >= 10
    assert answers.count(fake_template().render(HELLO)) >= 2


def test_who_leaves_the_queue_makes_room_in_it(monkeypatch):
    monkeypatch.setattr(templates, "MAX_WAITING_OWN", 2)

    async def run() -> None:
        renderer = Renderer(None, 0.5)
        slow = asyncio.ensure_future(renderer.render(Conversation(HELLO, template=LOOP)))
        while renderer._requests._free:
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
            await asyncio.sleep(0.3)  # beyond the time of that one
            (helper,) = renderer._requests._helpers
            assert helper._process is not None
            assert helper._process.poll() is None
        renderer.close()

    asyncio.run(run())


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
    assert "SECRET" not in templates._environment()


def test_helpers_end_with_the_renderer():
    async def run() -> list[int]:
        renderer = Renderer(fake_template(), 9.0)
        await renderer.warm()
        processes = [helper._process for helper in renderer._own._helpers]
        renderer.close()
        return [process.wait(10) for process in processes if process is not None]

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
    assert len(children() - before) <= 1  # the last one may still be on its way


def children() -> set[str]:
    return set(pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
