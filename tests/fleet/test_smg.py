"""Tests of replicas behind SMG: identical responses, and a defined end of every stream when a replica is killed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import httpx
import pytest

from jaxinfer.protos.v1 import control_pb2, control_pb2_grpc
from tests.fleet.smg import Crowd, Router, Stream, routing
from tests.serve.fake_engine import FIRST_BYTE, expected_text
from tests.serve.processes import BOUND, ServerProcess, fake_server, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STEP = 0.02
PROMISED = 2.0  # seconds until the streams of a dead router have ended
PATIENCE = 10.0  # seconds allowed on a busy machine

TALK = [{"role": "user", "content": "Who goes there?"}]
SAID: list[tuple[str, Mapping[str, Any]]] = [
    (CHAT, {"messages": TALK, "max_tokens": 24, "temperature": 0.8, "seed": 7}),
    (CHAT, {"messages": TALK, "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": TALK, "max_tokens": 40, "temperature": 0.9, "seed": 3, "n": 2}),
    (CHAT, {"messages": TALK, "max_tokens": 48, "temperature": 0, "top_p": 0.5, "stop": ["\n", "."]}),
    (COMPLETIONS, {"prompt": "ROMEO:", "max_tokens": 24, "temperature": 0}),
    (COMPLETIONS, {"prompt": "ROMEO:", "max_tokens": 24, "temperature": 1.1, "seed": 9, "frequency_penalty": 0.5}),
    (COMPLETIONS, {"prompt": "Once", "max_tokens": 64, "temperature": 0, "stop": ["the"]}),
]


# ---- responses


@pytest.fixture(scope="module")
def demos(programs: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, list[str]]]:
    """Yield a router started before its replicas had loaded their model, and the replicas' URLs."""
    folder = tmp_path_factory.mktemp("demos")
    flags = [
        "--model",
        "demo",
        "--vllm-grpc",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "256",
    ]
    with contextlib.ExitStack() as stack:
        replicas = []
        for name in ("a", "b"):
            replica = ServerProcess(["-m", "jaxinfer.serve", *flags], folder / f"{name}.log")
            stack.callback(replica.end)
            replicas.append(replica)
        for replica in replicas:
            replica.until_logged("HTTP listens")
        targets = [f"127.0.0.1:{replica.grpc_port}" for replica in replicas]
        router = stack.enter_context(routing(programs / "smg", targets, folder / "smg.log", ready=False))
        for replica in replicas:
            replica.until_logged("ready: ")
        router.until_routing(2)
        yield router, [f"http://127.0.0.1:{replica.http_port}" for replica in replicas]


@pytest.mark.parametrize(("path", "fields"), SAID)
def test_a_whole_answer_is_the_replicas_own(
    demos: tuple[Router, list[str]], path: str, fields: Mapping[str, Any]
) -> None:
    router, (own, _) = demos
    # SMG adds no BOS token to prompts of completions
    body = {"model": "demo", **fields}
    expected = httpx.post(own + path, json={**body, "add_special_tokens": False} if path == COMPLETIONS else body)
    for _ in range(2):  # one request per replica
        found = httpx.post(router.url + path, json=body, timeout=BOUND)
        assert found.status_code == expected.status_code == 200, (found.text, expected.text)
        for choice, wanted in zip(found.json()["choices"], expected.json()["choices"], strict=True):
            assert gist(choice) == gist(wanted)
            logprobs, own_logprobs = logprobs_of(choice), logprobs_of(wanted)
            assert logprobs == pytest.approx(own_logprobs[: len(logprobs)], abs=1e-4)
            # SMG omits the logprobs of the stop token
            assert 0 <= len(own_logprobs) - len(logprobs) <= 4 * (choice["finish_reason"] == "stop")
        usage, own_usage = found.json()["usage"], expected.json()["usage"]
        assert usage["completion_tokens"] == own_usage["completion_tokens"]


def gist(choice: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return index, text and finish reason."""
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return choice["index"], text, choice["finish_reason"]


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """Return the logprobs of each token and of the top three tokens at its position."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    return [each["logprob"] for position in content for each in (position, *position["top_logprobs"])]


@pytest.mark.parametrize(("path", "fields"), [(path, fields) for path, fields in SAID if "n" not in fields])
def test_a_streamed_answer_is_the_replicas_own(
    demos: tuple[Router, list[str]], path: str, fields: Mapping[str, Any]
) -> None:
    router, (own, _) = demos
    body = {"model": "demo", **fields}
    direct = {**body, "add_special_tokens": False} if path == COMPLETIONS else body

    async def story() -> None:
        (expected,) = await Crowd(own, path, [direct]).run()
        found = await Crowd(router.url, path, [body] * 4).run()
        assert expected.is_complete
        assert [(s.text, s.reason, s.fate) for s in found] == [(expected.text, expected.reason, "complete")] * 4

    asyncio.run(story())


def test_both_replicas_have_worked(demos: tuple[Router, list[str]]) -> None:
    router, replicas = demos
    for _ in range(2):
        assert httpx.post(router.url + COMPLETIONS, json={"model": "demo", "prompt": "A", "max_tokens": 2}).is_success
    for replica in replicas:
        lines = httpx.get(f"{replica}/metrics", timeout=BOUND).text.splitlines()
        (count,) = [line for line in lines if line.startswith("jaxinfer:generation_tokens_total")]
        assert float(count.rpartition(" ")[2]) > 0


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"top_p": 1.5}, "top_p"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 4, "stop": ["x" * 2000]}, "stop")],
)
def test_what_is_wrong_is_the_clients_fault(
    demos: tuple[Router, list[str]], fields: Mapping[str, Any], word: str
) -> None:
    router, _ = demos
    body = {"model": "demo", "messages": TALK, "max_tokens": 4, **fields}
    found = httpx.post(router.url + CHAT, json=body, timeout=BOUND)
    assert 400 <= found.status_code < 500
    assert word in found.text


# ---- ends of streams


def body_of(rank: int, tokens: int) -> dict[str, Any]:
    """Return a chat for the fake engine, determined by ``rank``."""
    messages = [{"role": "user", "content": f"Hello {rank}"}]
    return {"model": "fake", "messages": messages, "max_tokens": tokens, "seed": rank, "temperature": 0}


def whole_text(body: Mapping[str, Any]) -> str:
    """Return the fake engine's answer; SMG omits an incomplete character."""
    prompt = f"[user] {body['messages'][0]['content']}\n[a] ".encode()
    ids = [FIRST_BYTE + byte for byte in prompt]
    return expected_text(ids, body["seed"], 0, body["max_tokens"]).rstrip("\N{REPLACEMENT CHARACTER}")


def judged(streams: list[Stream]) -> collections.Counter[str]:
    """Count the streams by end; none may be cut silently, and each text must be a prefix of the replica's."""
    for stream in streams:
        expected = whole_text(stream.body)
        assert stream.status is not None or stream.error is not None
        assert stream.fate != "cut", stream
        assert stream.text == expected if stream.is_complete else expected.startswith(stream.text), stream
    return collections.Counter(stream.fate for stream in streams)


@contextlib.contextmanager
def fakes(folder: pathlib.Path, count: int) -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        found = []
        for rank in range(count):
            (own := folder / str(rank)).mkdir(parents=True)
            found.append(stack.enter_context(fake_server(own, "--seconds", str(STEP), vllm_grpc=True)))
        yield found


def targets_of(replicas: list[ServerProcess]) -> list[str]:
    return [f"127.0.0.1:{replica.grpc_port}" for replica in replicas]


def stats_of(replica: ServerProcess) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{replica.control_port}") as channel:
        return control_pb2_grpc.ControlStub(channel).GetStats(control_pb2.GetStatsRequest(), timeout=BOUND)


def is_idle(replica: ServerProcess) -> bool:
    """Return whether nothing runs or waits, and no page is held."""
    stats = stats_of(replica)
    return not (stats.running or sum(stats.waiting.values()) or stats.kv_pages["held"])


@pytest.mark.parametrize(("rounds", "count"), [(1, 40), pytest.param(10, 100, marks=pytest.mark.slow)])
def test_no_stream_is_cut_or_doubled_when_a_replica_is_killed(
    programs: pathlib.Path, tmp_path: pathlib.Path, rounds: int, count: int
) -> None:
    async def story(router: Router, victim: ServerProcess) -> None:
        begun = Crowd(router.url, CHAT, [body_of(rank, 250) for rank in range(count)])
        task = asyncio.create_task(begun.run())
        await begun.until(lambda stream: bool(stream.text or stream.error), share=0.5)
        later = Crowd(router.url, CHAT, [body_of(rank, 16) for rank in range(count)])
        in_the_moment = asyncio.create_task(later.run())
        os.killpg(victim.process.pid, signal.SIGKILL)
        fates = judged(await task)
        assert fates["complete"] > 0
        assert fates["error"] > 0  # else the kill was too late
        judged(await in_the_moment)
        again = judged(await Crowd(router.url, CHAT, [body_of(rank, 16) for rank in range(count)]).run())
        assert again == {"complete": count}
        print(f"killed a replica under {count} streams: {dict(fates)}")

    for turn in range(rounds):
        folder = tmp_path / str(turn)
        with (
            fakes(folder, 2) as replicas,
            routing(programs / "smg", targets_of(replicas), folder / "smg.log") as router,
        ):
            asyncio.run(story(router, replicas[1]))
            wait_until(lambda survivor=replicas[0]: is_idle(survivor))


@pytest.mark.parametrize(("rounds", "count"), [(1, 40), pytest.param(10, 100, marks=pytest.mark.slow)])
def test_replicas_end_the_streams_of_a_router_that_is_killed(
    programs: pathlib.Path, tmp_path: pathlib.Path, rounds: int, count: int
) -> None:
    async def story(router: Router, replicas: list[ServerProcess]) -> None:
        crowd = Crowd(router.url, CHAT, [body_of(rank, 1500) for rank in range(count)])
        task = asyncio.create_task(crowd.run())
        await crowd.until(lambda stream: bool(stream.text or stream.error))
        assert not any(is_idle(replica) for replica in replicas)
        router.kill()
        killed = time.monotonic()
        while not all(is_idle(replica) for replica in replicas):
            assert time.monotonic() < killed + PATIENCE, "streams whose reader has gone still run"
            await asyncio.sleep(0.01)
        print(f"a router killed under {count} streams: all over after {time.monotonic() - killed:.2f} s of {PROMISED}")
        assert judged(await task) == {"error": count}

    with fakes(tmp_path / "replicas", 2) as replicas:
        for turn in range(rounds):
            with routing(programs / "smg", targets_of(replicas), tmp_path / f"smg{turn}.log") as router:
                asyncio.run(story(router, replicas))
        with routing(programs / "smg", targets_of(replicas), tmp_path / "again.log") as router:
            crowd = Crowd(router.url, CHAT, [body_of(rank, 16) for rank in range(count)])
            assert judged(asyncio.run(crowd.run())) == {"complete": count}
