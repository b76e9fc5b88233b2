"""Tests of Generate and Abort over the fake engine, compared with `jaxinfer.v1.Inference`."""

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from jaxinfer.protos.v1 import inference_pb2
from jaxinfer.serve.grpc.vllm.messages import pb
from jaxinfer.serve.grpc.vllm.service import MAX_IDS
from tests.serve.fake_engine import EOS, FIRST_BYTE, Mischief, expected_text, expected_tokens
from tests.serve.grpc.running import failure
from tests.serve.grpc.vllm.serving import IDS, PROMPT, request, serving

SLOW = Mischief(seconds=0.05)


@dataclasses.dataclass
class Heard:
    """An output, assembled as a router does."""

    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[int, float, list[int], list[float]]] = dataclasses.field(default_factory=list)
    end: Any = None


async def heard(call: Any) -> list[Heard]:
    """Return the outputs of a call by index; check the invariants of the stream."""
    outputs: dict[int, Heard] = {}
    async for response in call:
        part = getattr(response, response.WhichOneof("response"))
        output = outputs.setdefault(part.index, Heard())
        assert output.end is None
        if response.HasField("chunk"):
            assert part.completion_tokens == len(part.token_ids)
            output.ids.extend(part.token_ids)
            output.logprobs.extend(logprobs_of(part.output_logprobs))
        else:
            output.end = part
            assert output.ids in ([], list(part.output_ids))
            output.ids = list(part.output_ids)
            assert part.completion_tokens == len(output.ids)
            output.logprobs.extend(logprobs_of(part.output_logprobs))
    assert all(output.end is not None for output in outputs.values())
    return [outputs[k] for k in sorted(outputs)]


def logprobs_of(found: Any) -> list[tuple[int, float, list[int], list[float]]]:
    tops = found.top_logprobs or [pb.TopLogProbs()] * len(found.token_ids)
    return [
        (token, logprob, list(top.token_ids), list(top.values))
        for token, logprob, top in zip(found.token_ids, found.token_logprobs, tops, strict=True)
    ]


async def ours(run: Any, fields: dict[str, Any]) -> list[tuple[list[int], list[Any], str, Any]]:
    """Return tokens, logprobs, finish reason and stop reason from `jaxinfer.v1.Inference`."""
    found: dict[int, tuple[list[int], list[Any], list[str], list[Any]]] = {}
    sampling = inference_pb2.SamplingParams(**fields)
    asked = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=IDS), sampling=sampling)
    async for response in run.inference.Generate(asked):
        if response.WhichOneof("event") != "delta":
            continue
        delta = response.delta
        ids, logprobs, reasons, stops = found.setdefault(delta.output_index, ([], [], [], []))
        ids.extend(delta.token_ids)
        for each in delta.logprobs:
            top = [c.token_id for c in each.top], [c.logprob for c in each.top]
            logprobs.append((each.chosen.token_id, each.chosen.logprob, *top))
        if delta.HasField("finish_reason"):
            reasons.append(inference_pb2.FinishReason.Name(delta.finish_reason).removeprefix("FINISH_REASON_").lower())
            stops.append({field.name: value for field, value in delta.ListFields() if field.name.startswith("stop_")})
    return [(ids, logprobs, reasons[0], stops[0]) for _, (ids, logprobs, reasons, stops) in sorted(found.items())]


TEXT = expected_text(IDS, 5, 0, 40)
FIELDS: list[dict[str, Any]] = [
    {"max_tokens": 24},
    {"max_tokens": 24, "n": 3, "logprobs": 2},
    {"max_tokens": 24, "logprobs": 0},
    {"max_tokens": 40, "stop": ["never", TEXT[8:11]]},
    {"max_tokens": 40, "stop": [TEXT[8:11]], "include_stop_str_in_output": True, "min_tokens": 2},
    {"max_tokens": 40, "stop_token_ids": expected_tokens(IDS, 5, 0, 12)[-1:]},
    {"max_tokens": 3, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "logit_bias": {7: 1.5}},
]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("stream", [True, False])
def test_it_says_what_our_own_service_says(fields: dict[str, Any], stream: bool) -> None:
    async def story() -> None:
        async with serving() as (run, stub, _):
            found = await heard(stub.Generate(request(sampling={**fields, "seed": 5}, stream=stream)))
            expected = await ours(run, {**fields, "seed": 5})
            assert len(found) == len(expected) == fields.get("n", 1)
            for output, (ids, logprobs, reason, stop) in zip(found, expected, strict=True):
                assert (output.ids, output.end.finish_reason) == (ids, reason)
                assert [row[0] for row in output.logprobs] == [row[0] for row in logprobs]
                for got, wanted in zip(output.logprobs, logprobs, strict=True):
                    assert got == (wanted[0], pytest.approx(wanted[1]), wanted[2], pytest.approx(wanted[3]))
                assert output.end.matched_stop_str == stop.get("stop_string", "")
                assert output.end.matched_token_id == stop.get("stop_token_id", 0)
                assert (output.end.prompt_tokens, output.end.cached_tokens) == (len(IDS), 0)
            await run.baseline()

    asyncio.run(story())


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_of_the_prompt_come_once(stream: bool) -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):
            asked = request(sampling={"prompt_logprobs": 2, "max_tokens": 5}, stream=stream)
            parts = [getattr(r, r.WhichOneof("response")) async for r in stub.Generate(asked)]
            (found,) = [part.input_logprobs for part in parts if part.HasField("input_logprobs")]
            assert found == parts[0].input_logprobs
            assert list(found.token_ids) == IDS
            assert [each.HasField("value") for each in found.token_logprobs] == [False] + [True] * (len(IDS) - 1)
            assert [len(top.token_ids) for top in found.top_logprobs] == [0] + [2] * (len(IDS) - 1)

    asyncio.run(story())


def test_a_text_is_tokenised_and_eos_ends_it_without_a_matched_stop() -> None:
    async def story() -> None:
        async with serving(Mischief(eos_after=4)) as (_, stub, _state):
            (found,) = await heard(stub.Generate(request(text=PROMPT, sampling={"max_tokens": 9})))
            assert found.ids == expected_tokens(IDS, 1, 0, 5, eos_after=4)
            assert (found.ids[-1], found.end.finish_reason) == (EOS, "stop")
            assert found.end.WhichOneof("matched_stop") is None

    asyncio.run(story())


def test_without_max_tokens_the_context_is_the_bound_and_the_cache_is_told() -> None:
    async def story() -> None:
        async with serving(settings={"max_model_len": 64}) as (_, stub, _state):
            asked = request(tokenized={"input_ids": IDS * 8})
            asked.sampling_params.ClearField("max_tokens")
            for cached in (0, 32):
                (found,) = await heard(stub.Generate(asked))
                assert (len(found.ids), found.end.finish_reason) == (64 - 8 * len(IDS), "length")
                assert found.end.cached_tokens == cached

    asyncio.run(story())


@pytest.mark.parametrize(
    "given", [{"text": "abcdef"}, {"tokenized": {"input_ids": [FIRST_BYTE + b for b in b"abcdef"]}}]
)
def test_the_end_of_a_truncated_prompt_is_kept(given: dict[str, Any]) -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):
            (found,) = await heard(stub.Generate(request(**given, sampling={"truncate_prompt_tokens": 2})))
            assert found.end.prompt_tokens == 2
            assert found.ids == expected_tokens([FIRST_BYTE + b for b in b"ef"], 1, 0, 4)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokenized": {"input_ids": [10**6]}}, "tokenized.input_ids"),
        ({"tokenized": {}}, "tokenized.input_ids"),
        ({"text": ""}, "text"),
        ({"sampling": {"logprobs": -1}}, "logprobs"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling": {"top_p": 2.0}}, "top_p"),
        ({"sampling": {"n": 1000}}, "n"),
        ({"sampling": {"stop": ["a"] * 65}}, "stop"),
        ({"sampling": {"logit_bias": {-1: 1.0}}}, "logit_bias"),
        ({"sampling": {"json_schema": "nonsense"}}, "json_schema"),
        ({"sampling": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"request_id": "x" * 200}, "request_id"),
        ({"mm_inputs": {}}, "mm_inputs"),
    ],
)
def test_a_wrong_value_is_refused_by_the_clients_name_for_it(fields: dict[str, Any], field: str) -> None:
    async def story() -> None:
        async with serving() as (run, stub, _):
            found = await failure(stub.Generate(request(**fields)))
            assert found.code is grpc.StatusCode.INVALID_ARGUMENT
            assert list(found.violations) == [field]
            assert found.message.startswith(field)
            await run.baseline()

    asyncio.run(story())


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_request_ends_with_abort(stream: bool) -> None:
    async def story() -> None:
        async with serving(SLOW) as (run, stub, _):
            asked = request(request_id="mine", stream=stream, sampling={"max_tokens": 1000, "n": 2})
            task = asyncio.create_task(heard(stub.Generate(asked)))
            async with asyncio.timeout(60):
                while (await run.frontend.stats()).generated_tokens < 4:
                    await asyncio.sleep(0.01)
                await stub.Abort(pb.AbortRequest(request_ids=["another", "mine"]))
                outputs = await task
            assert [output.end.finish_reason for output in outputs] == ["abort", "abort"]
            assert all(0 < len(output.ids) < 1000 for output in outputs)
            await run.baseline()

    asyncio.run(story())


def test_nobody_aborts_what_is_another_tenants() -> None:
    keys = {"k1": ("a", "infer"), "k2": ("b", "infer")}
    first, second = ((("authorization", f"Bearer {key}"),) for key in keys)

    async def story() -> None:
        async with serving(SLOW, keys=keys) as (run, stub, _):
            asked = request(request_id="mine", stream=True, sampling={"max_tokens": 12})
            task = asyncio.create_task(heard(stub.Generate(asked, metadata=first)))
            async with asyncio.timeout(60):
                while not (await run.frontend.stats()).running:
                    await asyncio.sleep(0.01)
                await stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=second)
                (output,) = await task
            assert (output.end.finish_reason, len(output.ids)) == ("length", 12)

    asyncio.run(story())


def test_an_abort_names_so_many_at_most() -> None:
    async def story() -> None:
        async with serving() as (_, stub, _state):
            found = await failure(stub.Abort(pb.AbortRequest(request_ids=["x"] * (MAX_IDS + 1))))
            assert list(found.violations) == ["request_ids"]
            assert (await failure(stub.Abort(pb.AbortRequest(request_ids=["x"] * MAX_IDS)))).code is grpc.StatusCode.OK

    asyncio.run(story())


def test_a_client_that_leaves_ends_its_request() -> None:
    async def story() -> None:
        async with serving(SLOW) as (run, stub, _):
            call = stub.Generate(request(stream=True, sampling={"max_tokens": 1000}))
            assert (await call.read()).HasField("chunk")
            call.cancel()
            await run.baseline()

    asyncio.run(story())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_ends_streams_with_a_status() -> None:
    async def story() -> None:
        async with serving(Mischief(seconds=0.01, fault_at=9)) as (_, stub, _state):
            call = stub.Generate(request(stream=True, sampling={"max_tokens": 1000}))
            assert (await call.read()).HasField("chunk")
            assert (await failure(call)).code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(story())


def test_a_draining_server_refuses_and_a_deadline_holds() -> None:
    async def story() -> None:
        async with serving(SLOW) as (run, stub, _):
            late = await failure(stub.Generate(request(sampling={"max_tokens": 1000}), timeout=0.5))
            assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
            run.frontend.draining = True
            assert (await failure(stub.Generate(request()))).code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(story())


@pytest.mark.parametrize("stream", [True, False])
def test_drafts_are_told_of_the_output_that_they_were_for(stream: bool) -> None:
    async def story() -> None:
        async with serving(settings={"speculative": "ngram", "num_speculative_tokens": 4}) as (run, stub, _):
            ends = []
            for sampling in ({"n": 2, "max_tokens": 90}, {"max_tokens": 150}):
                outputs = await heard(stub.Generate(request(sampling=sampling, stream=stream)))
                ends += [output.end for output in outputs]
            stats = await run.frontend.stats()
            assert sum(end.spec_draft_tokens for end in ends) == stats.draft_tokens > 0
            assert sum(end.spec_accepted_tokens for end in ends) == stats.draft_accepted > 0
            assert ends[-1].spec_accepted_tokens > 0

    asyncio.run(story())
