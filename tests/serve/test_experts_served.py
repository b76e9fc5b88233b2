"""Routing of a mixture of experts over HTTP and gRPC, of prompts too, compared with `LLM`."""

import asyncio
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from jaxinfer.client import AsyncClient, Client
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.settings import ServeConfig
from tests.models.parity import load_case
from tests.models.test_families import ROWS
from tests.models.test_parity import golden
from tests.serve.live import Live, live

ENGINE: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_model_len": 64,
    "prefill_sizes": (16,),
    "page_size": 16,
    "enable_training_outputs": True,
}
PROMPT = np.random.default_rng(0).integers(1, 60, 40).tolist()
SAMPLING: dict[str, Any] = {"max_tokens": 6, "seed": 5, "ignore_eos": True, "return_routed_experts": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("mixtral")
    load_case(golden(ROWS["mixtral"]), made)
    return made


@pytest.fixture(scope="module")
def whole(folder: pathlib.Path) -> RequestOutput:
    llm = LLM(str(folder), "float32", show_progress=False, **ENGINE)
    (found,) = llm.generate([PROMPT], SamplingParams(**SAMPLING, prompt_logprobs=1))
    return found


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Live]:
    config = ServeConfig(model=str(folder), grpc_port=0, http_port=0, dtype="float32", engine=EngineConfig(**ENGINE))
    with live(config) as found:
        yield found


def test_grpc_has_the_experts_of_prompt_and_output(server: Live, whole: RequestOutput) -> None:
    target = f"127.0.0.1:{server.server.grpc_port}"
    with Client(target) as client:
        client.generate(token_ids=PROMPT, max_tokens=1)  # its pages are not those that are read
        found = client.generate(token_ids=PROMPT, prompt_logprobs=0, **SAMPLING)

    async def other() -> Any:
        async with AsyncClient(target) as client:
            return await client.generate(token_ids=PROMPT, prompt_logprobs=0, **SAMPLING)

    assert whole.prompt_routed_experts is not None
    for each in (found, asyncio.run(other())):
        assert [p.routed_experts for p in each.prompt_logprobs] == _tuples(whole.prompt_routed_experts)
        assert [p.routed_experts for p in each.outputs[0].logprobs] == _tuples(whole.outputs[0].arrays.routed_experts)


@pytest.mark.parametrize("stream", [False, True])
def test_http_has_them(server: Live, whole: RequestOutput, stream: bool) -> None:
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "stream": stream, **SAMPLING}
    answer = httpx.post(f"http://127.0.0.1:{server.server.http_port}/v1/completions", json=body, timeout=120)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines or [answer.text] for choice in json.loads(line)["choices"]]
    experts = [choice["prompt_routed_experts"] for choice in choices if "prompt_routed_experts" in choice]
    assert whole.prompt_routed_experts is not None
    assert experts == [whole.prompt_routed_experts.tolist()]
    own = [row for choice in choices for row in choice["arrays"]["routed_experts"]]
    assert own == np.asarray(whole.outputs[0].arrays.routed_experts).tolist()


def test_without_prompt_log_probabilities_a_prompt_has_none(server: Live) -> None:
    body = {"prompt": PROMPT, **SAMPLING}
    answer = httpx.post(f"http://127.0.0.1:{server.server.http_port}/v1/completions", json=body, timeout=120)
    (choice,) = answer.raise_for_status().json()["choices"]
    assert "prompt_routed_experts" not in choice
    assert len(choice["arrays"]["routed_experts"]) == SAMPLING["max_tokens"]


def _tuples(routed: Any) -> list[Any]:
    return [tuple(map(tuple, layers)) for layers in np.asarray(routed).tolist()]
