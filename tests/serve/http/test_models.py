"""Tests of models by name: the base model, its adapters, and vLLM's routes that load and unload adapters."""

import asyncio
import contextlib
import json
import pathlib
from typing import Any

import pytest

from jaxinfer.serve.api.auth import key_entry, new_key
from tests.lora.fakes import Folders
from tests.serve.http.support import events, run, serving

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HELLO = [{"role": "user", "content": "Hi"}]
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [3, 4]}),
]


def folder(root: pathlib.Path, folders: Folders, name: str, content: int) -> str:
    (root / name).mkdir(exist_ok=True)
    folders.contents[str((root / name).resolve())] = content
    return name


@contextlib.asynccontextmanager
async def served(root: pathlib.Path, **settings: Any):
    """Yield a server with two loaded adapters, its client, and the folders, one of which is not loaded."""
    folders = Folders()
    async with serving(folders=folders, root=root, **settings) as running, running.http() as client:
        for content, name in enumerate(("pirate", "poet", "third"), 1):
            folder(root, folders, name, content)
        for name in ("pirate", "poet"):
            await running.frontend.loras.load(name, name)
        submit, submitted = running.engine.submit, []

        async def noted(request):
            submitted.append(request.lora)
            return await submit(request)

        running.engine.submit, running.submitted = noted, submitted
        yield running, client, folders


def test_adapters_are_models_with_a_parent(tmp_path):
    async def test():
        async with served(tmp_path) as (_, client, _):
            base, *adapters = (await client.get("/v1/models")).json()["data"]
            assert (base["id"], base["root"], base["parent"]) == ("fake", "fake", None)
            roots = [str((tmp_path / name).resolve()) for name in ("pirate", "poet")]
            for adapter, name, root in zip(adapters, ("pirate", "poet"), roots, strict=True):
                assert adapter == base | {"id": name, "root": root, "parent": "fake"}
                assert (await client.get(f"/v1/models/{name}")).json() == adapter
            assert (await client.get("/v1/models/fake")).json() == base
            error = (await client.get("/v1/models/third")).json()["error"]
            assert error["message"] == (
                "model='third' is not served here, only 'fake' and the adapters 'pirate', 'poet'"
            )

    run(test)


@pytest.mark.parametrize(("path", "body"), CHATS)
def test_answers_have_the_name_that_was_asked_for(tmp_path, path, body):
    async def test():
        async with served(tmp_path) as (running, client, _):
            for model, identity in (("pirate", "1"), ("poet", "2"), ("fake", None)):
                answer = await client.post(path, json=body | {"model": model})
                assert (answer.status_code, answer.json()["model"]) == (200, model)
                chunks = events((await client.post(path, json=body | {"model": model, "stream": True})).text)
                assert model in json.dumps(chunks[0]), "the name stands in the first event"
                assert requested(running).pop() == identity
            answer = await client.post(path, json=body | {"model": "nobody"})
            assert answer.status_code == 404
            assert "only 'fake' and the adapters 'pirate', 'poet'" in answer.json()["error"]["message"]

    run(test)


def requested(running) -> set[str | None]:
    """Return the identities of the adapters in requests since the last call."""
    found = {None if lora is None else lora.identity for lora in running.submitted}
    running.submitted.clear()
    return found


@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_what_generates_nothing_knows_the_names(tmp_path, path, body):
    async def test():
        async with served(tmp_path) as (_, client, _):
            plain = await client.post(path, json=body | {"model": "fake"})
            assert (await client.post(path, json=body | {"model": "pirate"})).json() == plain.json()
            assert (await client.post(path, json=body | {"model": "nobody"})).status_code == 404

    run(test)


def test_fingerprints_tell_adapters_apart_by_what_they_are(tmp_path):
    async def test():
        async with served(tmp_path) as (running, client, folders):

            async def fingerprint(model: str) -> str:
                answer = await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "model": model})
                return answer.json()["system_fingerprint"]

            found = [await fingerprint(name) for name in ("fake", "pirate", "poet", "pirate")]
            assert len(set(found)) == 3
            assert found[1] == found[3]
            folder(tmp_path, folders, "pirate", 7)
            await running.frontend.loras.load("pirate", "pirate")
            assert await fingerprint("pirate") not in found

    run(test)


def test_adapters_come_and_go(tmp_path):
    async def test():
        async with served(tmp_path) as (running, client, folders):
            third = {"lora_name": "third", "lora_path": "third"}
            ask = {"prompt": "Hi", "max_tokens": 1, "model": "third"}
            assert (await client.post("/v1/completions", json=ask)).status_code == 404
            answer = await client.post(LOAD, json=third)
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' added successfully.")
            assert (await client.post("/v1/completions", json=ask)).status_code == 200
            folder(tmp_path, folders, "third", 8)
            answer = await client.post(LOAD, json=third)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                "lora_name='third' has already been loaded: set load_inplace to true to replace it"
            )
            assert running.frontend.loras.resolve("third").identity == "3"
            answer = await client.post(LOAD, json=third | {"load_inplace": True, "lora_path": str(tmp_path / "third")})
            assert answer.status_code == 200
            assert running.frontend.loras.resolve("third").identity == "8"
            answer = await client.post(UNLOAD, json={"lora_name": "third"})
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
            assert (await client.post("/v1/completions", json=ask)).status_code == 404
            answer = await client.post(UNLOAD, json={"lora_name": "third"})
            assert answer.status_code == 404

    run(test)


def test_a_reload_changes_none_of_the_prompts_of_a_request(tmp_path):
    """A reload does not affect waiting prompts: all prompts of a request use the adapter loaded at its arrival."""

    async def test():
        async with served(tmp_path, engine={"max_num_seqs": 1}) as (running, client, folders):
            prompts = [f"{k} {'x' * 400}" for k in range(60)]
            body = {"prompt": prompts, "max_tokens": 3, "model": "pirate"}
            asked = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while not running.submitted:
                await asyncio.sleep(0)
            folder(tmp_path, folders, "pirate", 7)
            await running.frontend.loras.load("pirate", "pirate")
            assert len(running.submitted) < len(prompts), "the reload comes in between"
            assert (await asked).status_code == 200
            assert requested(running) == {"1"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert requested(running) == {"7"}

    run(test)


BAD: list[tuple[str, Any, str]] = [
    (LOAD, {}, "lora_name"),
    (LOAD, {"lora_name": "a"}, "lora_path"),
    (LOAD, {"lora_name": 1, "lora_path": "third"}, "lora_name=1"),
    (LOAD, {"lora_name": "a", "lora_path": ["third"]}, "lora_path"),
    (LOAD, {"lora_name": "a", "lora_path": "third", "load_inplace": "yes"}, "load_inplace='yes'"),
    (LOAD, {"lora_name": "a", "lora_path": "third", "pinned": True}, "pinned is not a field"),
    (LOAD, {"lora_name": "a", "lora_path": "third", "is_3d_lora_weight": True}, "is_3d_lora_weight=True is not served"),
    (LOAD, [], "the body must be a JSON object"),
    (LOAD, {"lora_name": "", "lora_path": "third"}, "lora_name='' must have 1 to 128"),
    (LOAD, {"lora_name": "a\nb", "lora_path": "third"}, "lora_name="),
    (LOAD, {"lora_name": "\x1b[2J", "lora_path": "third"}, "lora_name="),
    (LOAD, {"lora_name": "a" * 129, "lora_path": "third"}, "lora_name="),
    (LOAD, {"lora_name": "fake", "lora_path": "third"}, "lora_name='fake' is the name of the model itself"),
    (LOAD, {"lora_name": "a", "lora_path": "../third"}, "lora_path '../third' is not a path below"),
    (LOAD, {"lora_name": "a", "lora_path": "/"}, "lora_path '/' is no folder below"),
    (LOAD, {"lora_name": "a", "lora_path": "/etc/passwd"}, "lora_path '/etc/passwd' is no folder below"),
    (LOAD, {"lora_name": "a", "lora_path": "out"}, "lora_path 'out' is no folder below"),
    (LOAD, {"lora_name": "a", "lora_path": "linked"}, "lora_path 'linked': adapter_config.json is no regular file"),
    (LOAD, {"lora_name": "a", "lora_path": "x" * 5000}, "lora_path="),
    (LOAD, {"lora_name": "a", "lora_path": "thi\0rd"}, "lora_path="),
    (LOAD, {"lora_name": "a", "lora_path": "empty"}, "no such folder"),
    (UNLOAD, {}, "lora_name"),
    (UNLOAD, {"lora_name": "a", "lora_int_id": 3}, "lora_int_id=3 is not served"),
    (UNLOAD, {"lora_name": "fake"}, "lora_name='fake' is not served here"),
]


def test_bodies_that_ask_for_what_cannot_be(tmp_path):
    async def test():
        async with served(tmp_path) as (_, client, _):
            (tmp_path / "out").symlink_to("/etc")
            for name in ("linked", "empty"):
                (tmp_path / name).mkdir()
            (tmp_path / "linked" / "adapter_config.json").symlink_to("/etc/passwd")
            before = (await client.get("/v1/models")).json()
            for path, body, words in BAD:
                answer = await client.post(path, json=body)
                wanted = 404 if body == {"lora_name": "fake"} else 400
                assert (answer.status_code, words in answer.json()["error"]["message"]) == (wanted, True), answer.text
            assert (await client.post(LOAD, content=b"lora_name=a")).status_code == 400
            assert (await client.get(LOAD)).status_code == 405
            assert (await client.get("/v1/models")).json() == before

    run(test)


def test_bodies_are_bounded(tmp_path):
    async def test():
        async with serving(folders=Folders()) as running, running.http() as client:
            answer = await client.post(LOAD, content=b" " * (17 << 20), headers={"content-type": "application/json"})
            assert answer.status_code == 413

    run(test)


def test_operators_alone_may_change_adapters(tmp_path):
    keys, made = tmp_path / "keys.yaml", {"user": new_key(), "operator": new_key()}
    scopes = {"user": ["infer", "observe"], "operator": ["admin"]}
    keys.write_text("".join(key_entry(key, name, scopes[name]) for name, key in made.items()))
    root = tmp_path / "adapters"
    root.mkdir()

    async def test():
        async with served(root, keys=keys) as (_, client, _):
            third = {"lora_name": "third", "lora_path": "third"}
            for path, body in ((LOAD, third), (UNLOAD, {"lora_name": "third"})):
                assert (await client.post(path, json=body)).status_code == 401
                assert (await client.post(path, json=body, headers=bearer("user"))).status_code == 403
                assert (await client.post(path, json=body, headers=bearer("operator"))).status_code == 200
            assert (await client.get("/v1/models", headers=bearer("user"))).status_code == 200

    def bearer(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {made[name]}"}

    run(test)


def test_where_nothing_tells_operators_apart_nobody_may(tmp_path):
    async def test():
        async with served(tmp_path, operated=False) as (_, client, _):
            answer = await client.post(LOAD, json={"lora_name": "third", "lora_path": "third"})
            assert answer.status_code == 403
            assert "is for operators" in answer.json()["error"]["message"]
            assert (await client.get("/v1/models")).status_code == 200

    run(test)


def test_servers_without_adapters_say_so(tmp_path):
    async def test():
        async with serving() as running, running.http() as client:
            for path, body in ((LOAD, {"lora_name": "a", "lora_path": "b"}), (UNLOAD, {"lora_name": "a"})):
                answer = await client.post(path, json=body)
                assert (answer.status_code, "without enable_lora" in answer.text) == (400, True)
            answer = await client.post("/v1/completions", json={"prompt": "Hi", "model": "a"})
            assert answer.json()["error"]["message"] == "model='a' is not served here, only 'fake'"
            assert len((await client.get("/v1/models")).json()["data"]) == 1

    run(test)
