"""Tests of LoRA adapters of a real model over gRPC and HTTP: the output equals that of `LLM`."""

from __future__ import annotations

import json
import pathlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.client import AlreadyExists, Client, Control, InvalidRequest, NotFound
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.lora.door import LoRARequest
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.settings import ServeConfig
from tests.lora.goldens import GOLDENS, golden, load_base
from tests.lora.test_served import LORAS, SETTINGS
from tests.serve.live import Live, live

FOLDERS = {"pirate": "llama-dora", "poet": "llama-all-linear", "sailor": "llama-qv"}
NAMES = (*FOLDERS, None)
ENGINE = {**{name: value for name, value in SETTINGS.items() if name != "show_progress"}, **LORAS, "max_loras": 2}
TOKENS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("base")
    load_base(golden("llama-dora"), made)
    return made


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Live]:
    config = ServeConfig(
        model=str(folder),
        served_model_name="base",
        dtype="float32",
        grpc_port=0,
        http_port=0,
        control_port=0,
        lora_root=str(GOLDENS),
        engine=EngineConfig(**ENGINE),
    )
    with live(config) as found:
        yield found


@pytest.fixture
def control(server: Live) -> Iterator[Control]:
    """Load the adapters of `FOLDERS`; unload all at the end."""
    with Control(f"127.0.0.1:{server.server.control_port}", timeout=60) as made:
        for name, path in FOLDERS.items():
            made.load_lora(name, path)
        yield made
        for lora in made.list_loras():
            made.unload_lora(lora.name)


def prompts() -> list[list[int]]:
    return [[(7 * at + number) % 50 for at in range(3 + number)] for number in range(8)]


def params(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "temperature": float(number % 2), "seed": number, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def wanted(folder: pathlib.Path) -> list[Any]:
    """Return the outputs of `LLM` for each prompt, with alternating adapters and without one."""
    llm = LLM(str(folder), dtype="float32", **SETTINGS, **LORAS, max_loras=2)
    paths = {name: LoRARequest(name, str(GOLDENS / path)) for name, path in FOLDERS.items()}
    loras = [paths.get(NAMES[number % len(NAMES)] or "") for number in range(len(prompts()))]
    sampling = [SamplingParams(**params(number)) for number in range(len(prompts()))]
    return [output.outputs[0] for output in llm.generate(prompts(), sampling, lora=loras)]


def values(server: Live) -> dict[str, float]:
    """Return the LoRA metrics of the server by sample name."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if "lora" in sample.name]
    return {sample.name.partition(":")[2]: sample.value for sample in samples}


def test_a_mixed_batch_says_what_llm_says(server: Live, control: Control, wanted: list[Any]) -> None:
    asks = []
    for number, prompt in enumerate(prompts()):
        sampling = pb.SamplingParams(**params(number))
        name = NAMES[number % len(NAMES)]
        ids = pb.TokenIds(ids=prompt)
        asks.append(pb.GenerateRequest(request_id=str(number), token_ids=ids, lora_name=name, sampling=sampling))
    before = values(server)
    with grpc.insecure_channel(server.target) as channel:
        responses = list(InferenceStub(channel).GenerateBatch(iter(asks), timeout=120))
    tokens: dict[int, list[int]] = {number: [] for number in range(len(asks))}
    logprobs: dict[int, list[float]] = {number: [] for number in range(len(asks))}
    for response in responses:
        assert not response.HasField("error"), response.error
        number = int(response.request_id)
        if response.HasField("started"):
            assert response.started.model == (NAMES[number % len(NAMES)] or "base")
        tokens[number] += response.delta.token_ids
        logprobs[number] += [position.chosen.logprob for position in response.delta.logprobs]
    for number, output in enumerate(wanted):
        assert tokens[number] == list(output.token_ids), number
        told = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert logprobs[number] == told, number
    assert len({tuple(tokens[number]) for number in (0, 2, 3)}) > 1
    after = values(server)
    assert after["lora_loads_total"] >= before["lora_loads_total"] + 2
    assert after["lora_evictions_total"] > before["lora_evictions_total"]
    assert after["lora_load_seconds_count"] > before["lora_load_seconds_count"]
    assert (after["lora_loaded"], after["lora_slots"], after["lora_slots_used"]) == (3, 2, 2)


def test_http_says_the_same(server: Live, control: Control) -> None:
    with Client(server.target, timeout=60) as client:
        for name in NAMES:
            answer = client.generate(token_ids=prompts()[4], lora_name=name, **params(1))
            body = {"model": name or "base", "prompt": prompts()[4], **params(1)}
            told = http(server, body)
            assert told["choices"][0]["text"] == answer.text
            assert answer.model == (name or "base")


def http(server: Live, body: dict[str, Any]) -> dict[str, Any]:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read()))


def test_scores_are_the_adapters(server: Live, control: Control) -> None:
    with Client(server.target, timeout=60) as client:
        answer = client.generate(token_ids=prompts()[5], lora_name="pirate", max_tokens=4, temperature=0, logprobs=1)
        told = [position.chosen.logprob for position in answer.outputs[0].logprobs]
        scores = {
            name: client.score(continuations=[answer.token_ids], token_ids=prompts()[5], lora_name=name)[0]
            for name in NAMES
        }
    assert [token.logprob for token in scores["pirate"].tokens] == pytest.approx(told, abs=1e-5)
    assert scores["pirate"].is_greedy
    assert len({score.logprob for score in scores.values()}) == len(NAMES)


def test_a_name_means_the_new_content_at_once(server: Live, control: Control) -> None:
    asked = {"token_ids": prompts()[3], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with Client(server.target, timeout=60) as client:
        old = client.generate(**asked, lora_name="pirate")
        other = client.generate(**asked, lora_name="sailor")
        control.load_lora("pirate", FOLDERS["sailor"], load_inplace=True)
        new = client.generate(**asked, lora_name="pirate")
    assert spoken(new) == spoken(other) != spoken(old)


def spoken(answer: Any) -> list[tuple[int, float]]:
    return [(position.chosen.token_id, position.chosen.logprob) for position in answer.outputs[0].logprobs]


def test_the_client_names_what_went_wrong(server: Live, control: Control) -> None:
    unknown = "lora_name='parrot' is not served here, only 'base' and the adapters"
    with Client(server.target, timeout=60) as client, pytest.raises(NotFound, match=unknown):
        client.generate("Hi", lora_name="parrot")
    with pytest.raises(AlreadyExists, match="lora_name='poet'"):
        control.load_lora("poet", FOLDERS["poet"])
    with pytest.raises(InvalidRequest, match=r"lora_path '\.\./adapters' is not a path below"):
        control.load_lora("other", "../adapters")
    with pytest.raises(InvalidRequest, match=r"lora_path=.*gpt2-all"):  # an adapter of another model
        control.load_lora("other", "gpt2-all")
    with pytest.raises(NotFound):
        control.unload_lora("parrot")
    assert [lora.name for lora in control.list_loras()] == sorted(FOLDERS)
    assert {lora.parent for lora in control.list_loras()} == {"base"}
