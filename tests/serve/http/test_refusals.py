"""Tests of rejected requests, their statuses and messages."""

import json
import logging

import pytest
from starlette.routing import Route

from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.core.supervisor import Condition
from jaxinfer.serve.http import completions
from jaxinfer.serve.http.app import SCOPES
from tests.serve.fake_engine import Mischief
from tests.serve.http.support import events, post, raw, run, serving
from tests.text.test_contents import NOT_TEXT

PROMPT = {"prompt": "Hi"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


BAD_FIELDS = [
    ("completions", {}, "prompt", "prompt is missing"),
    ("completions", {"prompt": None}, "prompt", "prompt=None"),
    ("completions", {"prompt": ["a", 1]}, "prompt[1]", "prompt"),
    ("completions", {"prompt": [1, True]}, "prompt[1]", "prompt[1]=True"),
    ("completions", {"prompt": [1, -1]}, "prompt", "prompt: -1"),
    ("completions", {"prompt": ""}, "prompt", "prompt is empty"),
    ("completions", {"prompt": ["Hi", ""]}, "prompt[1]", "prompt[1] is empty"),
    ("completions", {"prompt": [[5], [5, 10**6]]}, "prompt[1]", "prompt[1]: 1000000"),
    ("completions", {"prompt": "Hi", "echo": True, "logprobs": 99}, "logprobs", "logprobs=99"),
    ("completions", {"prompt": ["a"] * 2000}, "prompt", "at most 1024"),
    ("completions", {"prompt": "Hi", "suffix": "x"}, "suffix", "suffix='x' is not served"),
    ("completions", {"prompt": "Hi", "best_of": 3}, "best_of", "best_of=3"),
    ("completions", {"prompt": "Hi", "stream": "yes"}, "stream", "stream='yes'"),
    ("completions", {"prompt": "Hi", "stream_options": {"x": 1}}, "stream_options.x", "not a field"),
    ("completions", {"prompt": "Hi", "temprature": 1}, "temprature", "temprature is not a field"),
    ("completions", {"prompt": "Hi", "temperature": "1"}, "temperature", "temperature='1'"),
    ("completions", {"prompt": "Hi", "temperature": True}, "temperature", "temperature=True"),
    ("completions", {"prompt": "Hi", "max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ("completions", {"prompt": "Hi", "max_tokens": 1.5}, "max_tokens", "max_tokens=1.5"),
    ("completions", {"prompt": "Hi", "n": 10**6}, "n", "n=1000000"),
    ("completions", {"prompt": "Hi", "logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ("completions", {"prompt": "Hi", "logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    ("completions", {"prompt": "Hi", "stop": ""}, "stop", "stop"),
    ("completions", {"prompt": "Hi", "priority": "high"}, "priority", "priority='high'"),
    ("completions", {"prompt": "Hi", "request_id": "a\nb"}, "request_id", "printable"),
    ("chat/completions", {"messages": []}, "messages", "messages=[]"),
    ("chat/completions", {"messages": ["Hi"]}, "messages[0]", "messages[0]='Hi'"),
    ("chat/completions", {"messages": [{"content": "Hi"}]}, "messages[0].role", "role=None"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "content=3"),
    *(
        ("chat/completions", {"messages": [{"role": "user", "content": content}]}, f"messages[0]{where}", "=")
        for content, where in NOT_TEXT
        if not isinstance(content, bytes)
    ),
    ("chat/completions", {**CHAT, "tools": TOOLS}, "tools", "tools: the model's chat template has no place for tools"),
    ("chat/completions", {**CHAT, "tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "=False"),
    ("chat/completions", {**CHAT, "parallel_tool_calls": 0}, "parallel_tool_calls", "parallel_tool_calls=0"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "'required'"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format", "is not served"),
    ("chat/completions", {**CHAT, "response_format": {"type": "grammar"}}, "response_format", "must be one of"),
    ("chat/completions", {**CHAT, "response_format": "json"}, "response_format", "response_format.type=None must be"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format", "must be an object"),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
        "response_format.json cannot be held: Unimplemented keys",
    ),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "exclude each other",
    ),
    ("completions", {"prompt": "Hi", "structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ("completions", {"prompt": "Hi", "structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
    ("completions", {"prompt": "Hi", "structured_outputs": {"ebnf": "a"}}, "structured_outputs", "ebnf is no field"),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs=99"),
    ("chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens", "_tokens=-1"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 1, "max_tokens": 2}, "max_tokens", "max_tokens=2"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x" * 3000}]},
        "messages",
        "However, your messages resulted in 30",
    ),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "_kwargs: tools"),
    ("chat/completions", {**CHAT, "audio": {}}, "audio", "audio={} is not served"),
    ("chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "chat_template"),
]


def test_bad_fields_are_named_with_their_values():
    async def test():
        async with serving() as running, running.http() as client:
            for path, body, field, said in BAD_FIELDS:
                answer = await client.post(f"/v1/{path}", json=body)
                error = answer.json()["error"]
                assert answer.status_code == 400, error
                assert (error["type"], error["param"]) == ("invalid_request_error", field)
                assert said in error["message"]
                assert error.keys() == {"message", "type", "param", "code"}
            assert running.frontend.active == 0

    run(test)


def test_what_asks_for_nothing_is_accepted():
    async def test():
        async with serving() as running, running.http() as client:
            harmless = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "functions": []}
            harmless |= {"tool_choice": "auto", "response_format": {"type": "text"}, "n": None, "temperature": None}
            answer = await client.post("/v1/chat/completions", json={**CHAT, **harmless, "max_tokens": 2})
            assert answer.status_code == 200, answer.text
            answer = await client.post("/v1/completions", json={**PROMPT, "suffix": None, "best_of": 1, "user": "me"})
            assert answer.status_code == 200, answer.text

    run(test)


def test_long_values_are_shortened():
    async def test():
        async with serving() as running, running.http() as client:
            for body in ({"prompt": "Hi", "x" * 10**6: 1}, {"prompt": "Hi", "stream": "y" * 10**6}):
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 400
                assert len(answer.content) < 1000

    run(test)


def test_parts_of_messages_are_text():
    async def test():
        async with serving() as running, running.http() as client:
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "return_token_ids": True}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            prompt = await client.post("/detokenize", json={"tokens": answer["prompt_token_ids"]})
            assert prompt.json() == {"prompt": "[user] a\nb\n[a] "}
            parts[1] = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
            error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
            assert error["param"] == "messages[0].content[1].type"
            assert "'image_url' is not served" in error["message"]

    run(test)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"[" * 100_000, (), 400),
        (b'{"prompt": "\xff"}', (), 400),
        (b'{"prompt": "a", "prompt": "b"}', (), 400),
        (b'{"prompt": "a", "temperature": NaN}', (), 400),
        (rb'{"prompt": "\ud800"}', (), 400),
        (b"[]", (), 400),
        (b"", (), 400),
        (b'{"prompt": "' + b"a" * 70_000 + b'"}', (), 413),
    ],
)
def test_bad_bodies(body, headers, status):
    async def test():
        async with serving(limits=ServeLimits(message_bytes=65_536 * 4 if status == 400 else 65_536)) as running:
            answer = await raw(running, post("/v1/completions", body, *headers))
            head, _, error = answer.partition(b"\r\n\r\n")
            assert int(head.split()[1]) == status
            assert json.loads(error)["error"]["message"]

    run(test)


def test_other_content_types_are_refused():
    async def test():
        async with serving() as running, running.http() as client:
            for kind in ("text/plain", "application/x-www-form-urlencoded"):
                body = {"content": b'{"prompt": "Hi"}', "headers": {"content-type": kind}}
                answer = await client.post("/v1/completions", **body)
                assert answer.status_code == 400
                assert kind in answer.json()["error"]["message"]
            kind = {"content-type": "Application/JSON; charset=utf-8"}
            answer = await client.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=kind)
            assert answer.status_code == 200

    run(test)


def test_unknown_routes_and_methods():
    async def test():
        async with serving() as running, running.http() as client:
            for method, path, status in (
                ("GET", "/v2", 404),
                ("GET", "/v1/completions", 405),
                ("POST", "/health", 405),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status
                assert answer.json()["error"]["code"] == "route_not_found"
            answer = await client.post("/v1/embeddings", json={"model": "fake", "input": "a"})
            said = "POST /v1/embeddings is not served; /docs shows what is"
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, said)

    run(test)


# ---- states of the server


def test_queue_full_says_when_to_come_back():
    async def test():
        engine = {"max_num_seqs": 2, "max_waiting_requests": 1}
        async with serving(Mischief(seconds=0.01), engine=engine) as running, running.openai() as client:
            asked = {"model": "fake", "prompt": "Hi", "max_tokens": 1000, "stream": True}
            streams = [await client.completions.create(**asked, n=2)]
            while (await running.frontend.stats()).running < 2:
                pass
            async with running.http() as other:
                statuses, answers = [], []
                for _ in range(4):
                    answers.append(
                        await other.send(other.build_request("POST", "/v1/completions", json=asked), stream=True)
                    )
                    statuses.append(answers[-1].status_code)
                refused = answers[statuses.index(429)]
                assert int(refused.headers["retry-after"]) >= 1
                assert int(refused.headers["retry-after-ms"]) >= 1
                assert json.loads(await refused.aread())["error"]["type"] == "rate_limit_error"
                for answer in answers:
                    await answer.aclose()
            await streams[0].close()
            await running.quiet()

    run(test)


def test_loading_and_draining():
    async def test():
        async with serving() as running, running.http() as client:
            frontend, running.door.frontend = running.door.frontend, None
            for path in ("/v1/models", "/v1/models/fake"):
                assert (await client.get(path)).status_code == 503
            answer = await client.post("/v1/completions", json=PROMPT)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 503]
            assert b"jaxinfer:ready 0.0" in (await client.get("/metrics")).content
            running.door.frontend = frontend
            assert (await client.get("/ready")).status_code == 200
            running.door.engine = lambda: Condition("dead", "the engine hangs", 7.2)
            for path, status in (("/health", 200), ("/ready", 503)):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["retry-after"]) == (status, "8")
                assert answer.json() == {"state": "dead", "reason": "the engine hangs", "retry_after": 8}
            running.door.engine = lambda: Condition("ready")
            assert (await client.get("/health")).json() == (await client.get("/ready")).json() == {"state": "ready"}
            await running.frontend.drain(0.0)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).json()["state"] == "draining"
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 503

    run(test)


def test_deadlines():
    async def test():
        async with serving(Mischief(seconds=0.02)) as running, running.http() as client:
            body = {**PROMPT, "max_tokens": 1000}
            answer = await client.post("/v1/completions", json=body, headers={"x-request-timeout": "0.15"})
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            stream = await client.post(
                "/v1/completions", json={**body, "stream": True}, headers={"x-request-timeout": "0.3"}
            )
            assert stream.status_code == 200
            assert stream.text.count("event: error\n") == 1
            last = events(stream.text)[-1]
            assert last["error"]["code"] == "deadline_exceeded"
            for given, status in (("-1", 504), ("soon", 400), ("nan", 400), ("inf", 400), ("1e999", 400)):
                answer = await client.post("/v1/completions", json=body, headers={"x-request-timeout": given})
                assert answer.status_code == status
            await running.quiet()

    run(test)


def test_ids_are_honoured_and_told():
    async def test():
        async with serving(Mischief(seconds=0.01)) as running, running.http() as client:
            answer = await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine"})
            assert answer.headers["x-request-id"] == "mine"
            assert answer.json()["id"] == "cmpl-mine"
            answer = await client.post("/v1/completions", json={**PROMPT, "request_id": "own"})
            assert (answer.headers["x-request-id"], answer.json()["id"]) == ("own", "cmpl-own")
            assert (await client.get("/nope")).headers["x-request-id"]
            strange = await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "x" * 200})
            assert len(strange.headers["x-request-id"]) == 32
            body = {**PROMPT, "max_tokens": 1000, "stream": True, "request_id": "own"}
            async with client.stream("POST", "/v1/completions", json=body) as first:
                second = await client.post("/v1/completions", json=body)
                assert (first.status_code, second.status_code) == (200, 409)
                assert second.json()["error"]["param"] == "request_id"
            await running.quiet()

    run(test)


def test_an_internal_error_is_opaque_and_the_log_explains_it(monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("the secret")

    async def test():
        async with serving() as running, running.http() as client:
            answer = await client.post("/v1/completions", json=PROMPT)
            error = answer.json()["error"]
            assert answer.status_code == 500
            assert error["code"] == "internal_error"
            assert "secret" not in answer.text
            fault = error["message"].split()[2].rstrip(":")
            record = next(record for record in caplog.records if fault in record.getMessage())
            assert "the secret" in str(record.exc_info[1])

    monkeypatch.setattr(completions, "fingerprint", broken)
    with caplog.at_level(logging.ERROR):
        run(test)


# ---- keys


def _keys(tmp_path):
    keys = {scope: new_key() for scope in ("infer", "observe", "admin")}
    path = tmp_path / "keys.yaml"
    path.write_text("".join(key_entry(key, scope, [scope]) for scope, key in keys.items()))
    return path, keys


def test_every_route_has_a_scope_and_asks_for_a_key(tmp_path):
    path, keys = _keys(tmp_path)

    async def test():
        async with serving(keys=path) as running, running.http() as client:
            routes = [route for route in running.routes if isinstance(route, Route)]
            assert {route.path for route in routes} == set(SCOPES)
            assert {route for route, scope in SCOPES.items() if scope is None} == {"/health", "/ready"}
            for route in routes:
                for method in route.methods:
                    url = route.path.replace("{model:path}", "fake")
                    scope = SCOPES[route.path]
                    statuses = []
                    for key in (None, "wrong", *keys.values()):
                        headers = {} if key is None else {"authorization": f"Bearer {key}"}
                        statuses.append((await client.request(method, url, headers=headers)).status_code)
                    if scope is None:
                        assert set(statuses) == {200}
                        continue
                    allowed = [name == scope for name in keys]
                    assert statuses[:2] == [401, 401]
                    assert [status not in (401, 403) for status in statuses[2:]] == allowed
                    assert [status == 403 for status in statuses[2:]] == [not each for each in allowed]
            unknown = await client.get("/v1/secret")
            assert unknown.status_code == 401
            assert unknown.headers["www-authenticate"] == "Bearer"

    run(test)


def test_keys_are_bearer_tokens(tmp_path):
    path, keys = _keys(tmp_path)

    async def test():
        async with serving(keys=path) as running, running.http() as client:
            key = keys["infer"]
            for headers, status in (
                ([("authorization", f"bearer {key}")], 200),
                ([("authorization", f"Basic {key}")], 401),
                ([("authorization", key)], 401),
                ([("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")], 401),
                ([("authorization", "Bearer")], 401),
                ([("authorization", "Bearer \xff")], 401),
            ):
                raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers]
                answer = await client.get("/v1/models", headers=raw_headers)
                assert answer.status_code == status, headers

    run(test)
