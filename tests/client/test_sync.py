"""Tests of the blocking client against the real server over the fake engine, and against misbehaving servers."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from jaxinfer import client as c
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.v1 import inference_pb2 as pb
from tests.client.serving import SEED, Served, expected, scripted, served
from tests.serve.fake_engine import FIRST_BYTE, Mischief

SLOW = Mischief(seconds=0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as run:
        yield run


@pytest.fixture
def client(server: Served) -> Iterator[c.Client]:
    with c.Client(server.target, timeout=20) as made:
        yield made
    server.baseline()


def test_generate(client: c.Client) -> None:
    completion = client.generate("Hi ö", max_tokens=24, seed=SEED, n=2, request_id="mine")
    assert [output.text for output in completion.outputs] == [expected("Hi ö", 24, k) for k in range(2)]
    assert completion.text == expected("Hi ö", 24)
    assert len(completion.token_ids) == 24
    assert (completion.request_id, completion.seed, completion.finish_reason) == ("mine", SEED, "length")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 48)


def test_generate_from_ids_and_messages(client: c.Client) -> None:
    ids = [FIRST_BYTE + byte for byte in b"Hi"]
    assert client.generate(token_ids=ids, max_tokens=9, seed=SEED).text == expected("Hi", 9)
    chat = client.generate(messages=[{"role": "user", "content": "Hi"}], max_tokens=9, seed=SEED)
    assert chat.text == expected("[user] Hi\n[a] ", 9)
    bare = client.generate(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=False, max_tokens=9, seed=SEED
    )
    assert bare.text == expected("[user] Hi\n", 9)


def test_logprobs_and_stops(client: c.Client) -> None:
    text = expected("Hi", 40)
    stop = text[5:8]
    completion = client.generate("Hi", max_tokens=40, seed=SEED, stop=stop, logprobs=2, prompt_logprobs=1)
    output = completion.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert [position.chosen.token_id for position in output.logprobs] == output.token_ids
    assert all(len(position.top) == 2 and position.chosen.rank == 1 for position in output.logprobs)
    assert len(completion.prompt_logprobs) == 1


def test_the_output_says_how_drafts_were_kept() -> None:
    with served(settings={"speculative": "ngram"}) as run, c.Client(run.target, timeout=20) as client:
        for asked, told in (({"max_tokens": 2}, None), ({"acceptance": "typical"}, "typical")):
            completion = client.generate("Hi", max_tokens=24, seed=SEED, n=2, speculation=asked)
            assert [output.text for output in completion.outputs] == [expected("Hi", 24, k) for k in range(2)]
            assert [output.acceptance for output in completion.outputs] == [told] * 2
            deltas = list(client.stream("Hi", max_tokens=9, seed=SEED, speculation=asked))
            assert [delta.acceptance for delta in deltas] == [None] * (len(deltas) - 1) + [told]
        with pytest.raises(c.InvalidRequest, match=r"speculation.max_tokens=-1 must be at least 0"):
            client.generate("Hi", speculation={"max_tokens": -1})


def test_stream() -> None:
    with served(SLOW) as run, c.Client(run.target) as client:
        with client.stream("Hi", max_tokens=24, seed=SEED) as stream:
            assert (stream.seed, stream.prompt_tokens, stream.usage) == (SEED, 2, None)
            deltas = list(stream)
        assert "".join(delta.text for delta in client.stream("Hi", max_tokens=9, seed=SEED)) == expected("Hi", 9)
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == expected("Hi", 24)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 24
    assert stream.completion().text == expected("Hi", 24)


def test_leaving_a_stream_or_cancelling_it_ends_the_request() -> None:
    with served(SLOW) as run, c.Client(run.target) as client:
        with client.stream("Hi", max_tokens=1500) as stream:
            next(stream)
        run.baseline()
        with client.stream("Hi", max_tokens=1500) as stream:
            next(stream)
            threading.Thread(target=stream.cancel).start()
            with pytest.raises(c.Cancelled):
                list(stream)
        run.baseline()


def test_batch(client: c.Client) -> None:
    prompts = [*(f"prompt {k}" for k in range(20)), [FIRST_BYTE + 65], [{"role": "user", "content": "Hi"}], ""]
    items = list(client.generate_batch(iter(prompts), max_tokens=8, seed=SEED))
    assert sorted(item.index for item in items) == list(range(23))
    found = {item.index: item for item in items}
    texts = [*(f"prompt {k}" for k in range(20)), "A", "[user] Hi\n[a] "]
    assert [found[k].result().text for k in range(22)] == [expected(text, 8) for text in texts]
    with pytest.raises(c.InvalidRequest, match="prompt"):
        found[22].result()


def test_batch_raises_what_the_prompts_raise_and_answers_those_before(client: c.Client) -> None:
    def prompts() -> Iterator[Any]:
        yield "first"
        raise KeyError("mine")

    items = client.generate_batch(prompts(), max_tokens=8, seed=SEED)
    assert next(items).result().text == expected("first", 8)
    with pytest.raises(KeyError, match="mine"):
        next(items)


def test_leaving_a_batch_early_cancels_the_rest() -> None:
    with served(SLOW) as run, c.Client(run.target) as client:
        with contextlib.closing(client.generate_batch(["takes 15 s", ""], max_tokens=1500)) as items:
            assert next(items).index == 1
            assert run.run.frontend.active
        run.baseline()


def test_tokenize_detokenize_score_model_info(client: c.Client) -> None:
    ids = client.tokenize("Hö")
    assert ids == [FIRST_BYTE + byte for byte in "Hö".encode()]
    assert client.detokenize(ids) == "Hö"
    assert client.detokenize([0, *ids], skip_special_tokens=True) == "Hö"
    assert client.detokenize(client.tokenize(messages=[{"role": "user", "content": "x"}])) == "[user] x\n[a] "
    first, second = client.score("Hi", continuations=["ab", [FIRST_BYTE]])
    assert [token.text for token in first.tokens] == ["a", "b"]
    assert first.logprob == pytest.approx(sum(token.logprob for token in first.tokens))
    assert len(second.tokens) == 1
    info = client.model_info()
    assert (info.name, info.has_tokenizer, info.has_chat_template) == ("fake", True, True)
    assert info.limits["max_n"] == 128
    assert info.defaults["temperature"] == 1.0
    assert info.engine["page_size"] == 16


def test_errors_are_typed(client: c.Client) -> None:
    with pytest.raises(c.InvalidRequest, match="top_p=2") as invalid:
        client.generate("Hi", top_p=2)
    assert (invalid.value.field, invalid.value.code) == ("top_p", grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(c.NotFound, match="'other'"):
        client.generate("Hi", model="other")
    with pytest.raises(c.NotFound):
        client.model_info(model="other")
    with pytest.raises(c.InvalidRequest, match="ids"), client.stream(token_ids=[10**6]):
        pass
    with pytest.raises(c.DeadlineExceeded):
        client.generate("Hi", max_tokens=1500, timeout=1e-6)


def test_an_id_in_use() -> None:
    with (
        served(SLOW) as run,
        c.Client(run.target) as client,
        client.stream("Hi", max_tokens=1500, request_id="twice"),
        pytest.raises(c.AlreadyExists),
    ):
        client.generate("Hi", request_id="twice")


def test_a_client_has_a_timeout_and_a_call_may_have_another() -> None:
    with served(SLOW) as run, c.Client(run.target, timeout=0.1) as client:
        with pytest.raises(c.DeadlineExceeded):
            client.generate("Hi", max_tokens=1500)
        assert client.generate("Hi", max_tokens=20, seed=SEED, timeout=20).text == expected("Hi", 20)


def test_keys() -> None:
    keys = {"good": ("me", "infer"), "poor": ("you", "observe")}
    with served(keys=keys) as run:
        with c.Client(run.target, api_key="good") as client:
            assert client.tokenize("a") == [FIRST_BYTE + 97]
        with c.Client(run.target, api_key="poor") as client, pytest.raises(c.PermissionDenied):
            client.tokenize("a")
        with c.Client(run.target) as client:
            assert client.health() is c.Health.SERVING
            with pytest.raises(c.Unauthenticated):
                client.tokenize("a")


def failing(error: ServeError, times: int = 1000) -> Any:
    """Return a front end for `served` that fails the first ``times`` generations, and the list of their times."""
    calls: list[float] = []

    def frontend(made: Any) -> Any:
        generate = made.generate

        async def answer(call: Any) -> Any:
            calls.append(time.monotonic())
            if len(calls) <= times:
                raise error
            return await generate(call)

        made.generate = answer
        return lambda: made

    return frontend, calls


def test_retries_until_it_works_and_never_without_a_policy() -> None:
    frontend, calls = failing(ServeError(Kind.UNAVAILABLE, "loading", retry_after=0.05), times=2)
    with served(frontend=frontend) as run:
        with c.Client(run.target, retry=None) as client, pytest.raises(c.Unavailable) as caught:
            client.generate("Hi")
        assert (caught.value.retry_after, len(calls)) == (0.05, 1)
        with c.Client(run.target) as client:
            assert client.generate("Hi", max_tokens=4, seed=SEED).text == expected("Hi", 4)
        assert len(calls) == 3
        assert calls[2] - calls[1] >= 0.045  # the server's retry time


def test_a_full_queue() -> None:
    frontend, calls = failing(ServeError(Kind.QUEUE_FULL, "full", retry_after=0.02))
    with served(frontend=frontend) as run:
        with c.Client(run.target, retry=c.RetryPolicy(attempts=3)) as client, pytest.raises(c.QueueFull) as caught:
            client.generate("Hi")
        assert (caught.value.retry_after, str(caught.value), len(calls)) == (0.02, "full", 3)
        with (
            c.Client(run.target, retry=c.RetryPolicy(queue_full=False)) as client,
            pytest.raises(c.QueueFull),
        ):
            client.generate("Hi")
        assert len(calls) == 4


def test_faults() -> None:
    frontend, _ = failing(ServeError(Kind.INTERNAL, "internal error abc", fault="abc"))
    with served(frontend=frontend) as run, c.Client(run.target) as client:
        with pytest.raises(c.InternalError) as caught:
            client.generate("x")
        assert caught.value.fault == "abc"


def started(request: pb.GenerateRequest) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=request.request_id, started=pb.Started(seed=1, prompt_tokens=2))


def test_a_started_stream_is_not_tried_again() -> None:
    calls = []

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        calls.append(1)
        yield started(request)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with scripted(Generate=generate) as target, c.Client(target) as client, pytest.raises(c.Unavailable, match="gone"):
        client.generate("Hi")
    assert len(calls) == 1


def cancelling(calls: list[int], times: int) -> Any:
    """Return a method for `scripted` that cancels the first calls itself, as a stopping server does."""

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        calls.append(1)
        if len(calls) <= times:
            context.abort(grpc.StatusCode.CANCELLED, "Cancelled on the server side")
        yield started(request)
        yield pb.GenerateResponse(delta=pb.Delta(text="Hi", finish_reason=pb.FINISH_REASON_LENGTH))
        yield pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(completion_tokens=1)))

    return generate


def test_what_a_stopping_server_cancels_is_tried_again() -> None:
    calls: list[int] = []
    with scripted(Generate=cancelling(calls, 2)) as target, c.Client(target) as client:
        assert client.generate("Hi").text == "Hi"
        assert len(calls) == 3
    with scripted(Generate=cancelling(calls, 100)) as target:
        with c.Client(target, retry=c.RetryPolicy(attempts=2)) as client, pytest.raises(c.Cancelled, match="server"):
            client.generate("Hi")
        assert len(calls) == 5
        with c.Client(target, retry=None) as client, pytest.raises(c.Cancelled, match="server"):
            client.generate("Hi")
        assert len(calls) == 6


def test_what_the_caller_cancels_is_not_tried_again() -> None:
    calls, waits = [], threading.Event()

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        calls.append(1)
        context.add_callback(waits.set)
        waits.wait(20)
        yield started(request)

    with scripted(Generate=generate) as target, c.Client(target) as client:
        stream = client.stream("Hi")
        while not calls:
            time.sleep(0.01)
        stream.cancel()
        with pytest.raises(c.Cancelled):
            next(stream)
        assert waits.wait(20)
        time.sleep(0.5)  # longer than the first retry pause
        assert len(calls) == 1


def test_truncated_streams_are_errors() -> None:
    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield started(request)
        yield pb.GenerateResponse(delta=pb.Delta(text="half"))
        if request.sampling.n == 2:  # the stream has an end, the output has none
            yield pb.GenerateResponse(finished=pb.Finished())

    def batch(requests: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield started(next(requests))

    with scripted(Generate=generate, GenerateBatch=batch) as target, c.Client(target) as client:
        with client.stream("Hi") as stream, pytest.raises(c.Truncated):
            list(stream)
        with pytest.raises(c.Truncated):
            client.generate("Hi", n=2)
        with pytest.raises(c.Truncated):
            list(client.generate_batch(["a", "b"]))


def test_a_message_may_be_larger_than_grpc_takes_by_itself() -> None:
    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield started(request)
        yield pb.GenerateResponse(delta=pb.Delta(text="x" * (5 << 20), finish_reason=pb.FINISH_REASON_STOP))
        yield pb.GenerateResponse(finished=pb.Finished())

    with scripted(Generate=generate) as target, c.Client(target) as client:
        assert len(client.generate("Hi").text) == 5 << 20


def test_nobody_listens() -> None:
    with c.Client("127.0.0.1:1", retry=None) as client:
        with pytest.raises(c.Unavailable):
            client.tokenize("x", timeout=5)
        with pytest.raises(c.DeadlineExceeded, match=r"0\.3 s"):
            client.wait_ready(0.3)


def test_wait_ready_waits_for_readiness() -> None:
    with served() as run, c.Client(run.target) as client:
        run.run.supervisor.state = "starting"
        while client.health() is c.Health.SERVING:  # the server checks at intervals
            time.sleep(0.01)
        assert client.health("") is c.Health.SERVING
        with pytest.raises(c.NotFound):
            client.health("nothing")
        with pytest.raises(c.DeadlineExceeded):
            client.wait_ready(0.2)
        timer = threading.Timer(0.1, setattr, (run.run.supervisor, "state", "ready"))
        timer.start()
        client.wait_ready(10)
        assert client.health() is c.Health.SERVING


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({}, TypeError, "one of prompt, token_ids and messages"),
        ({"prompt": "a", "token_ids": [1]}, TypeError, "one of prompt, token_ids and messages"),
        ({"prompt": "a", "beams": 1}, TypeError, "'beams'"),
        ({"prompt": "a", "tools": []}, TypeError, "tools goes with messages"),
        ({"prompt": "a", "max_tokens": 2**63}, ValueError, "max_tokens=9223372036854775808"),
        ({"prompt": "a", "n": "two"}, ValueError, "n='two'"),
        ({"prompt": "\ud800"}, ValueError, "prompt="),
        ({"token_ids": [-1]}, ValueError, "token_ids="),
        ({"prompt": "a", "stop": [3]}, ValueError, "stop="),
        ({"prompt": "a", "bad_words": "abc"}, ValueError, "bad_words='abc' must be a list"),
        ({"prompt": "a", "logit_bias": {-1: 2.0}}, ValueError, "logit_bias="),
    ],
)
def test_what_cannot_be_sent_is_named(client: c.Client, how: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        client.generate(**how)


def test_a_client_and_its_answers_show_themselves_in_few_lines(client: c.Client) -> None:
    with c.Client("example.org:50051", api_key="secret") as plain, c.Client("grpc://[::1]:1", tls=True) as safe:
        assert (repr(plain), repr(safe)) == ("<Client example.org:50051>", "<Client [::1]:1, TLS>")
    completion = client.generate("Hi", max_tokens=400, seed=SEED, ignore_eos=True)
    assert repr(completion).startswith("Completion(request_id=")
    assert "outputs=[Output(text=" in repr(completion)
    assert len(repr(completion)) < 1500


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="attempts=9"):
        c.RetryPolicy(attempts=9)
    with pytest.raises(ValueError, match="first_pause=0"):
        c.RetryPolicy(first_pause=0)
    with pytest.raises(ValueError, match="go together"):
        c.TLS(cert="a.pem")
    with pytest.raises(ValueError, match="api_key"):
        c.Client("x", api_key="a\nb")
    for other in ("http://localhost:8000", "https://a:8000", "grpcs://a:1"):
        with pytest.raises(ValueError, match=f"target='{other}' must be HOST:PORT of the gRPC door"):
            c.Client(other)
        with pytest.raises(ValueError, match="HOST:PORT"):
            c.AsyncClient(other)
    with pytest.raises(FileNotFoundError):
        c.Client("x", tls=c.TLS(ca=pathlib.Path("nowhere.pem")))


def test_import_needs_only_grpcio_and_protobuf() -> None:
    code = (
        "import sys, jaxinfer.client; "
        "print(*sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"jaxinfer", "grpc", "google"} <= set(loaded)
    assert not {"jax", "numpy", "prometheus_client", "pydantic", "fastapi"} & set(loaded)  # grpc loads more itself
    code = "import sys, jaxinfer.client; print('google.rpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
