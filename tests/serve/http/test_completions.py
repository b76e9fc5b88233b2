"""Tests of the calls that the front end gets from HTTP requests, and of requests with several prompts."""

import asyncio
import dataclasses

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation
from tests.serve.fake_engine import Mischief
from tests.serve.http.support import events, run, serving

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_what_a_client_sets_reaches_the_front_end(tmp_path):
    key, seen = new_key(), list[Call]()
    (tmp_path / "keys.yaml").write_text(key_entry(key, "alice", ["infer"]))

    async def watched(call: Call, place: object = None) -> None:
        seen.append(call)
        raise ServeError(Kind.INVALID, "seen")

    async def test():
        headers = {"authorization": f"Bearer {key}", "traceparent": TRACE, "x-request-timeout": "50"}
        async with serving(keys=tmp_path / "keys.yaml") as running, running.http(headers=headers) as client:
            running.frontend.generate = watched
            terms = {"request_id": "me", "priority": -2, "cache_salt": "salt", "model": "fake"}
            await client.post("/v1/completions", json={"prompt": "a", "add_special_tokens": False, **terms})
            chat = {"messages": MESSAGES, "tools": TOOLS, **terms}
            await client.post("/v1/chat/completions", json=chat)
            await client.post("/v1/chat/completions", json={**chat, "tool_choice": "none"})

    run(test)
    terms = {"model": "fake", "request_id": "me", "priority": -2, "cache_salt": "salt", "timeout": 50.0}
    wanted = Call("a", tenant="alice", trace={"traceparent": TRACE}, **terms)
    plain = [dataclasses.replace(call, prompt="a", sampling={}, add_special_tokens=True) for call in seen]
    assert plain == [wanted] * 3
    assert [call.add_special_tokens for call in seen] == [False, True, True]
    assert [call.prompt for call in seen] == ["a", Conversation(MESSAGES, TOOLS), Conversation(MESSAGES, None)]


def test_what_asks_for_nothing_is_no_mistake():
    """The server accepts hidden tools, empty lists of tools, and ``parallel_tool_calls`` without tools."""

    async def test():
        async with serving() as running, running.http() as client:
            for harmless in (
                {"tools": [], "parallel_tool_calls": False},
                {"parallel_tool_calls": False},
                {"tools": TOOLS, "tool_choice": "none"},
                {"tool_choice": "auto"},
            ):
                asked = {"messages": MESSAGES, "max_tokens": 1, **harmless}
                answer = await client.post("/v1/chat/completions", json=asked)
                assert answer.status_code == 200, answer.text

    run(test)


def test_usage_is_that_of_all_prompts():
    async def test():
        async with serving() as running, running.http() as client:
            asked = {"prompt": ["a", "bcd"], "max_tokens": 5, "n": 2}
            usage = (await client.post("/v1/completions", json=asked)).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 20, 24)

    run(test)


def test_one_bad_prompt_refuses_all_and_leaves_nothing_behind():
    async def test():
        async with serving(Mischief(seconds=0.02)) as running, running.http() as client:
            generate, accepted = running.frontend.generate, asyncio.Event()

            async def watched(call: Call, place: object):
                if call.prompt == "b":
                    await accepted.wait()
                    raise ServeError(Kind.QUEUE_FULL, "full")
                generation = await generate(call, place)
                accepted.set()
                return generation

            running.frontend.generate = watched
            answer = await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2000})
            assert answer.status_code == 429
            assert running.frontend.active == 0
            await running.quiet()

    run(test)


def test_a_stream_of_which_one_prompt_fails_has_no_end():
    async def test():
        async with serving(Mischief(seconds=0.002)) as running, running.http() as client:
            generate = running.frontend.generate

            async def failing(call: Call, place: object):
                generation = await generate(call, place)
                if call.prompt == "b":
                    generation.cut(ServeError(Kind.UNAVAILABLE, "gone"))
                return generation

            running.frontend.generate = failing
            asked = {"prompt": ["a", "b"], "max_tokens": 30, "stream": True}
            *_, last = events((await client.post("/v1/completions", json=asked)).text)
            assert last["error"]["message"] == "gone"
            await running.quiet()

    run(test)
