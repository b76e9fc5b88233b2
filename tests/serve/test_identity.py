"""Tests that a request gets the same answer from every API of a real server, from `LLM` and from the command line.

The server's engine runs in its own process, the other engines in this one; all run concurrently, so that the batch
compositions differ.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import openai
import pytest

from jaxinfer import client as c
from jaxinfer import generate
from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import Live, live

ENGINE = {"max_num_seqs": 4, "max_model_len": 128, "page_size": 16, "prefill_sizes": (16,)}
FLAGS = ["--max-num-seqs", "4", "--max-model-len", "128", "--page-size", "16", "--prefill-sizes", "16"]

PROMPTS = ("Once upon a time", "The naïve 狐 🦊 said: «")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 24, "logprobs": 2},
    "sampled": {"temperature": 1.3, "seed": 7, "n": 2, "max_tokens": 24, "logprobs": 1},
    "stops": {"temperature": 0.9, "seed": 3, "n": 2, "stop": [" the", "a.", "\n"], "max_tokens": 48, "logprobs": 1},
    "kept": {"temperature": 0.0, "stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 9, "max_tokens": 48},
    # Far from the training data: bytes that form no characters.
    "wild": {"temperature": 50.0, "seed": 11, "n": 2, "max_tokens": 40, "ignore_eos": True},
}
MESSAGES = [{"role": "user", "content": "Tell me of the naïve 狐."}]
TEXT_ALONE = "HTTP, streamed text"
OPENAI = ("temperature", "seed", "n", "stop", "max_tokens", "logprobs")


@dataclasses.dataclass
class Output:
    """The fields of an output that every API returns. ``logprobs``: of the output tokens."""

    text: str = ""
    reason: str | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    stop: int | str | None = None

    def add(self, more: Output) -> None:
        """Append a later delta."""
        assert self.reason is None
        self.text += more.text
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.reason, self.stop = more.reason, more.stop


Prompt = str | list[dict[str, str]]
Ask = Callable[[Prompt, dict[str, Any]], list[Output]]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(
        ServeConfig(model="demo", grpc_port=0, http_port=0, dtype="float32", engine=EngineConfig(**ENGINE))
    ) as run:
        yield run


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", "float32", show_progress=False, **ENGINE)


# ---- APIs


def through_llm(llm: LLM) -> Ask:
    def ask(prompt: Prompt, sampling: dict[str, Any]) -> list[Output]:
        params = llm.default_sampling_params(**sampling)
        (found,) = llm.generate([prompt], params) if isinstance(prompt, str) else llm.chat(prompt, params)
        return of_llm(found)

    return ask


def of_llm(found: RequestOutput) -> list[Output]:
    return [
        Output(
            each.text,
            each.finish_reason,
            each.token_ids,
            [where[token][0] for token, where in zip(each.token_ids, each.logprobs or [], strict=False)],
            each.stop_reason,
        )
        for each in found.outputs
    ]


def of_client(each: c.Output | c.Delta) -> Output:
    chosen = [position.chosen.logprob for position in each.logprobs]
    return Output(each.text, each.finish_reason, list(each.token_ids), chosen, each.stop_reason)


def given(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}


def through_client(client: c.Client) -> Ask:
    return lambda prompt, sampling: [of_client(each) for each in client.generate(**given(prompt), **sampling).outputs]


def through_client_stream(client: c.Client) -> Ask:
    def ask(prompt: Prompt, sampling: dict[str, Any]) -> list[Output]:
        found = [Output() for _ in range(sampling.get("n", 1))]
        with client.stream(**given(prompt), **sampling) as stream:
            for delta in stream:
                found[delta.index].add(of_client(delta))
        return found

    return ask


def through_client_batch(client: c.Client) -> Ask:
    def ask(prompt: Prompt, sampling: dict[str, Any]) -> list[Output]:
        first, second = client.generate_batch([prompt, prompt], **sampling)
        answers = [[of_client(each) for each in item.result().outputs] for item in (first, second)]
        assert answers[0] == answers[1]
        return answers[0]

    return ask


def through_grpc(channel: grpc.Channel) -> Ask:
    """Return a client with the generated stub, as programs in other languages use it."""

    def ask(prompt: Prompt, sampling: dict[str, Any]) -> list[Output]:
        request = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling))
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            for message in prompt:
                request.chat.messages.add(role=message["role"], content=message["content"])
        found = [Output() for _ in range(sampling.get("n", 1))]
        for response in InferenceStub(channel).Generate(request):
            if response.WhichOneof("event") == "delta":
                found[response.delta.output_index].add(of_message(response.delta))
        return found

    return ask


def of_message(delta: pb.Delta) -> Output:
    reason, stop = None, delta.WhichOneof("stop_reason")
    if delta.HasField("finish_reason"):
        reason = pb.FinishReason.Name(delta.finish_reason).removeprefix("FINISH_REASON_").lower()
    chosen = [position.chosen.logprob for position in delta.logprobs]
    return Output(delta.text, reason, list(delta.token_ids), chosen, getattr(delta, stop) if stop else None)


def through_http(api: openai.OpenAI) -> Ask:
    def ask(prompt: Prompt, sampling: dict[str, Any]) -> list[Output]:
        return [of_choice(choice) for choice in call_http(api, prompt, sampling, stream=False).choices]

    return ask


def through_http_stream(api: openai.OpenAI, *, tokens: bool) -> Ask:
    """Return a streaming client; without ``tokens`` chunks have default fields, which the server writes faster."""

    def ask(prompt: Prompt, sampling: dict[str, Any]) -> list[Output]:
        found = [Output() for _ in range(sampling.get("n", 1))]
        for chunk in call_http(api, prompt, sampling, stream=True, tokens=tokens):
            for choice in chunk.choices:
                found[choice.index].add(of_choice(choice))
        return found

    return ask


def call_http(
    api: openai.OpenAI, prompt: Prompt, sampling: dict[str, Any], *, stream: bool, tokens: bool = True
) -> Any:
    usual = {name: sampling[name] for name in OPENAI if name in sampling}
    extra = {name: value for name, value in sampling.items() if name not in usual} | {"return_token_ids": tokens}
    if isinstance(prompt, str):
        return api.completions.create(model="demo", prompt=prompt, **usual, extra_body=extra, stream=stream)
    if "logprobs" in usual:
        usual |= {"logprobs": True, "top_logprobs": usual["logprobs"]}
    return api.chat.completions.create(model="demo", messages=prompt, **usual, extra_body=extra, stream=stream)


def of_choice(choice: Any) -> Output:
    more = choice.model_extra or {}
    if hasattr(choice, "text"):
        text, logprobs = choice.text, choice.logprobs.token_logprobs if choice.logprobs else []
    else:
        said = choice.message if hasattr(choice, "message") else choice.delta
        text, logprobs = (
            said.content or "",
            [each.logprob for each in choice.logprobs.content] if choice.logprobs else [],
        )
    return Output(text, choice.finish_reason, more.get("token_ids") or [], logprobs, more.get("stop_reason"))


# ---- comparison


@pytest.fixture(scope="module")
def doors(server: Live) -> Iterator[dict[str, Ask]]:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)
    with c.Client(server.target, timeout=120) as client, grpc.insecure_channel(server.target) as channel, api:
        yield {
            "gRPC": through_grpc(channel),
            "client": through_client(client),
            "client, streamed": through_client_stream(client),
            "client, batch": through_client_batch(client),
            "HTTP": through_http(api),
            "HTTP, streamed": through_http_stream(api, tokens=True),
            TEXT_ALONE: through_http_stream(api, tokens=False),
        }


@pytest.mark.parametrize("name", SAMPLINGS)
def test_texts_are_the_same_through_every_door(name: str, doors: dict[str, Ask], llm: LLM) -> None:
    asked = [(prompt, SAMPLINGS[name]) for prompt in PROMPTS]
    wanted = [through_llm(llm)(*each) for each in asked]
    assert_same_everywhere(doors, asked, wanted)
    assert any(any(output.text for output in outputs) for outputs in wanted)
    if name in ("stops", "kept"):
        assert any(isinstance(output.stop, str) for outputs in wanted for output in outputs)
    if "logprobs" in SAMPLINGS[name]:
        assert all(len(output.logprobs) == len(output.tokens) > 0 for outputs in wanted for output in outputs)


@pytest.mark.parametrize("name", ["greedy", "sampled", "stops"])
def test_conversations_are_the_same_through_every_door(name: str, doors: dict[str, Ask], llm: LLM) -> None:
    asked = [(MESSAGES, SAMPLINGS[name])]
    wanted = [through_llm(llm)(*each) for each in asked]
    assert_same_everywhere(doors, asked, wanted)


def assert_same_everywhere(
    doors: dict[str, Ask], asked: Sequence[tuple[Prompt, dict[str, Any]]], wanted: list[list[Output]]
) -> None:
    """Send the requests to all APIs concurrently, and compare the answers."""
    with concurrent.futures.ThreadPoolExecutor(len(doors)) as pool:
        found = pool.map(lambda ask: [ask(prompt, sampling) for prompt, sampling in asked], doors.values())
        answers = dict(zip(doors, found, strict=True))
    texts = [[dataclasses.replace(output, tokens=[]) for output in outputs] for outputs in wanted]
    for door, answer in answers.items():
        assert answer == (texts if door == TEXT_ALONE else wanted), door


def test_seeds_that_the_server_draws_lead_to_the_same_text(doors: dict[str, Ask], server: Live, llm: LLM) -> None:
    with c.Client(server.target) as client:
        drawn = client.generate(PROMPTS[1], temperature=1.0, max_tokens=24)
    sampling = {"temperature": 1.0, "max_tokens": 24, "seed": drawn.seed}
    wanted = through_llm(llm)(PROMPTS[1], sampling)
    assert [of_client(each) for each in drawn.outputs] == wanted
    assert_same_everywhere(doors, [(PROMPTS[1], sampling)], [wanted])


def test_the_command_line_prints_the_same(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    sampling = SAMPLINGS["stops"]
    flags = [*FLAGS, "--dtype", "float32", "--json", *(part for prompt in PROMPTS for part in ("--prompt", prompt))]
    for name, value in sampling.items():
        for each in value if isinstance(value, list) else [value]:
            flags += [f"--{name.replace('_', '-')}", str(each)]
    assert generate.main(flags) == 0
    lines = capfd.readouterr().out.splitlines()
    for prompt, line in zip(PROMPTS, lines, strict=True):
        found = [
            Output(
                each["text"],
                each["finish_reason"],
                each["token_ids"],
                [
                    next(candidate["logprob"] for candidate in position if candidate["token_id"] == token)
                    for token, position in zip(each["token_ids"], each["logprobs"], strict=True)
                ],
                each["stop_reason"],
            )
            for each in json.loads(line)["outputs"]
        ]
        assert found == through_llm(llm)(prompt, sampling)


def test_the_command_line_streams_the_same(llm: LLM) -> None:
    """The command line process streams the same output; it writes bytes, which may split characters."""
    prompt, sampling = PROMPTS[1], {"temperature": 50.0, "seed": 11, "max_tokens": 40, "ignore_eos": True}
    command = [sys.executable, "-m", "jaxinfer.generate", "--prompt", prompt, *FLAGS, "--dtype", "float32"]
    command += ["--temperature", "50", "--seed", "11", "--max-tokens", "40", "--ignore-eos"]
    printed = subprocess.run(command, check=True, capture_output=True, timeout=300).stdout.decode()
    assert printed == f"{prompt}{through_llm(llm)(prompt, sampling)[0].text}\n"
