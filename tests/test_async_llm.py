"""Tests of `AsyncLLM`, and of the FastAPI application around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import httpx
import jax
import pytest

from examples.fastapi_app import make_app
from jaxinfer import LLM, AsyncLLM, RequestError, SamplingParams

SETTINGS = {"max_num_seqs": 4, "max_model_len": 128, "show_progress": False}
PROMPTS = ["To be, or", "ROMEO:", [5, 6, 7, 8], "The sea", "A king", "O"]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=2, logprobs=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("demo", **SETTINGS)
    yield llm
    asyncio.run(llm.close())


async def whole(llm, prompt, params=SAMPLED, **options):
    """Return the last output, and check that the others led to it."""
    lengths, last = [], None
    async for output in llm.generate(prompt, params, **options):
        lengths.append(sum(len(sample.token_ids) for sample in output.outputs))
        last = output
    assert lengths == sorted(lengths)
    assert last.finished
    return last


async def idle(llm) -> bool:
    """Whether nothing runs soon, with all pages accounted for."""
    for _ in range(200):
        stats = await llm.engine.stats()
        if not stats.running and not sum(stats.waiting.values()):
            await llm.engine.check()
            return True
        await asyncio.sleep(0.02)
    return False


def test_outputs_are_those_of_llm(llm):
    async def run():
        return await asyncio.gather(*(whole(llm, prompt) for prompt in PROMPTS))

    found = asyncio.run(run())
    with LLM("demo", **SETTINGS) as offline:
        for output, want in zip(found, offline.generate(PROMPTS, SAMPLED), strict=True):
            assert output.prompt_token_ids == want.prompt_token_ids
            assert output.outputs == want.outputs


def test_deltas_add_up(llm):
    async def run():
        deltas = [delta async for delta in llm.stream(PROMPTS[0], SAMPLED)]
        return deltas, await whole(llm, PROMPTS[0])

    deltas, want = asyncio.run(run())
    for index, output in enumerate(want.outputs):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == output.text
        assert [token for delta in own for token in delta.token_ids] == output.token_ids
        assert [delta.finish_reason for delta in own][-1] == output.finish_reason


def test_a_stop_string_ends_one_sample_and_not_the_others(llm):
    async def run():
        plain = await whole(llm, PROMPTS[0])
        stop = plain.outputs[0].text[3:6]
        return (
            plain,
            stop,
            await whole(llm, PROMPTS[0], SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=2, stop=stop)),
        )

    plain, stop, stopped = asyncio.run(run())
    for before, after in zip(plain.outputs, stopped.outputs, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert (after.stop_reason == stop) == (stop in before.text)


def test_a_conversation_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Who are you?"}]
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM("demo", **SETTINGS) as offline:
        (want,) = offline.chat(messages, greedy, progress=False)
    assert asyncio.run(whole(llm, messages, greedy)).outputs == want.outputs


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
def test_leaving_aborts_the_request(llm, how):
    long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)

    async def run():
        async def read():
            last = None
            async with contextlib.aclosing(llm.generate("The", long, "mine")) as outputs:
                async for output in outputs:
                    last = output
                    if how == "break":
                        return None
                    started.set()
            return last

        started = asyncio.Event()
        reader = asyncio.create_task(read())
        if how == "break":
            assert await reader is None
        else:
            await started.wait()
            if how == "cancel":
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
            else:
                await llm.abort("mine")
                assert (await reader).outputs[0].finish_reason == "abort"
        assert await idle(llm)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("x" * 5000, SAMPLED, "prompt"),
        (["a", "b"], SAMPLED, "prompt"),
        ("a", SamplingParams(max_tokens=4, prompt_logprobs=100), "prompt_logprobs"),
        ([{"role": "user", "content": 5}], SAMPLED, "messages"),
    ],
)
def test_a_bad_request_is_rejected_by_name(llm, prompt, params, field):
    async def run():
        with pytest.raises(RequestError) as refused:
            await whole(llm, prompt, params)
        assert await idle(llm)
        return refused.value.field

    assert asyncio.run(run()) == field


def test_an_id_that_is_in_use_is_rejected(llm):
    async def run():
        long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        async with contextlib.aclosing(llm.generate("The", long, "twice")) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError) as refused:
                await whole(llm, "The", long, request_id="twice")
        return refused.value.field

    assert asyncio.run(run()) == "request_id"


def test_weights_change_while_it_generates(llm):
    async def run():
        version, ranges = llm.engine.weight_version, None
        long = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        async for output in llm.generate("The", long):
            if ranges is None:
                await llm.engine.update_weights(jax.tree.map(lambda x: 1.01 * x, llm.model.params), mode="keep")
            ranges = output.outputs[0].weight_versions
        return version, ranges

    version, ranges = asyncio.run(run())
    assert [each for each, _ in ranges] == [version, version + 1]
    assert sum(count for _, count in ranges) == 120


def test_the_fastapi_application():
    llm = AsyncLLM("demo", **SETTINGS)

    async def run():
        app = make_app(llm)
        transport = httpx.ASGITransport(app)
        body = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            plain = await http.post("/generate", json=body | {"stream": False})
            lines = (await http.post("/generate", json=body)).text.split("\n\n")
            bad = [
                await http.post("/generate", json=body | change)
                for change in ({"top_p": 2}, {"topp": 1}, {"messages": []})
            ]
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert "".join(event["text"] for event in events) == plain.json()["text"] != ""
        assert events[-1]["finish_reason"] == "length"
        assert [(answer.status_code, answer.json()["field"]) for answer in bad] == [
            (400, "top_p"),
            (400, "body"),
            (400, "prompt"),
        ]

    asyncio.run(run())
