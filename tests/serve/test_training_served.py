"""Forced tokens and outputs for training over HTTP and gRPC, compared with `LLM`."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from jaxinfer.client import AsyncClient, Client
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.outputs import CompletionOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import Live, live

ENGINE: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_model_len": 128,
    "enable_training_outputs": True,
    "max_logprobs": -1,
}
VOCABULARY_BYTES = 1 << 18
PROMPT = "Once upon a time"
SAMPLING: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.8,
    "top_p": 0.7,
    "seed": 5,
    "logprob_token_ids": [5, 6],
    "return_entropy": True,
    "return_sampling_mask": True,
}
MODES = ["raw_logprobs", "processed_logprobs"]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    config = ServeConfig(
        model="demo",
        grpc_port=0,
        http_port=0,
        dtype="float32",
        engine=EngineConfig(**ENGINE),
        limits=ServeLimits(vocabulary_bytes=VOCABULARY_BYTES),
    )
    with live(config) as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", "float32", show_progress=False, **ENGINE)


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{server.server.http_port}{path}", json=body, timeout=120)


def lowest(values: Any) -> Any:
    return np.maximum(np.asarray(values), np.float32(-9999)).tolist()


def as_json(output: CompletionOutput) -> dict[str, Any]:
    """Return the arrays of an output as HTTP has them."""
    arrays = output.arrays
    indptr, indices = (each.tolist() for each in arrays.sampling_mask)
    return {
        "logprobs": lowest(arrays.logprobs),
        "entropies": arrays.entropies.tolist(),
        "token_logprobs": lowest(arrays.token_logprobs),
        "sampling_mask": {"indptr": indptr, "indices": indices},
    }


@pytest.mark.parametrize("mode", MODES)
def test_http_has_the_arrays_of_llm(server: Live, llm: LLM, mode: str) -> None:
    (whole,) = llm.generate(PROMPT, SamplingParams(**SAMPLING, logprobs_mode=mode))
    body = {"prompt": PROMPT, "return_token_ids": True, "logprobs_mode": mode, **SAMPLING}
    (choice,) = post(server, "/v1/completions", **body).raise_for_status().json()["choices"]
    assert choice["token_ids"] == whole.outputs[0].token_ids
    assert choice["arrays"] == as_json(whole.outputs[0])
    assert choice["logprobs"] is None


def test_streamed_chunks_have_their_part(server: Live, llm: LLM) -> None:
    with Client(f"127.0.0.1:{server.server.grpc_port}") as client:
        assert client.model_info().engine["enable_training_outputs"] is True
    (whole,) = llm.generate(PROMPT, SamplingParams(**SAMPLING))
    answer = post(server, "/v1/completions", prompt=PROMPT, stream=True, **SAMPLING).text
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    arrays = [choice["arrays"] for line in lines for choice in httpx.Response(200, text=line).json()["choices"]]
    want = as_json(whole.outputs[0])
    assert [each for part in arrays for each in part["entropies"]] == want["entropies"]
    assert [each for part in arrays for each in part["sampling_mask"]["indices"]] == want["sampling_mask"]["indices"]
    assert all(part["sampling_mask"]["indptr"][0] == 0 for part in arrays)


def test_chat_has_them(server: Live, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (whole,) = llm.chat(messages, SamplingParams(**SAMPLING))
    answer = post(server, "/v1/chat/completions", messages=messages, **SAMPLING).raise_for_status().json()
    assert answer["choices"][0]["arrays"] == as_json(whole.outputs[0])


@pytest.mark.parametrize("mode", MODES)
def test_grpc_has_them(server: Live, llm: LLM, mode: str) -> None:
    (whole,) = llm.generate(PROMPT, SamplingParams(**SAMPLING, logprobs_mode=mode))
    arrays = whole.outputs[0].arrays
    with Client(f"127.0.0.1:{server.server.grpc_port}") as client:
        output = client.generate(PROMPT, logprobs_mode=mode, **SAMPLING).outputs[0]
    assert [each.chosen.logprob for each in output.logprobs] == arrays.logprobs.tolist()
    assert [each.entropy for each in output.logprobs] == arrays.entropies.tolist()
    assert [list(each.token_logprobs) for each in output.logprobs] == arrays.token_logprobs.tolist()
    indptr, indices = arrays.sampling_mask
    assert [list(each.kept_token_ids) for each in output.logprobs] == [
        part.tolist() for part in np.split(indices, indptr[1:-1])
    ]


@pytest.fixture(scope="module")
def whole(llm: LLM) -> np.ndarray:
    """Log probabilities of the whole vocabulary: [tokens, vocab]."""
    found = llm.generate(PROMPT, SamplingParams(**SAMPLING, logprobs=-1, logprobs_mode="processed_logprobs"))
    vocabulary = found[0].outputs[0].arrays.vocabulary
    assert vocabulary is not None
    return vocabulary


WHOLE: dict[str, Any] = {**SAMPLING, "logprobs_mode": "processed_logprobs"}


def read_vocabulary(texts: list[str]) -> np.ndarray:
    return np.stack([np.frombuffer(base64.b64decode(text), "<f4") for text in texts])


def test_grpc_has_the_whole_vocabulary(server: Live, whole: np.ndarray) -> None:
    target = f"127.0.0.1:{server.server.grpc_port}"
    with Client(target) as client:
        output = client.generate(PROMPT, logprobs=-1, **WHOLE).outputs[0]
        assert client.model_info().limits["max_vocabulary_bytes"] == VOCABULARY_BYTES

    async def other() -> Any:
        async with AsyncClient(target) as client:
            return (await client.generate(PROMPT, logprobs=-1, **WHOLE)).outputs[0]

    for each in (output, asyncio.run(other())):
        assert np.stack([position.vocabulary for position in each.logprobs]).tobytes() == whole.tobytes()
        assert all(position.top == [] for position in each.logprobs)


def test_http_has_the_whole_vocabulary(server: Live, whole: np.ndarray, llm: LLM) -> None:
    body = {"prompt": PROMPT, "logprobs": -1, **WHOLE}
    (choice,) = post(server, "/v1/completions", **body).raise_for_status().json()["choices"]
    assert read_vocabulary(choice["arrays"]["vocabulary"]).tobytes() == whole.tobytes()
    assert all(len(each) == 1 for each in choice["logprobs"]["top_logprobs"])
    answer = post(server, "/v1/completions", stream=True, **body).text
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    texts = [
        text
        for line in lines
        for each in httpx.Response(200, text=line).json()["choices"]
        for text in each["arrays"]["vocabulary"]
    ]
    assert read_vocabulary(texts).tobytes() == whole.tobytes()
    messages = [{"role": "user", "content": "Hello"}]
    (want,) = llm.chat(messages, SamplingParams(**WHOLE, logprobs=-1))
    chat = {"messages": messages, "logprobs": True, "top_logprobs": -1, **WHOLE}
    found = post(server, "/v1/chat/completions", **chat).raise_for_status().json()["choices"][0]["arrays"]
    assert read_vocabulary(found["vocabulary"]).tobytes() == want.outputs[0].arrays.vocabulary.tobytes()


def test_responses_have_no_field_for_a_vocabulary(server: Live) -> None:
    body = {"input": "Hello", "top_logprobs": -1, "include": ["message.output_text.logprobs"]}
    answer = post(server, "/v1/responses", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_logprobs"


def test_every_api_forces_a_trace(server: Live, llm: LLM) -> None:
    trace = [7, 700, 7, 70]
    (want,) = llm.logprobs(PROMPT, trace)
    body = {"prompt": PROMPT, "forced_token_ids": trace, "logprobs": 0, "return_token_ids": True}
    (choice,) = post(server, "/v1/completions", **body).raise_for_status().json()["choices"]
    assert choice["token_ids"] == trace
    assert choice["logprobs"]["token_logprobs"] == want.tolist()
    with Client(f"127.0.0.1:{server.server.grpc_port}") as client:
        output = client.generate(PROMPT, forced_token_ids=trace, logprobs=0).outputs[0]
    assert list(output.token_ids) == trace
    assert [each.chosen.logprob for each in output.logprobs] == want.tolist()
    messages = [{"role": "user", "content": "Hello"}]
    answer = post(server, "/v1/chat/completions", messages=messages, forced_token_ids=trace, return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"] == trace


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"logprobs": -1, "max_tokens": 100}, "logprobs"),
        ({"logprobs": -1, "max_tokens": 8, "n": 10}, "logprobs"),
        ({"logprobs": -1, "echo": True, "max_tokens": 1}, "logprobs"),
        ({"logprobs": -1, "prompt": ["a", "b"], "max_tokens": 1}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs_mode": "processed"}, "logprobs_mode"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"forced_token_ids": [1] * 129}, "forced_token_ids"),
        ({"forced_token_ids": [1], "stop": "a"}, "stop"),
        ({"return_sampling_mask": True, "temperature": 1.0, "top_p": 1.0}, "return_sampling_mask"),
    ],
)
def test_what_is_invalid_is_named(server: Live, given: dict[str, Any], field: str) -> None:
    answer = post(server, "/v1/completions", **{"prompt": PROMPT, **given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
