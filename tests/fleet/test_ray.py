"""Live tests of replicas under Ray Serve: its proxies on loopback, engines without a device in its workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.settings import ServeConfigError
from tests.fleet.raying import BOUND, Application, Cluster, cluster, members, wait_until
from tests.serve.fake_engine import expected_text, expected_tokens, fake_tokenizer
from tests.serve.grpc.running import request

PROMPT = "Hi"
IDS = fake_tokenizer().encode(PROMPT)
MODEL = "fake"
SLOW_STEP = 0.5  # seconds; network and Python overhead are small in comparison
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3"}
BEHIND_HAPROXY = HAPROXY.items() <= os.environ.items()


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster() as found:
        yield found


@pytest.fixture(scope="module")
def app(running: Cluster) -> Application:
    return running.run("fake", [], served_model_name=MODEL)


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "seed": 5, **more}


def asked(**sampling: Any) -> pb.GenerateRequest:
    return request(sampling={"max_tokens": 30, "seed": 5, **sampling})


def stub(channel: grpc.Channel) -> Any:
    return InferenceStub(channel)


@pytest.fixture
def channel(running: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as found:
        yield found


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream; check its end."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- answers


def test_answers_over_http_are_the_engines(app: Application) -> None:
    want = expected_text(IDS, 5, 0, 30)
    answer = app.post("/v1/completions", body())
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == want
    assert len(answer.headers.get_list("x-request-id")) == 1
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    events = events_of(app.post("/v1/completions", body(stream=True)))
    assert len(events) > 3
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == want
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    assert app.post("/v1/chat/completions", chat).json()["usage"]["completion_tokens"] == 8


def test_the_other_routes_are_those_of_a_server(app: Application) -> None:
    assert [each["id"] for each in app.get("/v1/models").json()["data"]] == [MODEL]
    assert app.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    for path in ("/health", "/ready"):
        assert (app.get(path).status_code, app.get(path).json()) == (200, {"state": "ready"})
    assert app.post("/tokenize", {"model": MODEL, "prompt": PROMPT}).json()["tokens"] == IDS
    assert app.figure("generation_tokens_total") > 0
    assert "/v1/completions" in app.get("/openapi.json").json()["paths"]
    assert app.get("/nowhere").json()["error"]["code"] == "route_not_found"


def test_answers_over_grpc_are_the_engines(app: Application, channel: grpc.Channel) -> None:
    want = expected_tokens(IDS, 5, 0, 30)
    events = list(stub(channel).Generate(asked(), metadata=app.metadata, timeout=BOUND))
    assert [i for event in events for i in event.delta.token_ids] == want
    assert events[-1].finished.usage.completion_tokens == 30
    assert stub(channel).Tokenize(pb.TokenizeRequest(text=PROMPT), metadata=app.metadata).token_ids == IDS
    text = stub(channel).Detokenize(pb.DetokenizeRequest(token_ids=IDS), metadata=app.metadata).text
    assert text == PROMPT
    assert stub(channel).GetModelInfo(pb.GetModelInfoRequest(), metadata=app.metadata).name == MODEL
    scored = stub(channel).Score(
        pb.ScoreRequest(prompt=PROMPT, continuations=[{"text": " you"}]), metadata=app.metadata, timeout=BOUND
    )
    assert len(scored.scored) == 1


def test_a_batch_over_grpc_is_answered_each_by_its_id(app: Application, channel: grpc.Channel) -> None:
    requests = [asked(seed=k) for k in range(4)]
    for number, each in enumerate(requests):
        each.request_id = f"r{number}"
    found: dict[str, list[int]] = {}
    for event in stub(channel).GenerateBatch(iter(requests), metadata=app.metadata, timeout=BOUND):
        found.setdefault(event.request_id, []).extend(event.delta.token_ids)
    assert found == {f"r{k}": expected_tokens(IDS, k, 0, 30) for k in range(4)}


def test_a_wrong_field_is_named_over_both(app: Application, channel: grpc.Channel) -> None:
    answer = app.post("/v1/completions", body(top_p=7))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_p")
    with pytest.raises(grpc.RpcError) as caught:
        list(stub(channel).Generate(asked(top_p=7.0), metadata=app.metadata))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("top_p=7")


def test_a_wrong_setting_is_refused_before_anything_runs(running: Cluster) -> None:
    with pytest.raises(ServeConfigError, match="max_num_seqs = 0"):
        running.run("wrong", [], max_num_seqs=0)


def test_an_engine_is_in_a_group_of_its_own_processes(app: Application) -> None:
    """The engine core leads its own process group, which Ray's event loop cannot set up when it starts a process."""
    (core,) = app.cores()
    assert os.getpgid(core) == core


def test_nobody_else_imports_ray() -> None:
    code = (
        "import sys, jaxinfer.serve.__main__, jaxinfer.integrations.replicas.settings; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=BOUND).returncode == 0


# ---- client disconnects


@pytest.fixture(scope="module")
def slow(running: Cluster) -> Application:
    return running.run("slow", ["--seconds", str(SLOW_STEP)], served_model_name=MODEL)


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_stream_whose_client_goes_away_stops_within_two_steps(
    slow: Application, channel: grpc.Channel, door: str
) -> None:
    before = slow.figure("generation_tokens_total")
    seen = _read_over_http(slow, 3) if door == "http" else _read_over_grpc(slow, channel, 3)
    wait_until(lambda: slow.figure("num_requests_running") == 0)
    late = door == "http" and BEHIND_HAPROXY  # haproxy notices the disconnect at its next write
    assert seen <= slow.figure("generation_tokens_total") - before <= seen + 2 + late


def _read_over_http(app: Application, tokens: int) -> int:
    """Read ``tokens`` tokens, and disconnect."""
    with streamed(app) as answer:
        return len(list(_first(answer.iter_lines(), "data: ", tokens)))


def streamed(app: Application) -> contextlib.AbstractContextManager[httpx.Response]:
    """Return a long stream."""
    return httpx.stream("POST", f"{app.url}/v1/completions", json=body(stream=True, max_tokens=1000), timeout=BOUND)


def _read_over_grpc(app: Application, channel: grpc.Channel, tokens: int) -> int:
    seen, call = 0, stub(channel).Generate(asked(max_tokens=1000), metadata=app.metadata, timeout=BOUND)
    for event in call:
        seen += len(event.delta.token_ids)
        if seen >= tokens:
            break
    call.cancel()
    return seen


def _first(lines: Iterator[str], prefix: str, count: int) -> Iterator[str]:
    found = (line for line in lines if line.startswith(prefix))
    for _ in range(count):
        yield next(found)


# ---- keys


def test_keys_are_asked_for_over_both(running: Cluster, channel: grpc.Channel, tmp_path: pathlib.Path) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(key_entry(key, "alice", ["infer"]))
    app = running.run("keys", [], served_model_name=MODEL, api_keys=str(file))
    bearer = f"Bearer {key}"
    assert app.post("/v1/completions", body()).status_code == 401
    assert app.post("/v1/completions", body(), headers={"authorization": bearer}).status_code == 200
    assert app.get("/metrics", headers={"authorization": bearer}).status_code == 403
    assert app.get("/health").status_code == 200
    call = stub(channel).Generate
    with pytest.raises(grpc.RpcError) as caught:
        list(call(asked(), metadata=app.metadata))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert list(call(asked(), metadata=[*app.metadata, ("authorization", bearer)]))[-1].HasField("finished")


# ---- engine failures


@pytest.mark.slow
def test_an_engine_that_dies_is_started_again_by_its_replica(running: Cluster) -> None:
    app = running.run("dying", ["--seconds", "0.02"], served_model_name=MODEL)
    (core,) = app.cores()
    (replica,) = app.replicas()
    assert os.getpgid(core) == core
    with httpx.stream(
        "POST", f"{app.url}/v1/completions", json=body(stream=True, max_tokens=1000), timeout=BOUND
    ) as it:
        lines = it.iter_lines()
        next(lines)
        os.kill(core, signal.SIGKILL)
        assert "the engine does not run" in "".join(lines)
    wait_until(lambda: app.get("/ready").status_code == 200 and app.cores())
    assert app.cores() != [core]
    assert app.replicas() == [replica]
    assert app.post("/v1/completions", body()).status_code == 200


@pytest.mark.slow
def test_a_replica_whose_engine_does_not_come_back_is_replaced(running: Cluster, tmp_path: pathlib.Path) -> None:
    """New cores cannot start until there is another replica."""
    closed = tmp_path / "closed"
    timing = {"startup_timeout": 2, "health_check_period_s": 0.5}
    app = running.run("lost", [], closed, served_model_name=MODEL, **timing)
    (replica,) = app.replicas()
    closed.touch()
    os.kill(app.cores()[0], signal.SIGKILL)
    wait_until(lambda: replica not in app.replicas())
    closed.unlink()
    wait_until(lambda: app.replicas() not in ([], [replica]))
    assert app.post("/v1/completions", body()).status_code == 200


# ---- load, and upgrades


@pytest.mark.slow
def test_replicas_follow_what_waits_and_runs(running: Cluster) -> None:
    app = running.run(
        "scaled",
        ["--seconds", "0.05", "--slots", "2"],
        served_model_name=MODEL,
        max_replicas=2,
        target_ongoing_requests=100,
        target_waiting_requests=2,
        upscale_delay_s=0.5,
        downscale_delay_s=1,
        look_back_period_s=2,
    )
    assert len(app.replicas()) == 1
    done = threading.Event()

    def ask() -> int:
        while not done.is_set():
            assert app.post("/v1/completions", body(max_tokens=40)).status_code == 200
        return 0

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        try:
            wait_until(lambda: len(app.replicas()) == 2)
        finally:
            done.set()
        assert not sum(each.result(BOUND) for each in asking)
    wait_until(lambda: len(app.replicas()) == 1)


def test_an_upgrade_under_load_loses_nothing(running: Cluster) -> None:
    settings = {"served_model_name": MODEL, "num_replicas": 2, "drain_delay": 0.5}
    app = running.run("rolled", ["--seconds", "0.02"], **settings)
    before, done, ended = set(app.replicas()), threading.Event(), Counter[str]()

    def client(number: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
            while not done.is_set():
                ended[_over_http(app) if number % 2 else _over_grpc(app, channel)] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        running.run("rolled", ["--seconds", "0.02"], **settings, limit_n=3)
        wait_until(lambda: len(app.replicas()) == 2 and not before & set(app.replicas()))
        so_far = ended["whole"]
        wait_until(lambda: ended["whole"] > so_far + 8)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert dict(ended) == {"whole": ended.total()}


def _over_http(app: Application) -> str:
    try:
        answer = app.post("/v1/completions", body(stream=True))
        return (
            "whole" if answer.text.endswith("data: [DONE]\n\n") else f"http: {answer.status_code} {answer.text[-200:]}"
        )
    except httpx.HTTPError as error:
        return f"http: {error!r}"


def _over_grpc(app: Application, channel: grpc.Channel) -> str:
    try:
        events = list(stub(channel).Generate(asked(), metadata=app.metadata, timeout=BOUND))
        return "whole" if events[-1].HasField("finished") else "grpc: cut"
    except grpc.RpcError as error:
        return f"grpc: {error.code()} {error.details()[-200:]}"


# ---- the real engine


@pytest.mark.slow
def test_a_real_model_says_what_it_says_in_a_program(running: Cluster, channel: grpc.Channel) -> None:
    settings = {"max_num_seqs": 4, "max_model_len": 256, "prefill_sizes": [64]}
    app = running.run("demo", None, model="demo", **settings)
    want = _in_a_program(SamplingParams(temperature=0.8, seed=7, max_tokens=24), settings)
    given = {"temperature": 0.8, "seed": 7, "max_tokens": 24}
    answer = app.post("/v1/completions", {"model": "demo", "prompt": "ROMEO:", **given, "logprobs": 1})
    assert answer.json()["choices"][0]["text"] == want[0]
    events = stub(channel).Generate(request(prompt="ROMEO:", sampling=given), metadata=app.metadata, timeout=BOUND)
    assert [i for event in events for i in event.delta.token_ids] == want[1]


def _in_a_program(params: SamplingParams, settings: dict[str, Any]) -> tuple[str, list[int]]:
    llm = LLM(model="demo", **{**settings, "prefill_sizes": (64,)})
    (output,) = llm.generate(["ROMEO:"], params)[0].outputs
    return output.text, list(output.token_ids)


@pytest.mark.slow
def test_a_replica_of_two_processes_says_what_one_says(running: Cluster, channel: grpc.Channel) -> None:
    """Each process has a bundle and one of two devices; if one ends, the replica is replaced."""
    shape = {"model": "demo", "max_num_seqs": 4, "max_model_len": 256, "prefill_sizes": [64], "tensor_parallel_size": 2}
    want = _asked_of_one_process(shape)
    app = running.run("pair", None, num_processes=2, group_timeout=60, health_check_period_s=0.5, **shape)
    given = {"temperature": 0.8, "seed": 7, "max_tokens": 24}
    events = stub(channel).Generate(request(prompt="ROMEO:", sampling=given), metadata=app.metadata, timeout=BOUND)
    assert [i for event in events for i in event.delta.token_ids] == want
    (replica,) = app.replicas()
    (member,) = members()
    os.kill(member, signal.SIGKILL)
    wait_until(lambda: app.replicas() not in ([], [replica]))
    events = stub(channel).Generate(request(prompt="ROMEO:", sampling=given), metadata=app.metadata, timeout=BOUND)
    assert [i for event in events for i in event.delta.token_ids] == want
    app.delete()
    wait_until(lambda: not members())


def _asked_of_one_process(shape: dict[str, Any]) -> list[int]:
    """Return the tokens of one process with two devices."""
    code = f"""
from jaxinfer import LLM, SamplingParams
llm = LLM(**{ {**shape, "prefill_sizes": (64,)} })
print(list(llm.generate(["ROMEO:"], SamplingParams(temperature=0.8, seed=7, max_tokens=24))[0].outputs[0].token_ids))
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **flags}, capture_output=True, check=True)
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])
    return tokens


# ---- Ray's other proxy


@pytest.mark.slow
def test_the_same_holds_behind_haproxy() -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "fleet and not slow", __file__]
    done = subprocess.run([sys.executable, *words], env={**os.environ, **HAPROXY}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
