"""Tests of ``POST /v1/responses`` with the official client: unary, streamed, and fields shared with chats."""

import asyncio
import itertools
from typing import Any

import openai
import pytest

from jaxinfer.parsers.registry import Parsers
from tests.parsers.corpus import CASES
from tests.parsers.corpus import TOOLS as CORPUS_TOOLS
from tests.serve.fake_engine import Mischief
from tests.serve.http.scripted import speaking
from tests.serve.http.support import Running, events, post, run, serving
from tests.serve.http.test_messages import CALL, THOUGHT
from tests.serve.http.test_messages import TOOLS as CHAT_TOOLS

LOGPROBS: Any = "message.output_text.logprobs"
TOOLS: list[Any] = [{"type": "function", **CHAT_TOOLS[0]["function"], "strict": None}]
ASKED: dict[str, Any] = {"model": "fake", "input": "How is the weather?", "tools": TOOLS}
SEEDED: dict[str, Any] = {"model": "fake", "input": "Grüße", "extra_body": {"seed": 5}}
# The longest answer of each tool parser.
FAMILIES = {str(each.parsers.tool_calls): each for each in sorted(CASES, key=lambda case: len(case.text))}
# Events of an item, between its first and its last.
WITHIN = {
    "reasoning": ("reasoning_text", True),
    "message": ("output_text", True),
    "function_call": ("function_call_arguments", False),
}


def check_events(found: list[Any]) -> dict[str, Any]:
    """Check the official event order, item by item, from the events alone; return the last response."""
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    types = [each["type"] for each in found]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] in ("response.completed", "response.incomplete")
    assert [each["response"]["output"] for each in found[:2]] == [[], []]
    rest, items = found[2:-1], []
    for index, group in itertools.groupby(rest, key=lambda each: each["output_index"]):
        assert index == len(items)
        items.append(check_item(list(group)))
    last = found[-1]["response"]
    assert items == last["output"]
    assert last["status"] == types[-1].removeprefix("response.")
    return last


def check_item(found: list[Any]) -> Any:
    item = found[-1]["item"]
    name, has_part = WITHIN[item["type"]]
    types = [each["type"].removeprefix("response.") for each in found]
    around = ["content_part.added"] * has_part, ["content_part.done"] * has_part
    deltas = [each for each in found if each["type"].endswith(".delta")]
    middle = [f"{name}.delta"] * len(deltas)
    assert types == ["output_item.added", *around[0], *middle, f"{name}.done", *around[1], "output_item.done"]
    first = found[0]["item"]
    assert (first["id"], first["type"], first["status"]) == (item["id"], item["type"], "in_progress")
    assert {each["item_id"] for each in found if "item_id" in each} == {item["id"]}
    done = next(each for each in found if each["type"] == f"response.{name}.done")
    text = done["text"] if has_part else done["arguments"]
    assert "".join(each["delta"] for each in deltas) == text
    assert text == (item["content"][0]["text"] if has_part else item["arguments"])
    if item["type"] == "message":
        logprobs = [each for delta in deltas for each in delta["logprobs"]]
        assert logprobs == done["logprobs"] == item["content"][0]["logprobs"]
    return item


async def streamed(running: Running, **body: Any) -> list[Any]:
    async with running.http() as client:
        answer = await client.post("/v1/responses", json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
        found: list[Any] = events(answer.text)
        assert names == [each["type"] for each in found]
        return found


def told(response: dict[str, Any]) -> Any:
    """Return a response without fields that differ between requests."""
    name = response["id"].removeprefix("resp_")
    items = [{**item, "id": item["id"].replace(name, "")} for item in response["output"]]
    calls = [{**item, "call_id": ""} if "call_id" in item else item for item in items]
    usage = {**response["usage"], "input_tokens_details": None}
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": calls, "usage": usage}


def test_a_response_is_the_chats_answer() -> None:
    async def test() -> None:
        async with serving() as running, running.openai() as client:
            response = await client.responses.create(**SEEDED, max_output_tokens=40)
            messages: Any = [{"role": "user", "content": "Grüße"}]
            chat = await client.chat.completions.create(model="fake", messages=messages, seed=5, max_tokens=40)
            assert response.output_text == chat.choices[0].message.content
            usage, same = response.usage, chat.usage
            assert usage is not None
            assert same is not None
            assert (usage.input_tokens, usage.output_tokens) == (same.prompt_tokens, same.completion_tokens)
            assert usage.total_tokens == same.total_tokens
            assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
            assert (response.status, response.object, response.model) == ("incomplete", "response", "fake")
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            assert [item.status for item in response.output if item.type == "message"] == ["incomplete"]

    run(test)


def test_an_answer_that_ends_by_itself_is_completed() -> None:
    async def test() -> None:
        async with serving(Mischief(eos_after=4)) as running, running.openai() as client:
            response = await client.responses.create(**SEEDED, metadata={"a": "b"}, instructions="Be brief.", top_p=0.5)
            assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
            assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
            assert (response.top_p, response.temperature, response.truncation) == (0.5, 1.0, "disabled")
            assert (response.model_extra or {})["store"] is False
            assert response.completed_at is not None

    run(test)


def test_the_stream_is_the_whole_in_the_official_order() -> None:
    async def test() -> None:
        answer = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
        async with speaking(answer) as running, running.http() as client:
            whole = (await client.post("/v1/responses", json=ASKED)).json()
            assert [item["type"] for item in whole["output"]] == ["reasoning", "message", *["function_call"] * 2]
            last = check_events(await streamed(running, **ASKED))
            assert told(last) == told(whole)
            assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len("I need the weather.")}
            assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "I need the weather."}]
            assert whole["output"][1]["content"][0]["text"] == "Let me see.\n"
            assert len({item["id"] for item in whole["output"]}) == 4

    run(test)


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_every_familys_answer_streams_as_it_is(case: Any) -> None:
    async def test() -> None:
        async with speaking(case.text, parsers=case.parsers, template="{{ messages }}{{ tools }}") as running:
            tools = [{"type": "function", **tool["function"]} for tool in CORPUS_TOOLS]
            async with running.http() as client:
                whole = (await client.post("/v1/responses", json={"input": "Hi", "tools": tools})).json()
            last = check_events(await streamed(running, input="Hi", tools=tools))
            assert told(last) == told(whole)
            calls = [item["name"] for item in whole["output"] if item["type"] == "function_call"]
            if not case.prompt:  # else the prompt opens the thought, which this template does not do
                assert calls == [name for name, _ in case.calls]

    run(test)


def test_the_clients_streaming_helper() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}It is\nsunny.{CALL}") as running, running.openai() as client:
            async with client.responses.stream(**ASKED) as stream:
                seen = [event async for event in stream]
                final = await stream.get_final_response()
            snapshots = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
            assert snapshots[-1] == final.output_text == "It is\nsunny."
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            assert seen[-1].type == "response.completed"

    run(test)


def test_one_call_where_one_is_asked_for_and_none_where_none_is() -> None:
    async def test() -> None:
        async with speaking(CALL + CALL) as running, running.openai() as client:
            response = await client.responses.create(**ASKED, parallel_tool_calls=False)
            assert [item.type for item in response.output] == ["function_call"]
            assert response.parallel_tool_calls is False
            last = check_events(await streamed(running, **ASKED, parallel_tool_calls=False))
            assert len(last["output"]) == 1
            response = await client.responses.create(**ASKED, tool_choice="none")
            assert (response.output_text, response.tool_choice) == (CALL + CALL, "none")

    run(test)


def test_a_call_that_is_cut_is_incomplete() -> None:
    async def test() -> None:
        async with speaking(f"{THOUGHT}{CALL}") as running:
            asked = {**ASKED, "max_output_tokens": 80}
            last = check_events(await streamed(running, **asked))
            assert [item["status"] for item in last["output"]] == ["completed", "incomplete"]
            assert '{"city": "Zürich 🦊"}'.startswith(last["output"][1]["arguments"])
            assert last["incomplete_details"] == {"reason": "max_output_tokens"}

    run(test)


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    async def test() -> None:
        async with serving() as running, running.openai() as client:
            terms = {**SEEDED, "max_output_tokens": 25, "include": [LOGPROBS], "top_logprobs": 3}
            response = await client.responses.create(**terms)
            messages: Any = [{"role": "user", "content": "Grüße"}]
            asked: dict[str, Any] = {"model": "fake", "messages": messages, "seed": 5, "max_tokens": 25}
            chat = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
            (message,) = response.output
            assert message.type == "message"
            (part,) = message.content
            assert part.type == "output_text"
            theirs = (chat.choices[0].logprobs or openai.NOT_GIVEN).content  # type: ignore[union-attr]
            assert [each.model_dump() for each in part.logprobs or []] == [each.model_dump() for each in theirs or []]
            plain = await client.responses.create(**SEEDED, max_output_tokens=5)
            assert plain.model_dump()["output"][0]["content"][0]["logprobs"] == []
        async with speaking(f"{THOUGHT}Yes.{CALL}!") as running:
            asked = {**ASKED, "include": [LOGPROBS]}
            last = check_events(await streamed(running, **asked))
            counts = [len(item["content"][0]["logprobs"]) for item in last["output"] if item["type"] == "message"]
            assert counts == [len("Yes."), len("!")]

    run(test)


def test_a_prompt_that_was_cached_is_counted() -> None:
    async def test() -> None:
        async with serving() as running, running.openai() as client:
            for cached in (0, 96):
                response = await client.responses.create(model="fake", input="x" * 90, max_output_tokens=1)
                assert response.usage is not None
                assert response.usage.input_tokens_details.cached_tokens == cached

    run(test)


def test_a_fault_within_a_stream_is_a_failed_response() -> None:
    async def test() -> None:
        async with serving(Mischief(fault_at=6, seconds=0.002)) as running, running.openai() as client:
            seen = [event async for event in await client.responses.create(**SEEDED, stream=True)]
            last = seen[-1]
            assert last.type == "response.failed"
            assert (last.response.status, last.sequence_number) == ("failed", len(seen) - 1)
            assert last.response.error is not None
            assert last.response.error.code == "server_error"
            assert "does not run" in last.response.error.message
            with pytest.raises(openai.InternalServerError) as refused:
                await client.responses.create(**SEEDED)
            assert refused.value.status_code == 503

    run(test)


def test_a_request_that_is_aborted_fails() -> None:
    async def test() -> None:
        async with serving(Mischief(seconds=0.01)) as running, running.openai() as client:
            terms: dict[str, Any] = {"model": "fake", "input": "Hi", "extra_body": {"request_id": "mine"}}
            stream = await client.responses.create(**terms, stream=True)
            seen = []
            async for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    await running.frontend.abort("mine")
            assert seen[-1].type == "response.failed"
            assert seen[0].type == "response.created"
            assert seen[0].response.id == "resp_mine"

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_pages(stream: bool) -> None:
    async def test() -> None:
        async with serving(Mischief(seconds=0.01)) as running:
            _, writer = await running.connect()
            body = b'{"input": "Hi", "stream": %s}' % (b"true" if stream else b"false")
            writer.write(post("/v1/responses", body))
            while (await running.frontend.stats()).running == 0:
                await asyncio.sleep(0.005)
            writer.close()
            await running.quiet()

    run(test)


def test_ids_and_deadlines_are_those_of_all_doors() -> None:
    async def test() -> None:
        async with serving(Mischief(seconds=0.02)) as running, running.http() as client:
            short = {"input": "Hi", "max_output_tokens": 1}
            answer = await client.post("/v1/responses", json=short, headers={"x-request-id": "mine"})
            assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "resp_mine")
            answer = await client.post("/v1/responses", json={"input": "Hi"}, headers={"x-request-timeout": "0.1"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")

    run(test)


def test_models_without_a_parser_answer_in_text() -> None:
    async def test() -> None:
        async with speaking("<think>狐</think>b", parsers=Parsers()) as running:
            last = check_events(await streamed(running, input="Hi"))
            assert last["output"][0]["content"][0]["text"] == "狐b"  # markers are special tokens here

    run(test)


def test_an_answer_of_nothing_has_no_items() -> None:
    async def test() -> None:
        async with serving(Mischief(eos_after=0)) as running:
            last = check_events(await streamed(running, input="Hi"))
            assert (last["output"], last["status"], last["usage"]["output_tokens"]) == ([], "completed", 1)

    run(test)
