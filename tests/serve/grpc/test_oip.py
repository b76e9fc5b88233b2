"""Tests of the Open Inference Protocol with an independent client, Triton's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from jaxinfer.protos.oip import open_inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.core.operations import UpdateWeights
from jaxinfer.serve.grpc.oip import FINAL, SERVICE, OpenInference
from jaxinfer.serve.grpc.oip_request import ask_of
from jaxinfer.serve.grpc.tensors import read_scalar
from tests.serve.fake_engine import FIRST_BYTE, Mischief, expected_text
from tests.serve.fake_weights import write_fake_weights
from tests.serve.grpc.running import Running, running

PROMPT = "Hi ö"
IDS = [FIRST_BYTE + byte for byte in PROMPT.encode()]
SAMPLING: dict[str, Any] = {"max_tokens": 24, "seed": 5}
HARMLESS = Mischief()
TEXT = expected_text(IDS, 5, 0, 24)


@contextlib.asynccontextmanager
async def serving(
    mischief: Mischief = HARMLESS, ready: Callable[[], bool] = lambda: True, **how: Any
) -> AsyncIterator[tuple[Running, str]]:
    """Yield a server and its address."""
    async with running(mischief, more=lambda made: [(SERVICE, OpenInference(made, ready))], **how) as run:
        yield run, f"127.0.0.1:{run.servers.port}"


def tensor(name: str, value: Any, datatype: str = "BYTES", shape: tuple[int, ...] = (1,)) -> triton.InferInput:
    made = triton.InferInput(name, list(shape), datatype)
    element = value.encode() if isinstance(value, str) else value
    made.set_data_from_numpy(np.full(shape, element, dtype=object if datatype == "BYTES" else triton_dtype(datatype)))
    return made


def triton_dtype(datatype: str) -> Any:
    return {"BOOL": np.bool_, "INT32": np.int32}[datatype]


def inputs(prompt: Any = PROMPT, sampling: dict[str, Any] | str | None = None, **flags: bool) -> list[Any]:
    text = sampling if isinstance(sampling, str) else json.dumps(SAMPLING if sampling is None else sampling)
    made = [tensor("text_input", prompt), tensor("sampling_parameters", text)]
    return made + [tensor(name, value, "BOOL") for name, value in flags.items()]


def texts(result: Any, name: str = "text_output") -> list[str]:
    return [element.decode() for element in result.as_numpy(name)]


def shape_of(message: Any) -> Any:
    fields = [
        (f.number, f.name, f.type, f.is_repeated, f.containing_oneof.name if f.containing_oneof else "")
        for f in message.fields
    ]
    return message.name, sorted(fields), [shape_of(m) for m in sorted(message.nested_types, key=lambda m: m.name)]


def test_messages_are_those_of_the_published_protocol() -> None:
    theirs = service_pb2.DESCRIPTOR
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        assert shape_of(message) == shape_of(theirs.message_types_by_name[name])
    methods = {m.name: m for m in theirs.services_by_name["GRPCInferenceService"].methods}
    assert theirs.services_by_name["GRPCInferenceService"].full_name == SERVICE.full_name
    for ours in SERVICE.methods:
        other = methods[ours.name]
        assert (ours.input_type.full_name, ours.output_type.full_name) == (
            other.input_type.full_name,
            other.output_type.full_name,
        )
        assert (ours.client_streaming, ours.server_streaming) == (other.client_streaming, other.server_streaming)


def test_health_and_metadata() -> None:
    async def main() -> None:
        state = {"ready": False}
        async with serving(ready=lambda: state["ready"]) as (_, target), triton_aio.InferenceServerClient(target) as c:
            assert await c.is_server_live()
            assert not await c.is_server_ready()
            assert not await c.is_model_ready("fake")
            state["ready"] = True
            assert await c.is_server_ready()
            assert await c.is_model_ready("fake")
            assert await c.is_model_ready("fake", "1")
            assert not await c.is_model_ready("fake", "2")
            assert not await c.is_model_ready("other")
            assert (await c.get_server_metadata()).name == "jaxinfer"
            metadata = await c.get_model_metadata("fake")
            assert {t.name: t.datatype for t in metadata.inputs}["text_input"] == "BYTES"
            assert {t.name: t.datatype for t in metadata.outputs}["num_output_tokens"] == "UINT32"
            with pytest.raises(InferenceServerException, match="'other'"):
                await c.get_model_metadata("other")

    asyncio.run(main())


def test_infer_with_the_synchronous_client() -> None:
    def ask(target: str) -> Any:
        with triton.InferenceServerClient(target) as client:
            assert client.is_server_live()
            return client.infer("fake", inputs(exclude_input_in_output=True), request_id="mine")

    async def main() -> None:
        async with serving() as (_, target):
            result = await asyncio.to_thread(ask, target)
        assert texts(result) == [TEXT]
        assert result.get_response().id == "mine"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "parameters", "expected"),
    [
        (inputs(), {}, {"text_output": [PROMPT + TEXT]}),
        (inputs(sampling={}), SAMPLING, {"text_output": [PROMPT + TEXT]}),
        (inputs(sampling={"seed": "5"}), {"max_tokens": 24}, {"text_output": [PROMPT + TEXT]}),
        (
            inputs(sampling={**SAMPLING, "n": 2}, exclude_input_in_output=True),
            {},
            {"text_output": [TEXT, expected_text(IDS, 5, 1, 24)]},
        ),
        (
            inputs(
                sampling={**SAMPLING, "stop": [TEXT[3:6]]},
                exclude_input_in_output=True,
                return_finish_reason=True,
                return_num_input_tokens=True,
            ),
            {},
            {"text_output": [TEXT[: TEXT.index(TEXT[3:6])]], "finish_reason": ["stop"], "num_input_tokens": [5]},
        ),
        (inputs(sampling={**SAMPLING, "logit_bias": {"7": 1.5}}), {}, {"text_output": [PROMPT + TEXT]}),
    ],
)
def test_infer(given: list[Any], parameters: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    async def main() -> None:
        async with serving() as (run, target), triton_aio.InferenceServerClient(target) as client:
            result = await client.infer("fake", given, parameters=parameters)
            response = result.get_response()
            assert [output.name for output in response.outputs] == list(expected)
            for name, values in expected.items():
                got = texts(result, name) if isinstance(values[0], str) else list(result.as_numpy(name))
                assert got == values
            await run.baseline()

    asyncio.run(main())


def test_the_versions_of_weights_are_told(tmp_path: pathlib.Path) -> None:
    write_fake_weights(tmp_path / "new", "new")

    async def main() -> None:
        how = {"weights_root": str(tmp_path), "mischief": Mischief(seconds=0.005)}
        async with serving(**how) as (run, target), triton_aio.InferenceServerClient(target) as client:

            async def infer(tokens: int) -> Any:
                given = inputs(sampling={**SAMPLING, "max_tokens": str(tokens), "ignore_eos": "true"})
                return (await client.infer("fake", given)).get_response().parameters

            assert (await infer(2))["weight_version"].int64_param == 0
            asked = asyncio.ensure_future(infer(300))
            while not (await run.frontend.stats()).running:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            await run.supervisor.operations.run(UpdateWeights("new", 6, "keep"))
            found = await asked
            assert found["weight_version"].int64_param == 6
            (((old, start, middle), (new, same, end)),) = json.loads(found["weight_versions"].string_param)
            assert (old, start, new, same, end) == (0, 0, 6, middle, 300)
            assert "weight_versions" not in (last := await infer(2))
            assert last["weight_version"].int64_param == 6

    asyncio.run(main())


def test_speculation_may_be_said_in_both_places_and_a_lossy_one_is_told() -> None:
    async def main() -> None:
        how = {"settings": {"speculative": "ngram"}}
        async with serving(**how) as (_, target), triton_aio.InferenceServerClient(target) as client:
            for said, told in (({"max_tokens": "2"}, ""), ({"acceptance": "typical", "enabled": "true"}, "typical")):
                for given, parameters in (
                    (inputs(sampling={**SAMPLING, "speculation": said}), {}),
                    (inputs(), {"speculation": json.dumps(said)}),
                ):
                    response = (await client.infer("fake", given, parameters=parameters)).get_response()
                    assert response.parameters["acceptance"].string_param == told
            for wrong in ({"foo": 1}, "{", "[]", "typical"):
                text = wrong if isinstance(wrong, str) else json.dumps(wrong)
                with pytest.raises(InferenceServerException, match="speculation"):
                    await client.infer("fake", inputs(), parameters={"speculation": text})

    asyncio.run(main())


def test_outputs_by_name() -> None:
    async def main() -> None:
        wanted = [triton.InferRequestedOutput("num_output_tokens"), triton.InferRequestedOutput("text_output")]
        async with serving() as (_, target), triton_aio.InferenceServerClient(target) as client:
            result = await client.infer("fake", inputs(), outputs=wanted)
            assert [output.name for output in result.get_response().outputs] == ["num_output_tokens", "text_output"]
            assert result.as_numpy("num_output_tokens").tolist() == [24]
            assert result.as_numpy("num_output_tokens").dtype == np.uint32

    asyncio.run(main())


def test_contents_are_answered_with_contents() -> None:
    async def main() -> None:
        request = service_pb2.ModelInferRequest(model_name="fake", id="7")
        text = request.inputs.add(name="prompt", datatype="BYTES", shape=[1, 1])
        text.contents.bytes_contents.append(PROMPT.encode())
        flag = request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
        flag.contents.bool_contents.append(True)
        request.parameters["max_tokens"].int64_param = 24
        request.parameters["seed"].int64_param = 5
        async with serving() as (_, target), grpc.aio.insecure_channel(target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            response = await stub.ModelInfer(request)
            assert not response.raw_output_contents
            assert response.outputs[0].contents.bytes_contents == [TEXT.encode()]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())


BAD: list[tuple[str, str, list[Any], dict[str, Any], str]] = [
    ("model", "NOT_FOUND", inputs(), {"model_name": "other"}, "'other'"),
    ("version", "NOT_FOUND", inputs(), {"model_version": "2"}, "model_version='2'"),
    ("no text", "INVALID_ARGUMENT", inputs()[1:], {}, "text_input: the request must have"),
    ("twice", "INVALID_ARGUMENT", [*inputs(), tensor("prompt", "x")], {}, "prompt: .* twice"),
    ("unknown", "INVALID_ARGUMENT", [*inputs(), tensor("images", "x")], {}, "images: there is no such input"),
    ("shape", "INVALID_ARGUMENT", [tensor("text_input", "x", shape=(2,))], {}, r"text_input: shape \[2\]"),
    ("datatype", "INVALID_ARGUMENT", [tensor("text_input", 3, "INT32")], {}, "text_input: datatype 'INT32'"),
    ("flag", "INVALID_ARGUMENT", [*inputs(), tensor("stream", "yes")], {}, "stream: datatype 'BYTES' must be BOOL"),
    ("not UTF-8", "INVALID_ARGUMENT", [tensor("text_input", b"a\xff")], {}, "text_input: it is not UTF-8 at byte 1"),
    ("empty", "INVALID_ARGUMENT", inputs(prompt=""), {}, "prompt"),
    ("streaming", "INVALID_ARGUMENT", inputs(stream=True), {}, "stream: .* ModelStreamInfer"),
    (
        "streaming with the prompt",
        "INVALID_ARGUMENT",
        inputs(stream=True, exclude_input_in_output=False),
        {},
        "exclude_input_in_output",
    ),
    ("no JSON", "INVALID_ARGUMENT", inputs(sampling="{"), {}, "sampling_parameters is not JSON"),
    ("no object", "INVALID_ARGUMENT", inputs(sampling="[]"), {}, "sampling_parameters must be a JSON object"),
    ("NaN", "INVALID_ARGUMENT", inputs(sampling='{"top_p": NaN}'), {}, "sampling_parameters holds NaN"),
    ("depth", "INVALID_ARGUMENT", inputs(sampling="[" * 4000), {}, "sampling_parameters is nested deeper"),
    ("much", "INVALID_ARGUMENT", inputs(sampling="[" * 10**5), {}, "its 100000 bytes hold too much"),
    ("key twice", "INVALID_ARGUMENT", inputs(sampling='{"n": 1, "n": 2}'), {}, "sampling_parameters .*'n' twice"),
    ("name", "INVALID_ARGUMENT", inputs(sampling={"beams": 1}), {}, "beams"),
    ("value", "INVALID_ARGUMENT", inputs(sampling={"top_p": "2"}), {}, "top_p=2"),
    ("text for number", "INVALID_ARGUMENT", inputs(sampling={"top_p": "big"}), {}, "top_p='big'"),
    ("parameter", "INVALID_ARGUMENT", inputs(), {"parameters": {"beams": 1}}, "beams: there is no such parameter"),
    ("both", "INVALID_ARGUMENT", inputs(), {"parameters": {"seed": 1}}, "seed: it is in sampling_parameters and"),
    ("output", "INVALID_ARGUMENT", inputs(), {"outputs": [triton.InferRequestedOutput("logits")]}, "logits: there is"),
    (
        "classes",
        "INVALID_ARGUMENT",
        inputs(),
        {"outputs": [triton.InferRequestedOutput("text_output", class_count=2)]},
        "text_output: its parameter 'classification'",
    ),
    ("sequence", "INVALID_ARGUMENT", inputs(), {"sequence_id": 4}, "sequence_"),
]


@pytest.mark.parametrize(("code", "given", "how", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refusals_name_what_is_wrong(code: str, given: list[Any], how: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with serving() as (run, target), triton_aio.InferenceServerClient(target) as client:
            with pytest.raises(InferenceServerException, match=message) as caught:
                await client.infer(**{"model_name": "fake", "inputs": given, **how})
            assert caught.value.status() == f"StatusCode.{code}"
            await run.baseline()

    asyncio.run(main())


RAW: list[tuple[bytes, bytes, str]] = [
    (b"", b"\1", "text_input: its 0 raw bytes"),
    (b"\5\0\0\0abcd", b"\1", "text_input: its 8 raw bytes"),
    (b"\4\0\0\0abcde", b"\1", "text_input: its 9 raw bytes"),
    (b"\4\0\0\0abcd", b"\2", "stream: its raw content"),
    (b"\4\0\0\0abcd", b"", "stream: its raw content"),
]


@pytest.mark.parametrize(("text", "flag", "message"), RAW)
def test_raw_contents_are_checked(text: bytes, flag: bytes, message: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="fake", raw_input_contents=[text, flag])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    assert message in _refusal(request)


def test_raw_contents_are_for_all_inputs_or_for_none() -> None:
    request = service_pb2.ModelInferRequest(model_name="fake", raw_input_contents=[b""])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    assert "raw_input_contents: there must be one for each input" in _refusal(request)
    request.ClearField("raw_input_contents")
    assert "text_input: contents.bytes_contents must hold 1 element, not 0" in _refusal(request)


def test_shared_memory_is_refused() -> None:
    request = service_pb2.ModelInferRequest(model_name="fake")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.parameters["shared_memory_region"].string_param = "mine"
    assert "text_input: its parameter 'shared_memory_region' is not served" in _refusal(request)


def _refusal(request: Any) -> str:
    async def main() -> str:
        async with serving() as (_, target), grpc.aio.insecure_channel(target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            return caught.value.details() or ""

    return asyncio.run(main())


def test_stream_infer_with_the_synchronous_client() -> None:
    """Many requests share a stream: chunks add up to the whole, the last is marked, an error ends only its request."""

    def ask(target: str) -> dict[str, list[Any]]:
        got: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        with triton.InferenceServerClient(target) as client:
            client.start_stream(callback=lambda result, error: got.put((result, error)))
            for key in ("a", "b"):
                client.async_stream_infer("fake", inputs(stream=True), request_id=key)
            client.async_stream_infer("fake", inputs(sampling={"top_p": 7}), request_id="bad")
            client.async_stream_infer("fake", inputs(exclude_input_in_output=True), request_id="whole")
            found: dict[str, list[Any]] = {}
            while not ended(found):
                result, error = got.get(timeout=10)
                found.setdefault("bad" if error else result.get_response().id, []).append(error or result)
            client.stop_stream()
        assert got.empty()
        return found

    def ended(found: dict[str, list[Any]]) -> bool:
        return "bad" in found and all(key in found and final(found[key][-1]) for key in ("a", "b", "whole"))

    async def main() -> None:
        async with serving(Mischief(seconds=0.005)) as (run, target):  # slow steps, so that chunks are not merged
            found = await asyncio.to_thread(ask, target)
            await run.baseline()
        for key in ("a", "b"):
            assert len(found[key]) > 1
            assert "".join(texts(piece)[0] for piece in found[key]) == TEXT
            assert [final(piece) for piece in found[key]] == [False] * (len(found[key]) - 1) + [True]
        assert [texts(piece) for piece in found["whole"]] == [[TEXT]]
        assert "top_p=7" in found["bad"][0].message()

    asyncio.run(main())


def final(result: Any) -> bool:
    return result.get_response().parameters[FINAL].bool_param


def test_stream_infer_with_the_asynchronous_client_and_two_outputs() -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": "fake",
            "inputs": inputs(sampling={**SAMPLING, "n": 2}, stream=True, return_num_output_tokens=True),
            "enable_empty_final_response": True,
        }

    async def main() -> None:
        made, tokens = ["", ""], [0, 0]
        async with serving() as (_, target), triton_aio.InferenceServerClient(target) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                for index, text in enumerate(texts(result)):
                    made[index] += text
                    tokens[index] += int(result.as_numpy("num_output_tokens")[index])
        assert made == [TEXT, expected_text(IDS, 5, 1, 24)]
        assert tokens == [24, 24]

    asyncio.run(main())


def test_a_client_that_leaves_its_stream_leaves_nothing_behind() -> None:
    async def main() -> None:
        first = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for _ in range(4):
                yield {"model_name": "fake", "inputs": inputs(sampling={"max_tokens": 1500}, stream=True)}
            await first.wait()

        async with serving(Mischief(seconds=0.005)) as (run, target), triton_aio.InferenceServerClient(target) as c:
            stream = c.stream_infer(requests())
            async for _ in stream:
                break
            assert run.frontend.active
            stream.cancel()
            await run.baseline()

    asyncio.run(main())


def test_timeouts_of_request_and_call() -> None:
    async def main() -> None:
        slow = inputs(sampling={"max_tokens": 1500})
        async with serving(Mischief(seconds=0.01)) as (run, target), triton_aio.InferenceServerClient(target) as client:
            with pytest.raises(InferenceServerException, match="deadline") as caught:
                await client.infer("fake", slow, timeout=50_000)
            assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
            with pytest.raises(InferenceServerException):
                await client.infer("fake", slow, client_timeout=0.05)
            await run.baseline()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "microseconds", "earlier"),
    [(5.0, 1_000_000, 1.0), (1.0, 5_000_000, 1.0), (None, 5_000_000, 5.0), (5.0, 0, 5.0), (None, 0, None)],
)
def test_of_two_timeouts_the_earlier_one_counts(call: float | None, microseconds: int, earlier: float | None) -> None:
    request = pb.ModelInferRequest(model_name="fake")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"a")
    request.parameters["timeout"].int64_param = microseconds
    assert ask_of(request, timeout=call, tenant="", trace={}).call.timeout == earlier


@pytest.mark.parametrize("shape", [[], [0], [-1, -1], [1, 1, 1]])
def test_shapes_that_no_client_of_tritons_can_send(shape: list[int]) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=shape)
    tensor.contents.bytes_contents.append(b"a")
    with pytest.raises(ServeError, match="text_input: shape"):
        read_scalar(tensor, None, "BYTES")


def test_more_requests_than_there_is_room_for_wait() -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for key in range(7):
            yield {"model_name": "fake", "inputs": inputs(exclude_input_in_output=True), "request_id": str(key)}

    async def main() -> None:
        most = 0

        async with running(more=lambda made: [(SERVICE, OpenInference(made, lambda: True, size=2))]) as run:
            target = f"127.0.0.1:{run.servers.port}"
            seen = []
            async with triton_aio.InferenceServerClient(target) as client:
                async for result, error in client.stream_infer(requests()):
                    assert error is None
                    most = max(most, run.frontend.active)
                    seen.append((result.get_response().id, texts(result)))
        assert sorted(seen) == [(str(key), [TEXT]) for key in range(7)]
        assert most <= 2

    asyncio.run(main())


def test_a_model_that_is_being_loaded() -> None:
    def loading(_: Any) -> Any:
        def refuse() -> Any:
            raise ServeError(Kind.UNAVAILABLE, "the model is being loaded", retry_after=1.0)

        return refuse

    async def main() -> None:
        async with (
            serving(frontend=loading, ready=lambda: False) as (_, target),
            triton_aio.InferenceServerClient(target) as client,
        ):
            assert await client.is_server_live()
            assert not await client.is_model_ready("fake")
            with pytest.raises(InferenceServerException, match="loaded") as caught:
                await client.infer("fake", inputs())
            assert caught.value.status() == "StatusCode.UNAVAILABLE"

    asyncio.run(main())
