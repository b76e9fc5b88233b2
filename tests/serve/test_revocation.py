"""Tests of key revocation: calls of the key end in every API, and other calls continue."""

import asyncio
import contextlib
import json
import pathlib
import time

import grpc
import httpx
import pytest
from grpc import aio

from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.auth import Authoriser, key_entry, new_key
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.settings import ServeConfig
from tests.serve.core.fake_core import command
from tests.serve.fake_engine import write_fake_folder
from tests.serve.grpc.running import failure, request
from tests.serve.live import live

LONG = {"prompt": "Hi", "max_tokens": 2000}  # takes 40 s
BOUND = 20.0


def write(path: pathlib.Path, entries: dict[str, str], scopes: str = "infer") -> None:
    """Write keys by name, atomically."""
    draft = path.with_suffix(".new")
    draft.write_text("".join(key_entry(key, name, [scopes]) for name, key in entries.items()))
    draft.replace(path)


@pytest.fixture
def keys() -> dict[str, str]:
    return {name: new_key() for name in ("goes", "stays")}


# ---- notification of calls


def _told(authoriser: Authoriser, key: str, scope: str = "infer") -> tuple[contextlib.ExitStack, list[ServeError]]:
    """Return an open call of ``key``, and the list of errors that it receives."""
    errors: list[ServeError] = []
    open_call = contextlib.ExitStack()
    open_call.enter_context(authoriser.during(authoriser.authorise(key, scope), scope, errors.append))
    return open_call, errors


def test_open_calls_of_a_key_that_is_gone_are_told(tmp_path: pathlib.Path, keys: dict[str, str]) -> None:
    path = tmp_path / "keys.yaml"
    write(path, keys)
    authoriser = Authoriser(path)
    ended, nothing = _told(authoriser, keys["goes"])
    ended.close()
    going, gone = _told(authoriser, keys["goes"])
    staying, left = _told(authoriser, keys["stays"])
    authoriser.look()
    write(path, {"goes": new_key(), "stays": keys["stays"]})  # the name has a new key
    authoriser.look()
    authoriser.look()
    assert [error.kind for error in gone] == [Kind.UNAUTHENTICATED]
    assert nothing == left == []
    going.close()
    staying.close()


def test_open_calls_of_a_key_that_lost_the_scope_are_told(tmp_path: pathlib.Path, keys: dict[str, str]) -> None:
    path = tmp_path / "keys.yaml"
    write(path, keys)
    authoriser = Authoriser(path)
    going, told = _told(authoriser, keys["goes"])
    path.write_text("nonsense")
    authoriser.look()
    assert told == []
    write(path, keys, "observe")
    authoriser.look()
    assert [error.kind for error in told] == [Kind.FORBIDDEN]
    going.close()


# ---- APIs


async def _event_stream(client: httpx.AsyncClient, key: str, begun: asyncio.Event) -> list[str]:
    body, headers = {**LONG, "stream": True}, {"authorization": f"Bearer {key}"}
    lines = []
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            begun.set()
    return lines


async def _whole(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/v1/completions", json=LONG, headers={"authorization": f"Bearer {key}"})


def _generate(channel: aio.Channel, key: str) -> aio.UnaryStreamCall:
    asked = request(prompt="Hi", sampling={"max_tokens": 2000})
    return InferenceStub(channel).Generate(asked, metadata=(("authorization", f"Bearer {key}"),))


def test_streams_of_a_revoked_key_end_within_a_second(tmp_path: pathlib.Path, keys: dict[str, str]) -> None:
    path = tmp_path / "keys.yaml"
    write(path, keys)
    config = ServeConfig(model="fake", grpc_port=0, http_port=0, api_keys=str(path))
    core = command("--folder", str(write_fake_folder(tmp_path / "model")), "--seconds", "0.02")

    async def story(target: str, url: str) -> None:
        async with aio.insecure_channel(target) as channel, httpx.AsyncClient(base_url=url, timeout=BOUND) as client:
            begun = [asyncio.Event(), asyncio.Event()]
            events = asyncio.ensure_future(_event_stream(client, keys["goes"], begun[0]))
            whole = asyncio.ensure_future(_whole(client, keys["goes"]))
            stays = asyncio.ensure_future(_event_stream(client, keys["stays"], begun[1]))
            calls = {name: _generate(channel, key) for name, key in keys.items()}
            for call in calls.values():
                assert (await call.read()).WhichOneof("event") == "started"
            for each in begun:
                await each.wait()
            write(path, {"stays": keys["stays"]})
            start = time.monotonic()
            async with asyncio.timeout(BOUND):
                lines, answer, failed = await asyncio.gather(events, whole, failure(calls["goes"]))
            print(f"ended after {time.monotonic() - start:.2f} s")
            assert failed.code is grpc.StatusCode.UNAUTHENTICATED
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            told = lines[lines.index("event: error") + 1]
            assert json.loads(told.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
            assert "data: [DONE]" not in lines
            assert (await _whole(client, keys["goes"])).status_code == 401
            assert (await calls["stays"].read()).WhichOneof("event") == "delta"
            assert not stays.done()
            calls["stays"].cancel()
            stays.cancel()
            await asyncio.gather(stays, return_exceptions=True)

    with live(config, core) as server:
        asyncio.run(story(server.target, server.url))
