"""Tests that each API's assembled stream equals its unary answer for any split or merge of an engine's deltas, and
every answer equals that of single tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.client.results import Answer
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.protos.oip import open_inference_pb2 as oip_pb
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.grpc.inference import Inference
from jaxinfer.serve.grpc.oip import FINAL, OpenInference
from jaxinfer.serve.grpc.rpc import Rpc
from jaxinfer.serve.http.app import build_app
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.text.output import Output
from jaxinfer.types import FinishReason, PositionLogprobs, Request, SequenceDelta, TokenLogprob
from tests.serve.fake_engine import FIRST_BYTE, VOCAB, fake_card, fake_template, fake_tokenizer

TOKENIZER = fake_tokenizer()
# The prompt ends within a character: the bytes that complete it belong to the output.
IDS = [FIRST_BYTE + byte for byte in "Hé".encode()[:-1]]
TEXTS = st.text("aé狐🦊b", min_size=1, max_size=10)
TOKENS = st.one_of(
    TEXTS.map(lambda text: [FIRST_BYTE + byte for byte in text.encode()]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
)
CUTS = st.sets(st.integers(1, 40), max_size=12)
many = settings(max_examples=60, deadline=None)
REASONS = st.sampled_from([FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT])


@dataclasses.dataclass
class Whole:
    """An output; fields that an API does not return are None."""

    text: str = ""
    reason: str | None = None
    tokens: list[int] | None = None
    logprobs: list[float] | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True)
class Script:
    """The engine's output for every request.

    Attributes:
        tokens, reasons: of each output.
        cuts: start indices of each output's deltas.
        order: order of the outputs, repeated.
    """

    tokens: Sequence[list[int]]
    reasons: Sequence[FinishReason]
    cuts: Sequence[set[int]]
    order: Sequence[int]

    def deltas(self, request: Request) -> Iterator[SequenceDelta]:
        left = [iter(list(self._output(request, index))) for index in range(len(self.tokens))]
        for index in itertools.chain(self.order, itertools.chain.from_iterable([range(len(left))] * 64)):
            if (delta := next(left[index % len(left)], None)) is not None:
                yield delta

    def _output(self, request: Request, index: int) -> Iterator[SequenceDelta]:
        tokens = self.tokens[index]
        places = [0, *sorted(cut for cut in self.cuts[index] if cut < len(tokens)), len(tokens)]
        for begin, end in itertools.pairwise(places):
            new, reason = tokens[begin:end], self.reasons[index] if end == len(tokens) else None
            stop = tokens[-1] if reason is FinishReason.STOP else None
            logprobs = (
                [position(begin + k, t) for k, t in enumerate(new)] if request.params.logprobs is not None else ()
            )
            yield SequenceDelta(request.request_id, index, new, logprobs, reason, stop)


def position(place: int, token: int) -> PositionLogprobs:
    chosen = TokenLogprob(token, -0.5 * (place + 1), 1)
    return PositionLogprobs(chosen, (chosen,))


class Scripted:
    """A scripted `Backend`."""

    def __init__(self) -> None:
        self.script = Script([], [], [], [])
        self.request: Request | None = None

    async def submit(self, request: Request) -> ScriptedStream:
        if request.params.seed is None:
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=1))
        self.request = request
        return ScriptedStream(request, self.script)

    async def abort(self, request_id: str, index: int | None = None) -> None: ...

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> int:
        raise NotImplementedError


class ScriptedStream:
    def __init__(self, request: Request, script: Script) -> None:
        self.request, self._script = request, script

    async def __aiter__(self) -> AsyncIterator[SequenceDelta]:
        for delta in self._script.deltas(self.request):
            yield delta

    @property
    def idle(self) -> bool:
        return False

    def listen(self, listener: Callable[[], None]) -> None: ...

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def aclose(self) -> None: ...


class Wire(Rpc):
    """A call without a transport; stores the messages that its servicer writes as bytes."""

    def __init__(self, *requests: Message) -> None:
        super().__init__(None, Message, 0)
        self.sent: list[bytes] = []
        self._requests = list(requests)

    def time_remaining(self) -> None:
        return None

    def trace(self) -> dict[str, str]:
        return {}

    async def read(self) -> Message | None:
        return self._requests.pop(0) if self._requests else None

    async def write(self, message: Message) -> None:
        self.sent.append(message.SerializeToString())


class Doors:
    """All APIs over one front end, in one event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.backend = Scripted()
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.frontend = Frontend(self.backend, fake_card(), TOKENIZER, fake_template())
        await self.frontend.warm()
        self.inference = Inference(lambda: self.frontend)
        self.oip = OpenInference(lambda: self.frontend, lambda: True)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(build_app(AppState("1", frontend=self.frontend))), base_url="http://doors"
        )

    def close(self) -> None:
        self.runner.run(self.http.aclose())
        self.runner.run(self.frontend.aclose())
        self.runner.close()

    def expected(self) -> list[Whole]:
        """Return the outputs of the last request, detokenized token by token."""
        request, script = self.backend.request, self.backend.script
        assert request is not None
        singly = dataclasses.replace(script, cuts=[set(range(1, 99))] * len(script.tokens), order=[])
        outputs = [Output(TOKENIZER, request) for _ in script.tokens]
        found = [Whole(tokens=[], logprobs=[]) for _ in script.tokens]
        for delta in singly.deltas(request):
            output, whole = outputs[delta.index], found[delta.index]
            if not output.ended:
                piece = output.take(delta)
                whole.text += piece.text
                whole.tokens += piece.token_ids
                whole.logprobs += [each.chosen.logprob for each in piece.logprobs]
                whole.reason = piece.finish_reason
                whole.stop_reason = piece.stop_reason
        return found

    # ---- gRPC

    async def generate(self, sampling: dict[str, Any]) -> list[Whole]:
        """Assemble the Generate stream with the client library."""
        wire = Wire()
        await self.inference.Generate(_grpc_request(sampling), wire)
        answer, texts = Answer(), [""] * sampling["n"]
        for raw in wire.sent:
            if (delta := answer.take(pb.GenerateResponse.FromString(raw))) is not None:
                texts[delta.index] += delta.text
        whole = [_of_client(output) for output in answer.completion().outputs]
        assert [each.text for each in whole] == texts
        return whole

    async def batch(self, sampling: dict[str, Any]) -> list[list[Whole]]:
        wire = Wire(*(_grpc_request(sampling, request_id=str(k)) for k in range(2)))
        await self.inference.GenerateBatch(wire, wire)
        answers = {str(k): Answer() for k in range(2)}
        for raw in wire.sent:
            response = pb.GenerateResponse.FromString(raw)
            answers[response.request_id].take(response)
        return [[_of_client(output) for output in answer.completion().outputs] for answer in answers.values()]

    async def infer(self, sampling: dict[str, Any]) -> tuple[list[Whole], list[Whole]]:
        """Return the outputs of ModelInfer, and those assembled from ModelStreamInfer."""
        unary = await self.oip.ModelInfer(_oip_request(sampling, stream=False), Wire())
        wire = Wire(_oip_request(sampling, stream=True))
        await self.oip.ModelStreamInfer(wire, wire)
        pieces = [oip_pb.ModelStreamInferResponse.FromString(raw).infer_response for raw in wire.sent]
        assert [piece.parameters[FINAL].bool_param for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        streamed = [Whole() for _ in range(sampling["n"])]
        for piece in pieces:
            for whole, part in zip(streamed, _of_oip(piece), strict=True):
                whole.text, whole.reason = whole.text + part.text, part.reason or whole.reason
        return _of_oip(unary), streamed

    # ---- HTTP

    async def unary(self, path: str, body: dict[str, Any]) -> list[Whole]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return [_of_choice(choice, choice.get("message")) for choice in answer.json()["choices"]]

    async def streamed(self, path: str, body: dict[str, Any]) -> list[Whole]:
        answer = await self.http.post(path, json={**body, "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        found = [Whole() for _ in range(body["n"])]
        for choice in (choice for event in events for choice in json.loads(event)["choices"]):
            part, whole = _of_choice(choice, choice.get("delta")), found[choice["index"]]
            whole.text += part.text
            for name in ("tokens", "logprobs"):
                if getattr(part, name) is not None:
                    setattr(whole, name, (getattr(whole, name) or []) + getattr(part, name))
            assert whole.reason is None
            whole.reason, whole.stop_reason = part.reason, part.stop_reason
        return found


def _grpc_request(sampling: dict[str, Any], **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), sampling=pb.SamplingParams(**sampling), **fields)


def _of_client(output: Any) -> Whole:
    logprobs = [each.chosen.logprob for each in output.logprobs]
    return Whole(output.text, output.finish_reason, list(output.token_ids), logprobs, output.stop_reason)


def _oip_request(sampling: dict[str, Any], *, stream: bool) -> oip_pb.ModelInferRequest:
    request = oip_pb.ModelInferRequest(model_name="fake")
    values = {
        "text_input": b"Hi",
        "sampling_parameters": json.dumps(sampling).encode(),
        "return_finish_reason": True,
        "exclude_input_in_output": True,
        "stream": stream,
    }
    for name, value in values.items():
        made = request.inputs.add(name=name, datatype="BYTES" if isinstance(value, bytes) else "BOOL", shape=[1])
        (made.contents.bytes_contents if isinstance(value, bytes) else made.contents.bool_contents).append(value)
    return request


def _of_oip(response: oip_pb.ModelInferResponse) -> list[Whole]:
    columns = {tensor.name: tensor.contents.bytes_contents for tensor in response.outputs}
    pairs = zip(columns["text_output"], columns["finish_reason"], strict=True)
    return [Whole(text.decode(), reason.decode() or None) for text, reason in pairs]


def _of_choice(choice: dict[str, Any], message: dict[str, Any] | None) -> Whole:
    """Convert a completion choice, or a chat choice with its ``message`` or delta."""
    given = choice["logprobs"]
    if message is None:
        text, logprobs = choice["text"], given and given["token_logprobs"]
    else:
        text, logprobs = message.get("content") or "", given and [each["logprob"] for each in given["content"]]
    return Whole(text, choice["finish_reason"], choice.get("token_ids"), logprobs, choice.get("stop_reason"))


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    n = draw(st.integers(1, 2))
    return Script(
        [draw(TOKENS) for _ in range(n)],
        [draw(REASONS) for _ in range(n)],
        [draw(CUTS) for _ in range(n)],
        draw(st.lists(st.integers(0, n - 1), max_size=8)),
    )


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seed": 1,
        "max_tokens": 99,
        "stop": draw(st.lists(st.text("aé狐🦊b", min_size=1, max_size=3), max_size=3)),
        "include_stop_str_in_output": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 4)),
        "skip_special_tokens": draw(st.booleans()),
    }
    if draw(st.booleans()):
        found["stop_token_ids"] = [FIRST_BYTE + ord("a"), FIRST_BYTE + ord("b")]
    return found


def told(whole: Sequence[Whole], *fields: str) -> list[Whole]:
    """Return the outputs without the fields that an API does not return."""
    return [dataclasses.replace(each, **dict.fromkeys(fields)) for each in whole]


@many
@given(scripts(), samplings(), st.booleans())
def test_grpc(doors: Doors, script: Script, sampling: dict[str, Any], logprobs: bool) -> None:
    doors.backend.script = script
    sampling = {**sampling, "n": len(script.tokens)} | ({"logprobs": 1} if logprobs else {})
    found = doors.runner.run(doors.generate(sampling))
    assert found == doors.expected()
    assert doors.runner.run(doors.batch(sampling)) == [found, found]


@many
@given(scripts(), samplings())
def test_open_inference(doors: Doors, script: Script, sampling: dict[str, Any]) -> None:
    doors.backend.script = script
    unary, streamed = doors.runner.run(doors.infer({**sampling, "n": len(script.tokens)}))
    assert unary == streamed == told(doors.expected(), "tokens", "logprobs", "stop_reason")


@many
@given(scripts(), samplings(), st.booleans(), st.booleans(), st.booleans())
def test_http(
    doors: Doors, script: Script, sampling: dict[str, Any], chat: bool, logprobs: bool, token_ids: bool
) -> None:
    doors.backend.script = script
    body = {**sampling, "n": len(script.tokens), "return_token_ids": token_ids}
    if chat:
        path, body = "/v1/chat/completions", body | {"messages": [{"role": "user", "content": "Hé"}]}
        body |= {"logprobs": True, "top_logprobs": 1} if logprobs else {}
    else:
        path, body = "/v1/completions", body | {"prompt": IDS} | ({"logprobs": 1} if logprobs else {})
    unary = doors.runner.run(doors.unary(path, body))
    streamed = doors.runner.run(doors.streamed(path, body))
    missing = [name for name, asked in (("tokens", token_ids), ("logprobs", logprobs)) if not asked]
    assert unary == streamed == told(doors.expected(), *missing)
