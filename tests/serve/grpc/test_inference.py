"""Tests of `jaxinfer.v1.Inference` on a real server, over the fake engine."""

import asyncio
import random

import grpc
import pytest
from grpc import aio

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call
from jaxinfer.serve.frontend.frontend import Frontend
from tests.serve.fake_engine import (
    FIRST_BYTE,
    Mischief,
    expected_logprobs,
    expected_text,
    expected_tokens,
    fake_tokenizer,
)
from tests.serve.grpc.running import Failure, collected, failure, failure_of, refusal, request, running

PROMPT = fake_tokenizer().encode("Hi")
SLOW = Mischief(seconds=0.01)
# The text of the fake engine repeats within max_tokens, so the stop string occurs.
STOPPED = {"max_tokens": 200, "seed": 5, "stop": ["狐"], "logprobs": 2, "prompt_logprobs": 1}


def test_an_outputs_last_delta_says_where_drafts_were_not_kept_exactly() -> None:
    async def story() -> None:
        async with running(SLOW, settings={"speculative": "ngram"}) as server:
            for asked, told in (({}, ""), ({"max_tokens": 1}, ""), ({"acceptance": "typical"}, "typical")):
                sampling = {"n": 2, "max_tokens": 20, "seed": 3, "speculation": pb.Speculation(**asked)}
                events = [event async for event in server.inference.Generate(request(sampling=sampling))]
                for delta in (event.delta for event in events[1:-1]):
                    assert delta.acceptance == (told if delta.HasField("finish_reason") else "")
        async with running() as server:
            sampling = {"speculation": pb.Speculation(acceptance="typical")}
            refused = await refusal(lambda: server.inference.Generate(request(sampling=sampling)))
            assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "speculation.acceptance='typical' needs drafts" in refused.message

    asyncio.run(story())


def test_the_stream_begins_brings_deltas_and_finishes() -> None:
    async def story() -> None:
        async with running(SLOW) as server:
            call = server.inference.Generate(request(request_id="mine", sampling={"n": 2, "max_tokens": 40, "seed": 3}))
            events = [event async for event in call]
            assert {event.request_id for event in events} == {"mine"}
            assert (events[0].started.seed, events[0].started.prompt_tokens) == (3, len(PROMPT))
            assert all(event.WhichOneof("event") == "delta" for event in events[1:-1])
            assert len(events) > 10
            usage = events[-1].finished.usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(PROMPT), 80, 0)
            for index in range(2):
                mine = [event.delta for event in events[1:-1] if event.delta.output_index == index]
                assert [i for delta in mine for i in delta.token_ids] == expected_tokens(PROMPT, 3, index, 40)
                assert "".join(delta.text for delta in mine) == expected_text(PROMPT, 3, index, 40)
                assert [d.finish_reason for d in mine if d.HasField("finish_reason")] == [pb.FINISH_REASON_LENGTH]
            await server.baseline()

    asyncio.run(story())


def test_the_text_is_the_front_ends_however_it_is_asked_for() -> None:
    """The text equals the front end's for a text, token ids and a chat, with logprobs and stop strings."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hé")])

    async def story() -> None:
        async with running() as server:
            for given in ({"prompt": "Hé"}, {"token_ids": pb.TokenIds(ids=[65, 66])}, {"chat": chat}):
                asked = request(**given, sampling=STOPPED)
                deltas = [e.delta async for e in server.inference.Generate(asked) if e.WhichOneof("event") == "delta"]
                text, tokens, positions, prompt, stop = await alone(server.frontend, asked)
                assert "".join(delta.text for delta in deltas) == text
                assert [i for delta in deltas for i in delta.token_ids] == tokens
                got = [
                    (p.chosen.token_id, p.chosen.logprob, p.chosen.rank, len(p.top)) for d in deltas for p in d.logprobs
                ]
                assert got == [(*p.chosen, len(p.top)) for p in positions]
                got = [p.chosen.token_id for d in deltas for p in d.prompt_logprobs]
                assert got == [p.chosen.token_id for p in prompt[1:]]
                assert deltas[-1].stop_string == stop == "狐"

    asyncio.run(story())


async def alone(frontend: Frontend, asked: pb.GenerateRequest) -> tuple:
    from_chat = asked.WhichOneof("input") == "chat"
    prompt = {"prompt": asked.prompt, "token_ids": list(asked.token_ids.ids)}.get(asked.WhichOneof("input"))
    if from_chat:
        prompt = "[user] Hé\n[a] "
    async with await frontend.generate(Call(prompt, STOPPED, add_special_tokens=not from_chat)) as generation:
        deltas = [delta async for delta in generation]
    first = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs)
    return (
        "".join(delta.text for delta in deltas),
        [i for delta in deltas for i in delta.token_ids],
        [p for delta in deltas for p in delta.logprobs],
        first,
        deltas[-1].stop_reason,
    )


def test_tokenize_detokenize_score_and_model_info() -> None:
    async def story() -> None:
        async with running() as server:
            inference = server.inference
            made = await inference.Tokenize(pb.TokenizeRequest(text="né"))
            assert list(made.token_ids) == [FIRST_BYTE + byte for byte in "né".encode()]
            assert made.max_model_len == 2048
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], add_generation_prompt=False)
            made = await inference.Tokenize(pb.TokenizeRequest(chat=chat))
            back = await inference.Detokenize(pb.DetokenizeRequest(token_ids=made.token_ids))
            assert back.text == "[user] x\n"
            asked = pb.ScoreRequest(
                prompt="Hi", continuations=[pb.Continuation(text="ab"), {"token_ids": {"ids": [9]}}]
            )
            scored = (await inference.Score(asked)).scored
            assert [[token.token_id for token in each.tokens] for each in scored] == [
                [FIRST_BYTE + 97, FIRST_BYTE + 98],
                [9],
            ]
            exact = [expected_logprobs(FIRST_BYTE + 97 + k, len(PROMPT) + k, 0).chosen.logprob for k in range(2)]
            assert [token.logprob for token in scored[0].tokens] == exact
            assert scored[0].logprob == sum(exact)
            assert scored[0].is_greedy
            info = await inference.GetModelInfo(pb.GetModelInfoRequest(model="fake"))
            assert (info.name, info.max_model_len, info.has_chat_template) == ("fake", 2048, True)

    asyncio.run(story())


REFUSALS = [
    (request(sampling={"top_p": 2.0}), "INVALID_ARGUMENT", "top_p"),
    (request(sampling={"temperature": float("nan")}), "INVALID_ARGUMENT", "temperature"),
    (request(sampling={"max_tokens": 0}), "INVALID_ARGUMENT", "max_tokens"),
    (request(sampling={"max_tokens": -(2**63)}), "INVALID_ARGUMENT", "max_tokens"),
    (request(sampling={"n": 10**6}), "INVALID_ARGUMENT", "n"),
    (request(sampling={"logit_bias": {2**32 - 1: 1.0}}), "INVALID_ARGUMENT", "logit_bias"),
    (request(sampling={"stop": [""]}), "INVALID_ARGUMENT", "stop"),
    (request(token_ids=pb.TokenIds(ids=[259])), "INVALID_ARGUMENT", "token_ids"),
    (request(token_ids=pb.TokenIds(ids=[5] * 3000)), "INVALID_ARGUMENT", None),
    (request(request_id="x" * 129), "INVALID_ARGUMENT", "request_id"),
    (request(model="other"), "NOT_FOUND", "model"),
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "input"),
]


def test_refusals_name_their_field() -> None:
    async def story() -> None:
        async with running() as server:
            for asked, code, field in REFUSALS:
                found = await failure(server.inference.Generate(asked))
                assert found.code.name == code, (asked, found)
                if field is not None:
                    assert found.violations == {field: found.message}, (asked, found)
            wrong = [
                (server.inference.Tokenize(pb.TokenizeRequest()), "input"),
                (server.inference.Detokenize(pb.DetokenizeRequest(token_ids=[259])), "token_ids"),
                (
                    server.inference.Score(pb.ScoreRequest(prompt="a", continuations=[pb.Continuation()])),
                    "continuations[0]",
                ),
            ]
            for call, field in wrong:
                found = await failure(call)
                assert (found.code.name, set(found.violations)) == ("INVALID_ARGUMENT", {field})
            found = await failure(server.inference.GetModelInfo(pb.GetModelInfoRequest(model="x")))
            assert (found.code.name, set(found.violations)) == ("NOT_FOUND", {"model"})

    asyncio.run(story())


def test_a_duplicate_id_and_a_full_queue() -> None:
    async def story() -> None:
        async with running(SLOW, settings={"max_num_seqs": 2, "max_waiting_requests": 1}) as server:
            first = server.inference.Generate(request(request_id="twice", sampling={"max_tokens": 1000}))
            assert (await first.read()).WhichOneof("event") == "started"
            found = await failure(server.inference.Generate(request(request_id="twice")))
            assert (found.code.name, set(found.violations)) == ("ALREADY_EXISTS", {"request_id"})
            many = [server.inference.Generate(request(sampling={"max_tokens": 1000})) for _ in range(20)]
            first_events = await asyncio.gather(*(begun(call) for call in many))
            full = [event for event in first_events if isinstance(event, Failure)]
            assert full
            for found in full:
                assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                delay = found.details["RetryInfo"].retry_delay.ToMilliseconds()
                assert found.trailers["grpc-retry-pushback-ms"] == str(delay)
                assert delay > 0
            for call in (first, *many):
                call.cancel()
            await server.baseline()

    asyncio.run(story())


async def begun(call: aio.UnaryStreamCall) -> pb.GenerateResponse | Failure:
    try:
        return await call.read()
    except aio.AioRpcError as error:
        return failure_of(error)


def test_every_kind_of_error_has_its_status_and_details() -> None:
    errors = {kind: ServeError(kind, f"it is {kind.name}", field="a.b", retry_after=1.5) for kind in Kind}

    async def story() -> None:
        current: list[ServeError] = []

        def raising() -> Frontend:
            raise current[0]

        async with running(frontend=lambda made: raising) as server:
            for kind, error in errors.items():
                current[:] = [error]
                for make in (
                    lambda: server.inference.Generate(request()),
                    lambda: server.inference.Tokenize(pb.TokenizeRequest(text="a")),
                    lambda: server.inference.GenerateBatch(iter([request()])),
                ):
                    found = await refusal(make)
                    assert (found.code, found.message) == (kind.code, error.message)
                    assert found.violations == {"a.b": error.message}
                    assert found.details["RetryInfo"].retry_delay.ToMilliseconds() == 1500
                    assert found.trailers["grpc-retry-pushback-ms"] == "1500"

    asyncio.run(story())


def test_a_fault_is_opaque_and_the_log_has_its_id(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> list[Failure]:
        def broken() -> Frontend:
            raise ZeroDivisionError("the secret")

        async with running(frontend=lambda made: broken) as server:
            return [
                await failure(server.inference.Generate(request())),
                await failure(server.inference.Tokenize(pb.TokenizeRequest(text="a"))),
                await refusal(lambda: server.inference.GenerateBatch(iter([request()]))),
            ]

    for found in asyncio.run(story()):
        assert found.code is grpc.StatusCode.INTERNAL
        assert "secret" not in found.message
        assert "Zero" not in found.message
        fault = found.details["ErrorInfo"].metadata["id"]
        assert fault in found.message
        (record,) = [record for record in caplog.records if fault in record.getMessage()]
        assert record.exc_info is not None
        assert "the secret" in str(record.exc_info[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_ends_the_stream_with_a_status() -> None:
    async def story() -> None:
        async with running(Mischief(fault_at=5)) as server:
            found = await failure(server.inference.Generate(request(sampling={"max_tokens": 100})))
            assert (found.code, "ZeroDivision" in found.message) == (grpc.StatusCode.UNAVAILABLE, False)
            assert "grpc-retry-pushback-ms" in found.trailers

    asyncio.run(story())


@pytest.mark.parametrize("raw", [b"\x1a\x02\xff\xfe", b"\xff\xff\xff", b"\x12\x03\xed\xa0\x80"])
def test_what_is_no_message_or_no_utf8_is_refused(raw: bytes) -> None:
    async def story() -> None:
        async with running() as server:
            single = server.channel.unary_stream("/jaxinfer.v1.Inference/Generate")(raw)
            batch = server.channel.stream_stream("/jaxinfer.v1.Inference/GenerateBatch")(iter([raw]))
            for call in (single, batch):
                found = await failure(call)
                assert found.code is grpc.StatusCode.INVALID_ARGUMENT
                assert found.message == "the request is no valid jaxinfer.v1.GenerateRequest"

    asyncio.run(story())


def test_cancelling_at_any_point_frees_the_pages() -> None:
    async def story() -> None:
        draw = random.Random(1)
        async with running(Mischief(seconds=0.001)) as server:
            baseline = [await server.frontend.stats()]

            async def cancelled() -> None:
                call = server.inference.Generate(request(sampling={"max_tokens": 1500, "n": draw.choice([1, 2])}))
                for _ in range(draw.choice([0, 0, 1, 2, 5, 20])):
                    await call.read()
                call.cancel()

            untouched = asyncio.create_task(collected(server.inference.Generate(request(sampling={"max_tokens": 300}))))
            for _ in range(5):
                await asyncio.gather(*(cancelled() for _ in range(20)))
            texts, _, _ = await untouched
            assert texts == [expected_text(PROMPT, 1, 0, 300)]
            await server.baseline()
            assert baseline[0].kv is not None

    asyncio.run(story())


def test_deadlines_hold_in_the_queue_and_while_running() -> None:
    async def story() -> None:
        async with running(SLOW, settings={"max_num_seqs": 2}) as server:
            long = request(sampling={"max_tokens": 2000})
            runs = [server.inference.Generate(long) for _ in range(2)]
            for call in runs:
                await call.read()
            waits = server.inference.Generate(long, timeout=0.2)
            found = await failure(waits)
            assert found.code is grpc.StatusCode.DEADLINE_EXCEEDED
            for call in runs:
                call.cancel()
            await server.baseline()
            found = await failure(server.inference.Generate(long, timeout=0.2))
            assert found.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await server.baseline()

    asyncio.run(story())


def test_the_deadline_reaches_the_front_end() -> None:
    """The client's deadline is passed on to the front end and the queue, besides the transport."""

    async def story() -> None:
        seen: list[Call] = []
        async with running() as server:
            generate = server.frontend.generate

            async def watched(call: Call) -> object:
                seen.append(call)
                return await generate(call)

            server.frontend.generate = watched  # type: ignore[method-assign]
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            await collected(server.inference.Generate(request(), timeout=50, metadata=(("traceparent", trace),)))
            await collected(server.inference.Generate(request()))
            assert seen[0].timeout is not None
            assert 40 < seen[0].timeout < 51  # gRPC rounds a deadline up
            assert seen[0].trace == {"traceparent": trace}
            assert seen[1].timeout is None

    asyncio.run(story())
