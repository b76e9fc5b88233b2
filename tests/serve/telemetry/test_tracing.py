"""Tests of the spans of generations, as exported to a collector."""

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation, Usage
from jaxinfer.serve.telemetry.tracing import Tracing
from jaxinfer.types import Request
from tests.serve.frontend.test_frontend import PROMPT, served, whole

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(call, tell):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter=exporter)
    tell(tracing.begin(call, "demo"))
    tracing.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_generation_is_a_child_of_the_clients_span():
    def tell(trace):
        trace.accepted(Request("id-1", (1, 2), SamplingParams(temperature=0.5, max_tokens=9, seed=3, n=2)))
        trace.token()
        trace.token()
        trace.finished(Usage(2, 5, 1), ["stop", "length"])

    span = traced(Call(Conversation([]), trace={"TraceParent": PARENT}), tell)
    assert span.name == "chat demo"
    assert format(span.context.trace_id, "032x") == PARENT[3:35]
    assert format(span.parent.span_id, "016x") == PARENT[36:52]
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "demo",
        "gen_ai.response.id": "id-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ("stop", "length"),
    }
    assert wanted.items() <= dict(span.attributes).items()
    assert [event.name for event in span.events] == ["first token"]
    assert span.attributes["gen_ai.response.time_to_first_chunk"] >= 0
    assert span.status.status_code is StatusCode.UNSET


def test_a_fault_is_an_error_and_a_refusal_is_not():
    fault = traced(Call("a"), lambda trace: trace.failed(ServeError(Kind.INTERNAL, "internal error 17")))
    assert (fault.name, fault.status.status_code) == ("text_completion demo", StatusCode.ERROR)
    refusal = traced(Call("a"), lambda trace: trace.failed(ServeError(Kind.INVALID, "n=0 must be at least 1")))
    assert refusal.status.status_code is StatusCode.UNSET
    assert (fault.attributes["error.type"], refusal.attributes["error.type"]) == ("internal", "invalid")
    left = traced(Call("a"), lambda trace: trace.failed(ServeError(Kind.CANCELLED, "the client has left")))
    assert left.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("recorded", [True, False])
def test_who_counts_errors_is_told_of_each_recorded_or_not(recorded):
    told = []
    tracing = Tracing(exporter=InMemorySpanExporter() if recorded else None, failed=told.append)
    error = ServeError(Kind.INVALID, "n=0 must be at least 1")
    tracing.begin(Call("a"), "demo").failed(error)
    tracing.close()
    assert told == [error]


def test_only_plain_http_goes_without_tls(monkeypatch):
    asked = {}

    def exporter(*, endpoint, insecure):
        asked[endpoint] = insecure
        return InMemorySpanExporter()

    monkeypatch.setattr("jaxinfer.serve.telemetry.tracing.OTLPSpanExporter", exporter)
    for endpoint in ("http://a:4317", "https://a:4317", "a:4317"):
        Tracing(endpoint).close()
    assert asked == {"http://a:4317": True, "https://a:4317": False, "a:4317": False}


def test_a_context_that_is_none_is_ignored():
    span = traced(Call("a", trace={"traceparent": "nonsense"}), lambda trace: trace.finished(Usage(1, 1, 0), ["stop"]))
    assert span.parent is None


def test_without_an_endpoint_nothing_is_recorded():
    tracing = Tracing()
    trace = tracing.begin(Call("a"), "demo")
    trace.token()
    trace.finished(Usage(1, 1, 0), ["stop"])
    tracing.close()


def test_the_front_end_tells_how_each_call_went():
    exporter = InMemorySpanExporter()

    async def play():
        tracing = Tracing(exporter=exporter)
        async with served(tracing=tracing) as stage:
            call = Call(
                PROMPT, {"max_tokens": 5, "n": 2, "ignore_eos": True}, request_id="whole", trace={"traceparent": PARENT}
            )
            await whole(stage.frontend, call)
            async with await stage.frontend.generate(Call(PROMPT, {"max_tokens": 200, "ignore_eos": True})) as left:
                await anext(aiter(left))
            with pytest.raises(ServeError):
                await stage.frontend.generate(Call(PROMPT, {"top_p": 2}))
            await stage.pages_are_free()
        tracing.close()

    asyncio.run(play())
    done, left, refused = exporter.get_finished_spans()
    assert format(done.parent.span_id, "016x") == PARENT[36:52]
    assert done.attributes["gen_ai.response.id"] == "whole"
    assert done.attributes["gen_ai.usage.output_tokens"] == 10
    assert done.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert len(done.events) == 1
    assert (left.attributes["error.type"], len(left.events)) == ("cancelled", 1)
    assert (refused.attributes["error.type"], len(refused.events)) == ("invalid", 0)


def test_a_client_that_leaves_before_the_engine_has_accepted_is_told_of(monkeypatch):
    exporter = InMemorySpanExporter()

    async def play():
        tracing = Tracing(exporter=exporter)
        async with served(tracing=tracing) as stage:
            asked = asyncio.Event()

            async def silent(request):
                asked.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(stage.backend, "submit", silent)
            leaving = asyncio.ensure_future(stage.frontend.generate(Call(PROMPT)))
            await asked.wait()
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        tracing.close()

    asyncio.run(play())
    (span,) = exporter.get_finished_spans()
    assert (span.attributes["error.type"], span.status.status_code) == ("cancelled", StatusCode.UNSET)
