"""Tests of the `python -m jaxinfer.serve` process: exit statuses, signals, messages and cleanup."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request

import grpc
import pytest

from jaxinfer.client import Client, Health
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.auth import key_entry
from tests.serve.processes import fake_server, is_alive, started, wait_until

SERVE = ["-m", "jaxinfer.serve", "--grpc-port", "0", "--http-port", "off"]
DEMO = [*SERVE, "--model", "demo", "--max-num-seqs", "2", "--max-model-len", "256"]


def last_line(server) -> str:
    return server.log().strip().splitlines()[-1]


@pytest.mark.slow
def test_sigterm_lets_requests_end(tmp_path):
    """SIGTERM lets a stream of the demo model finish, and the exit status is 0."""
    with started([*DEMO, "--http-port", "0"], tmp_path) as server:
        server.until_logged("ready: ")
        core = server.core
        with grpc.insecure_channel(f"127.0.0.1:{server.port('gRPC')}") as channel:
            sampling = pb.SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
            asked = pb.GenerateRequest(prompt="Once", sampling=sampling)
            once = list(InferenceStub(channel).Generate(asked))
            stream = InferenceStub(channel).Generate(asked)
            events = [next(stream), next(stream)]
            server.signal(signal.SIGTERM)
            events += stream
        assert server.wait() == 0
        assert not is_alive(core)
    assert "draining: 1 requests run" in server.log()
    assert _text(events) == _text(once)
    assert events[-1].finished.usage.completion_tokens == 200


def _text(events) -> str:
    return "".join(event.delta.text for event in events)


def test_sighup_to_all_processes_reloads_and_ends_nothing(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("[]")
    with fake_server(tmp_path, api_keys=str(keys)) as server:
        core = server.core
        keys.write_text(key_entry("k" * 40, "alice", ["infer"]))
        for process in (server.process.pid, core):
            os.kill(process, signal.SIGHUP)
        wait_until(lambda: "looked at again" in server.log() and "1 API keys were read again" in server.log())
        with Client(f"127.0.0.1:{server.port('gRPC')}", api_key="k" * 40) as client:
            assert client.generate("Hi", max_tokens=2).text
        assert is_alive(core)
        assert server.core == core


def test_bodies_that_never_end_leave_no_traceback_when_a_drain_is_over(tmp_path):
    heads = ("content-length: 100000\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n5\r\n{")
    with fake_server(tmp_path, drain_seconds=0.5) as server, contextlib.ExitStack() as stack:
        open_ = []
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            for head in heads:
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port), timeout=60))
                first = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                client.sendall((first + head).encode())
                open_.append(client)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=60) as page:
            assert page.status == 200  # all were accepted before this request
        server.signal(signal.SIGTERM)
        assert {client.recv(12) for client in open_} == {b"HTTP/1.1 503"}
        assert server.wait() == 0
        assert "Traceback" not in server.log()


def test_a_server_without_http_has_figures(tmp_path):
    """A metrics port without HTTP works from the start, and stops with the server."""
    with fake_server(tmp_path, http_port=None, metrics_port=0) as server:
        assert "HTTP listens" not in server.log()
        url = f"http://127.0.0.1:{server.port('metrics')}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            assert b"jaxinfer:ready 1.0" in answer.read()
        with urllib.request.urlopen(f"{url}/ready", timeout=30) as answer:
            assert answer.status == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_server_that_leaves_says_so_first_and_goes_on_for_a_while(tmp_path):
    """A draining server first becomes unready, so that balancers and clients move; a second signal ends the wait."""
    with fake_server(tmp_path, drain_delay=1000.0) as server:
        with Client(f"127.0.0.1:{server.grpc_port}", retry=None) as client:
            assert client.health() is Health.SERVING
            server.signal(signal.SIGTERM)
            server.until_logged("not ready any more: requests are taken for 1000 s")
            status, told, _ = asked(server, "/ready")
            assert (status, told["state"], told["reason"]) == (503, "draining", "the server is draining")
            assert client.health() is Health.NOT_SERVING
            assert client.health("") is Health.SERVING
            assert client.generate("Hi", max_tokens=3).outputs[0].finish_reason == "length"
        line = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
        with contextlib.closing(line):  # the client keeps the connection, unless it gets ``Connection: close``
            body = json.dumps({"prompt": "Hi", "max_tokens": 3})
            line.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = line.getresponse()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_after_the_delay_it_drains(tmp_path):
    with fake_server(tmp_path, drain_delay=0.1) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.log().index("not ready any more") < server.log().index("draining: 0 requests run")


def test_what_was_decided_is_in_the_log(tmp_path):
    with fake_server(tmp_path, metrics_port=0) as server:
        (line,) = [line for line in server.log().splitlines() if "serving gRPC" in line]
        for found in (
            f"gRPC at 127.0.0.1:{server.grpc_port}",
            f"the OpenAI API at http://127.0.0.1:{server.http_port}/v1, its page at http://127.0.0.1:{server.http_port}/docs",
            f"figures at http://127.0.0.1:{server.port('metrics')}/metrics",
            f"Control at 127.0.0.1:{server.control_port}",
        ):
            assert found in line


def test_ctrl_c_during_the_start_ends_it_in_order(tmp_path):
    """The terminal signals the whole process group; the core leaves the handling to the front end."""
    with started(DEMO, tmp_path) as server:
        server.until_logged("compiling")
        core = server.core
        server.interrupt()
        assert server.wait() == 0
        assert not is_alive(core)
        assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--model", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["--model", "demo", "--num-pages", "1"], 2, "num_pages"),
        (
            ["--model", "demo", "--max-model-len", "4096"],
            2,
            "max_model_len = 4096 is beyond the model's context of 2048",
        ),
        (["--model", "demo", "--http-port", "65536"], 2, "http_port = 65536 must be a port"),
        (["--model", "demo", "--host", "0.0.0.0"], 2, "host = '0.0.0.0' is not loopback"),
        (["--model", "demo", "--api-keys", "/nowhere/keys"], 2, "/nowhere/keys"),
        (["--config", "/nowhere/config.yaml"], 2, "/nowhere/config.yaml"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(tmp_path, arguments, status, sentence):
    with started([*SERVE, *arguments], tmp_path) as server:
        assert server.wait() == status
    assert last_line(server).startswith("error: ")
    assert sentence in last_line(server)
    assert "listens on port" not in server.log() or "num_pages" in sentence, "what a glance refuses opens no door"
    assert sum(sentence in line for line in server.log().splitlines()) == 1
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("door", ["grpc", "http", "control"])
def test_a_port_in_use_is_one_sentence(tmp_path, door):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started([*SERVE, "--model", "demo", f"--{door}-port", str(port)], tmp_path) as server:
            assert server.wait() == 2
    assert server.log().startswith(f"error: {door}_port={port}: cannot listen on 127.0.0.1: another program does")
    assert f"(--{door}-port)" in last_line(server)
    assert "Traceback" not in server.log()


def asked(server, path: str) -> tuple[int, dict, str | None]:
    """Return status, body and Retry-After."""
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{server.port('HTTP')}{path}", timeout=30)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, json.loads(answer.read()), answer.headers["retry-after"]


def test_a_core_that_cannot_be_started_again_is_told_under_health_and_tried_until_it_can(tmp_path, monkeypatch):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with fake_server(tmp_path) as server:
        assert asked(server, "/health") == asked(server, "/ready") == (200, {"state": "ready"}, None)
        shutil.rmtree(place)
        os.kill(server.core, signal.SIGKILL)
        found: list[tuple] = []

        def is_told() -> bool:
            found[:] = asked(server, "/ready"), asked(server, "/health")
            return all("reason" in told and "ENOENT" in told["reason"] for _, told, _ in found)

        wait_until(is_told)
        assert [status for status, *_ in found] == [503, 200]
        for _, told, seconds in found:
            assert told["reason"] == "the engine core cannot be started: No such file or directory (ENOENT)"
            assert int(seconds) == told["retry_after"] >= 1
        place.mkdir()
        wait_until(lambda: asked(server, "/ready")[0] == 200)
        assert server.process.poll() is None


def test_no_core_outlives_a_front_end_that_is_killed(tmp_path):
    with fake_server(tmp_path) as server:
        core = server.core
        assert is_alive(core)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(core), 10)


def test_no_core_outlives_a_front_end_that_is_killed_while_it_streams(tmp_path):
    with fake_server(tmp_path, "--seconds", "0.01") as server:
        core, first = server.core, threading.Event()

        def read() -> None:
            body = json.dumps({"prompt": "Hi", "max_tokens": 1500, "stream": True}).encode()
            url = f"http://127.0.0.1:{server.port('HTTP')}/v1/completions"
            with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})) as got:
                got.readline()
                first.set()

        threading.Thread(target=read, daemon=True).start()
        assert first.wait(60)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(core), 10)
