"""Tests of metrics, the OpenAPI page, tokenization, and the demo model."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.core.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.http.app import SCOPES
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.middleware import ADMIN
from jaxinfer.serve.http.server import HttpServer
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from tests.serve.fake_engine import Mischief, fake_tokenizer
from tests.serve.http.support import Running, run, serving


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_prometheuss_and_their_labels_are_bounded():
    async def test():
        async with serving() as running, running.http() as client:
            await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 7})
            for k in range(20):
                await client.get(f"/nothing/{k}")
                await client.get(f"/v1/models/{k}")
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            found = samples(answer.text)
            total = "jaxinfer:http_requests_total"
            assert found[total, (("route", "/v1/completions"), ("status", "200"))] == 1
            assert found[total, (("route", "/v1/models/{model:path}"), ("status", "404"))] == 20
            assert found[total, (("route", "other"), ("status", "404"))] == 20
            assert found["jaxinfer:http_errors_total", (("kind", "not_found"),)] == 40
            assert found["jaxinfer:http_requests_in_flight", ()] == 1
            assert found["jaxinfer:ready", ()] == 1
            assert found["jaxinfer:generation_tokens_total", (("model_name", "fake"),)] == 7

    run(test)


def test_figures_are_there_when_the_engine_is_not():
    async def test():
        async with serving(Mischief(fault_at=1)) as running, running.http() as client:
            answer = await client.post("/v1/completions", json={"prompt": "Hi"})
            assert answer.status_code == 503
            with pytest.raises(EngineDeadError):
                await running.engine.stats()
            answer = await client.get("/metrics")
            assert answer.status_code == 200
            assert ("jaxinfer:http_errors_total", (("kind", "unavailable"),)) in samples(answer.text)
            assert (await client.get("/health")).status_code == 200

    run(test)


def test_the_openapi_page():
    async def test():
        async with serving() as running, running.http() as client:
            schema = (await client.get("/openapi.json")).json()
            assert schema["openapi"].startswith("3.")
            assert schema["info"] == {"title": "jaxinfer", "version": "1.2.3"}
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
                assert resolve(schema, body["$ref"])["properties"]
            for reference in references(schema):
                resolve(schema, reference)
            fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
            assert {"messages", "temperature", "tools", "top_logprobs"} <= fields.keys()

    run(test)


def references(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def resolve(schema, reference):
    for part in reference.removeprefix("#/").split("/"):
        schema = schema[part]
    return schema


def test_a_long_text_and_its_tokens():
    """The server tokenizes a long text, and writes the response in chunks."""

    async def test():
        text = "né" * 5000
        async with serving() as running, running.http() as client:
            answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
            assert answer["tokens"] == fake_tokenizer().encode(text, False)
            assert (answer["count"], len(answer["token_strs"])) == (15_000, 15_000)
            assert answer["token_strs"][:3] == ["n", "\ufffd", "\ufffd"]
            short = (await client.post("/tokenize", json={"prompt": text})).json()
            assert (short["tokens"], short["token_strs"]) == (answer["tokens"], None)

    run(test)


def test_tokenize_and_detokenize():
    async def test():
        async with serving() as running, running.http() as client:
            answer = (await client.post("/tokenize", json={"prompt": "né", "return_token_strs": True})).json()
            assert answer["token_strs"] == ["n", "�", "�"]
            assert (answer["count"], answer["max_model_len"]) == (3, 2048)
            text = await client.post("/detokenize", json={"tokens": answer["tokens"]})
            assert text.json() == {"prompt": "né"}
            chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
            ids = (await client.post("/tokenize", json=chat)).json()["tokens"]
            assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "[user] a\n"}
            for body in ({}, {"prompt": "a", **chat}, {"prompt": 3}):
                assert (await client.post("/tokenize", json=body)).status_code == 400
            for tokens in ([-1], [10**6], ["a"], None):
                assert (await client.post("/detokenize", json={"tokens": tokens})).status_code == 400

    run(test)


def test_a_port_for_figures_alone(tmp_path):
    path, keys = tmp_path / "keys.yaml", {scope: new_key() for scope in ("infer", "observe")}
    path.write_text("".join(key_entry(key, scope, [scope]) for scope, key in keys.items()))

    async def test():
        async with serving(keys=path) as running:
            server = HttpServer(ServeConfig(model="fake", metrics_port=0, http_port=1), running.door, metrics=True)
            await server.start()
            observer = {"authorization": f"Bearer {keys['observe']}"}
            async with Running(running.door, server).http() as client:
                assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
                assert (await client.get("/metrics")).status_code == 401
                inferrer = {"authorization": f"Bearer {keys['infer']}"}
                assert (await client.get("/metrics", headers=inferrer)).status_code == 403
                found = samples((await client.get("/metrics", headers=observer)).text)
                assert found["jaxinfer:ready", ()] == 1
                assert found["jaxinfer:generation_tokens_total", (("model_name", "fake"),)] == 0
                for other in SCOPES.keys() - {"/health", "/ready", "/metrics"}:
                    for method in ("GET", "POST"):
                        answer = await client.request(method, other.replace("{model:path}", "fake"), headers=inferrer)
                        assert answer.status_code == (403 if SCOPES[other] == ADMIN else 404), other
            config = ServeConfig(model="fake", metrics_port=server.port, metrics_host="127.0.0.1", host="192.0.2.1")
            with pytest.raises(ServeConfigError, match=f"metrics_port={server.port}: .* 127.0.0.1"):
                await HttpServer(config, running.door, metrics=True).start()
            await server.stop()

    run(test)


def test_an_address_that_cannot_be_used():
    async def test():
        async with serving() as running:
            config = ServeConfig(model="fake", http_port=running.server.port)
            with pytest.raises(ServeConfigError, match=f"http_port={running.server.port}"):
                await HttpServer(config, AppState("1")).start()
            with pytest.raises(ServeConfigError, match="nowhere"):
                await HttpServer(ServeConfig(model="fake", http_port=0, host="nowhere.invalid"), AppState("1")).start()

    run(test)


# ---- the demo model


@pytest.fixture(scope="module")
def demo():
    return LLM("demo", show_progress=False)


@pytest.mark.slow
def test_the_demo_models_text_is_that_of_llm(demo):
    prompts = ["Once upon a time", "Ein Märchen: "]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, n=1)
    drawn = SamplingParams(temperature=0.9, seed=11, max_tokens=24, n=2, stop=["the"])
    expected = [[output.text for output in result.outputs] for result in demo.generate(prompts, greedy)]
    sampled = [[output.text for output in result.outputs] for result in demo.generate(prompts, drawn)]

    async def test():
        config, model = demo.engine.config, demo.model
        card = ModelCard("demo", "X", "float32", config.max_model_len, model.config.vocab_size, [], {}, {}, 1)
        async with AsyncEngine(demo.engine) as backend:
            frontend = Frontend(backend, card, model.tokenizer, model.chat_template)
            server = HttpServer(ServeConfig(model="demo", http_port=0), AppState("1", frontend=frontend))
            await server.start()
            async with Running(AppState("1"), server).openai() as client:
                asked = {"model": "demo", "max_tokens": 24}
                for texts, sampling in (
                    (expected, {"temperature": 0}),
                    (sampled, {"temperature": 0.9, "seed": 11, "n": 2, "stop": "the"}),
                ):
                    request = {**asked, **sampling, "prompt": prompts}
                    answer = await client.completions.create(**request)
                    assert [choice.text for choice in answer.choices] == [text for each in texts for text in each]
                    streamed = [""] * len(answer.choices)
                    async for chunk in await client.completions.create(**request, stream=True):
                        for choice in chunk.choices:
                            streamed[choice.index] += choice.text
                    assert streamed == [choice.text for choice in answer.choices]
            await server.stop()
            await frontend.aclose()

    run(test)


class Profiler:
    """A profiler that records calls."""

    def __init__(self):
        self.calls = []

    async def start_profile(self, steps):
        self.calls.append(steps)

    async def stop_profile(self):
        return "traces"


def test_operators_take_profiles_of_so_many_steps():
    async def test():
        async with serving() as running, running.http() as client:
            for route in ("/start_profile", "/stop_profile"):
                assert "profile_dir" in (await client.post(route)).text
            running.door.profiler = profiler = Profiler()
            answers = [await client.post("/start_profile")]
            answers += [await client.post("/start_profile", json=body) for body in ({"steps": 3}, {"num_steps": 4})]
            assert [(answer.status_code, answer.json()) for answer in answers] == [
                (200, {"steps": 1000}),
                (200, {"steps": 3}),
                (200, {"steps": 4}),
            ]
            for body, field in (
                ({"steps": 0}, "steps"),
                ({"num_steps": 1001}, "num_steps"),
                ({"steps": 1, "num_steps": 2}, "num_steps"),
                ({"output_dir": "/etc"}, "output_dir"),
                ({"steps": "3"}, "steps"),
            ):
                answer = await client.post("/start_profile", json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            answer = await client.post("/stop_profile")
            assert (answer.status_code, answer.json()) == (200, {"folder": "traces"})
            running.door.operated = False
            for route in ("/start_profile", "/stop_profile"):
                assert (await client.post(route)).status_code == 403
            assert profiler.calls == [1000, 3, 4]

    run(test)


def test_operators_reset_the_prefix_cache_in_vllms_words():
    async def test():
        async with serving() as running, running.http() as client:
            answer = await client.post("/reset_prefix_cache?reset_running_requests=false")
            assert (answer.status_code, answer.json()) == (200, {"pages": await running.engine.reset_prefix_cache()})
            answer = await client.post("/reset_prefix_cache?reset_running_requests=true")
            assert (answer.status_code, "reset_running_requests" in answer.text) == (400, True)
            assert (await client.get("/reset_prefix_cache")).status_code == 405
            running.door.operated = False
            assert (await client.post("/reset_prefix_cache")).status_code == 403

    run(test)
