"""Tests of vLLM's routes that change a running engine."""

import asyncio

import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from tests.serve.fake_engine import Mischief
from tests.serve.fake_weights import digest_of, write_fake_weights
from tests.serve.http.support import events, run, serving

SLOW = Mischief(seconds=0.005)
ASKED = {"prompt": "Hi", "max_tokens": 60, "seed": 1, "ignore_eos": True}
OPERATIONS = (
    *(("POST", path) for path in ("/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/update_weights")),
    *(("POST", path) for path in ("/start_weight_update", "/finish_weight_update")),
    *(("POST", path) for path in ("/update_weight_version", "/weight_checker", "/init_weight_transfer_engine")),
    *(("GET", path) for path in ("/is_paused", "/is_sleeping", "/weight_info")),
)


@pytest.fixture
def root(tmp_path):
    write_fake_weights(tmp_path / "weights" / "new", "new")
    return tmp_path / "weights"


def test_a_pause_and_its_end():
    async def test():
        async with serving(SLOW) as running, running.http() as client:
            assert (await client.get("/is_paused")).json() == {"is_paused": False}
            first = asyncio.ensure_future(client.post("/v1/completions", json=ASKED))
            while not running.frontend.active:
                await asyncio.sleep(0.005)
            state = (await client.post("/pause", params={"mode": "keep", "clear_cache": "true"})).json()
            assert state == {"weight_version": 0, "is_paused": True, "is_sleeping": False}
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            assert (await client.get("/ready")).status_code == 200
            assert not first.done()
            assert (await client.post("/resume")).json()["is_paused"] is False
            assert (await first).json()["choices"][0]["finish_reason"] == "length"
            first = asyncio.ensure_future(client.post("/v1/completions", json=ASKED))
            await asyncio.sleep(0.05)
            assert (await client.post("/pause")).json()["is_paused"] is True  # it waits
            assert (await first).json()["choices"][0]["finish_reason"] == "length"

    run(test)


def test_while_paused_deadlines_pass_and_a_drain_ends():
    async def test():
        async with serving(SLOW) as running, running.http() as client:
            await client.post("/pause", params={"mode": "keep"})
            answer = await client.post("/v1/completions", json=ASKED, headers={"X-Request-Timeout": "0.2"})
            assert answer.status_code == 504
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=ASKED))
            while not running.frontend.active:
                await asyncio.sleep(0.005)
            assert await running.frontend.drain(0.2) == 1
            assert (await waiting).status_code == 503
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            await client.post("/resume")
            await running.quiet()

    run(test)


def test_all_requests_are_aborted():
    async def test():
        async with serving(SLOW) as running, running.http() as client:
            asked = [asyncio.ensure_future(client.post("/v1/completions", json=ASKED)) for _ in range(3)]
            while running.frontend.active < 3:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert (await client.post("/abort_requests")).json() == {"aborted": 3}
            answers = [(await each).json() for each in asked]
            assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 3

    run(test)


def test_sleep_and_wake_up():
    async def test():
        async with serving() as running, running.http() as client:
            state = (await client.post("/sleep", params={"level": 2, "tags": ["weights", "kv_cache"]})).json()
            assert state == {"weight_version": 0, "is_paused": True, "is_sleeping": True}
            answer = await client.post("/resume")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "engine")
            await client.post("/wake_up?tags=weights")
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True, "asleep": ["kv_cache"]}
            assert (await client.post("/wake_up")).json()["is_paused"] is False
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False, "asleep": []}

    run(test)


def test_new_weights_and_their_version_in_every_answer(root):
    async def test():
        async with serving(weights_root=str(root)) as running, running.http() as client:
            await client.post("/update_weights", json={"path": "new", "weight_version": 4, "mode": "keep"})
            answer = await client.post("/update_weights", json={"path": str(root / "new")})
            assert answer.json() == {
                "weight_version": 5, "is_paused": False, "is_sleeping": False, "bytes": 3, "seconds": 0.5,
            }  # fmt: skip
            assert (await client.get("/weight_info")).json()["weight_version"] == 5
            text = (await client.post("/v1/completions", json={**ASKED, "n": 2})).json()
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            said = (await client.post("/v1/chat/completions", json=chat)).json()
            assert [choice["weight_version"] for choice in text["choices"] + said["choices"]] == [5, 5, 5]
            response = await client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4})
            message = await client.post("/v1/messages", json={**chat, "model": "fake"})
            assert [answer.json()["weight_version"] for answer in (response, message)] == [5, 5]
            for path, body in (("/v1/completions", ASKED), ("/v1/chat/completions", chat)):
                chunks = events((await client.post(path, json={**body, "stream": True})).text)
                found = [choice.get("weight_version") for chunk in chunks[:-1] for choice in chunk["choices"]]
                assert found == [None] * (len(found) - 1) + [5]
            streamed = (await client.post("/v1/responses", json={"input": "Hi", "stream": True})).text
            assert events(streamed)[-1]["response"]["weight_version"] == 5
            streamed = events((await client.post("/v1/messages", json={**chat, "model": "fake", "stream": True})).text)
            assert [event["weight_version"] for event in streamed if event["type"] == "message_delta"] == [5]

    run(test)


def test_folders_of_a_started_update_are_served_as_one_version(root):
    for name in ("more", "last"):
        write_fake_weights(root / name, name)

    async def test():
        async with serving(weights_root=str(root)) as running, running.http() as client:
            state = {"weight_version": 0, "is_paused": False, "is_sleeping": False}
            assert (await client.post("/finish_weight_update")).status_code == 400  # none was started
            assert (await client.post("/start_weight_update", json={"is_checkpoint_format": True})).json() == state
            assert (await client.post("/finish_weight_update")).status_code == 400  # it has no folder
            await client.post("/update_weights", json={"path": "last"})
            assert (await client.post("/start_weight_update")).json() == state  # drops the folder
            for path in ("new", "more"):
                answer = await client.post("/update_weights", json={"path": path})
                assert answer.json() == {**state, "bytes": 0, "seconds": 0.0}
            for wrong, field in (
                ({"path": "old"}, "path"),
                ({"path": "new"}, "path"),
                ({"path": "last", "version": 3}, "version"),
            ):
                answer = await client.post("/update_weights", json=wrong)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert (await client.get("/weight_info")).json() == state
            answer = await client.post("/finish_weight_update", json={"weight_version": 0})
            assert answer.json()["error"]["param"] == "version"
            answer = await client.post("/finish_weight_update", json={"weight_version": 4, "mode": "keep"})
            assert answer.json() == {**state, "weight_version": 4, "bytes": 7, "seconds": 0.5}
            sums = (await client.get("/weight_info?checksums=true")).json()["checksums"]
            assert sums == {"text": digest_of("newmore")}
            assert (await client.post("/finish_weight_update")).status_code == 400  # it has ended
            answer = await client.post("/update_weights", json={"path": "last"})
            assert answer.json()["weight_version"] == 5

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_of_several_versions_has_their_ranges(root, stream):
    async def test():
        async with serving(SLOW, weights_root=str(root)) as running, running.http() as client:
            body = {**ASKED, "max_tokens": 400, "stream": stream}
            asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
            for version in (2, 7):
                before = (await running.engine.stats()).generated_tokens
                while (await running.engine.stats()).generated_tokens < before + 3:
                    await asyncio.sleep(0.005)
                update = {"path": "new", "version": version, "mode": "keep"}
                assert (await client.post("/update_weights", json=update)).status_code == 200
            answer = await asked
            last = events(answer.text)[-2] if stream else answer.json()
            (choice,) = last["choices"]
            ranges = choice["weight_versions"]
            assert [each["version"] for each in ranges] == [0, 2, 7]
            assert [each["end"] for each in ranges] == [each["start"] for each in ranges[1:]] + [400]
            assert (ranges[0]["start"], choice["weight_version"]) == (0, 7)

    run(test)


def test_a_version_alone_and_digests(root):
    async def test():
        async with serving(weights_root=str(root)) as running, running.http() as client:
            for given in (3, "4"):
                answer = await client.post("/update_weight_version", json={"new_version": given})
                assert answer.json()["weight_version"] == int(given)
            sums = {"text": digest_of("start")}
            assert (await client.get("/weight_info?checksums=true")).json()["checksums"] == sums
            assert (await client.post("/weight_checker", json={"action": "checksum"})).json() == {"checksums": sums}
            for baseline, wrong in ((sums, []), ({"text": "0", "more": "1"}, ["more", "text"])):
                answer = await client.post("/weight_checker", json={"action": "compare", "baseline": baseline})
                assert answer.json() == {"match": not wrong, "mismatches": wrong}

    run(test)


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        ("/pause?mode=now", None, "mode"),
        ("/pause?modus=keep", None, "modus"),
        ("/pause?clear_cache=perhaps", None, "clear_cache"),
        ("/sleep?level=3", None, "level"),
        ("/sleep?tags=heads", None, "tags"),
        ("/sleep?mode=soon", None, "mode"),
        ("/wake_up?tags=weights,heads", None, "tags"),
        ("/resume?now=1", None, "now"),
        ("/update_weights", {"path": "new", "mode": "later"}, "mode"),
        ("/update_weights", {"path": "new", "version": 0}, "version"),
        ("/update_weights", {"path": "new", "version": 2**63}, "version"),
        ("/update_weights", {"path": "new", "version": 1, "weight_version": 2}, "weight_version"),
        ("/update_weights", {"path": "new", "update_info": {"names": []}}, "update_info"),
        ("/update_weights", {"path": ""}, "path"),
        ("/update_weights", {"path": "old"}, "path"),
        ("/update_weights", {}, "path"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/finish_weight_update", {"version": 1, "weight_version": 2}, "weight_version"),
        ("/update_weight_version", {"new_version": "v1"}, "new_version"),
        ("/update_weight_version", {"new_version": 0}, "new_version"),
        ("/weight_checker", {"action": "reset"}, "action"),
        ("/weight_checker", {"action": "compare"}, "baseline"),
        ("/weight_checker", {"baseline": {}}, "baseline"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(root, path, asked, field):
    async def test():
        async with serving(weights_root=str(root)) as running, running.http() as client:
            answer = await client.post(path, json=asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            state = (await client.get("/weight_info")).json()
            assert state == {"weight_version": 0, "is_paused": False, "is_sleeping": False}

    run(test)


def test_weights_need_a_root_and_do_not_come_over_nccl():
    async def test():
        async with serving() as running, running.http() as client:
            answer = await client.post("/update_weights", json={"path": "new"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
            assert (await client.post("/init_weight_transfer_engine", json={"init_info": {}})).status_code == 400

    run(test)


def test_operators_alone_may_change_the_engine(tmp_path):
    key, file = new_key(), tmp_path / "keys"
    file.write_text(key_entry(key, "client", ["infer", "observe"]))

    async def test():
        async with serving(keys=file) as running, running.http(headers={"Authorization": f"Bearer {key}"}) as client:
            for method, path in OPERATIONS:
                assert (await client.request(method, path, json={})).status_code == 403
        async with serving(operated=False) as running, running.http() as client:
            for method, path in OPERATIONS:
                assert (await client.request(method, path, json={})).status_code in (401, 403, 404)

    run(test)
