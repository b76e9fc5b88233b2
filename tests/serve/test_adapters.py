"""Tests of a server process with LoRA adapters: clients get the output of `LLM`, also after a core restart."""

import asyncio
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jaxinfer.llm import LLM
from jaxinfer.lora.door import LoRARequest
from jaxinfer.sampling_params import SamplingParams
from tests.lora.goldens import GOLDENS, copy_adapter, golden, write_model
from tests.serve.processes import BOUND, ServerProcess, started, wait_until

ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_num_seqs": 2,
    "max_model_len": 64,
    "page_size": 4,
    "prefill_sizes": (8, 16),
    "num_pages": 80,
}
FLAGS = [
    *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-num-seqs", "2", "--max-model-len", "64"),
    *("--page-size", "4", "--prefill-sizes", "8", "16", "--num-pages", "80"),
]
ADAPTERS = ("llama-dora", "llama-all-linear")
PROMPT, TOKENS = "w5 w6 w7", 12
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Texts:
    """Texts of `LLM` by the adapter of each prompt; None: the base model."""

    def __init__(self, model: pathlib.Path) -> None:
        self._llm = LLM(str(model), show_progress=False, **ENGINE)
        self._known: dict[str | None, str] = {}

    def __getitem__(self, name: str | None) -> str:
        if name not in self._known:
            lora = None if name is None else LoRARequest(name, str(GOLDENS / name))
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            self._known[name] = self._llm.generate(PROMPT, params, lora=lora)[0].outputs[0].text
        return self._known[name]


class World:
    """A server with one adapter loaded at startup, and a root folder with more."""

    def __init__(self, server: ServerProcess, root: pathlib.Path, texts: Texts) -> None:
        self.server, self.root, self.texts = server, root, texts

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=BOUND, max_retries=0)

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=BOUND)

    def put(self, folder: str, adapter: str) -> None:
        """Replace the contents of a folder below the root."""
        shutil.rmtree(self.root / folder, ignore_errors=True)
        copy_adapter(adapter, self.root / folder)

    def load(self, name: str, folder: str, adapter: str) -> None:
        self.put(folder, adapter)
        answer = self.post(LOAD, lora_name=name, lora_path=folder, load_inplace=True)
        assert answer.status_code == 200, answer.text

    def text(self, model: str) -> str:
        answer = self.post("/v1/completions", **asked(model))
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["text"]

    def kill_core(self) -> None:
        """Kill the core and wait for the next one."""
        core = self.server.core
        assert core is not None
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: self.server.core not in (None, core))
        wait_until(lambda: httpx.get(f"{self.url}/ready", timeout=BOUND).status_code == 200)


def asked(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | more


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    model, root = write_model(golden(ADAPTERS[0]), folder / "base"), folder / "root"
    root.mkdir()
    modules = [f"pirate={GOLDENS / ADAPTERS[0]}", f'{{"name": "poet", "path": "{GOLDENS / ADAPTERS[1]}"}}']
    command = ["-m", "jaxinfer.serve", "--model", str(model), "--grpc-port", "0", "--http-port", "0", *FLAGS]
    with started([*command, "--lora-root", str(root), "--lora-modules", *modules], folder) as server:
        texts = Texts(model)
        server.until_logged("ready: ")
        yield World(server, root, texts)


def test_a_module_that_cannot_be_loaded_ends_the_start(tmp_path: pathlib.Path) -> None:
    model = write_model(golden(ADAPTERS[0]), tmp_path / "base")
    command = ["-m", "jaxinfer.serve", "--model", str(model), "--grpc-port", "0", "--http-port", "0", *FLAGS]
    with started([*command, "--lora-modules", f"a={tmp_path / 'nowhere'}"], tmp_path) as server:
        assert server.wait() != 0
        assert "adapter 'a': " in server.log()
        assert "nowhere" in server.log()
        assert "Traceback" not in server.log()


def test_clients_get_what_llm_gives(world: World) -> None:
    """OpenAI's client gets `LLM`'s outputs for two adapters and the base model in one batch, unary and streamed."""

    async def run() -> None:
        async with world.openai() as client:
            of = {"base": None, "pirate": ADAPTERS[0], "poet": ADAPTERS[1]}
            assert [each.id async for each in client.models.list()] == list(of)
            names = [*of] * 3

            async def whole(name: str) -> str:
                answer = await client.completions.create(**_known(name), extra_body={"ignore_eos": True})
                assert answer.model == name
                return answer.choices[0].text

            async def streamed(name: str) -> str:
                events = await client.completions.create(**_known(name), extra_body={"ignore_eos": True}, stream=True)
                return "".join([event.choices[0].text async for event in events])

            expected = [world.texts[of[name]] for name in names]
            assert len(set(expected)) == 3
            assert await asyncio.gather(*map(whole, names)) == expected
            assert await asyncio.gather(*map(streamed, names)) == expected
            message = [{"role": "user", "content": PROMPT}]
            for name in of:
                chat = await client.chat.completions.create(
                    model=name, messages=message, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
                )
                assert (chat.model, chat.choices[0].message.content) == (name, world.texts[of[name]])

    asyncio.run(run())


def _known(name: str) -> dict[str, Any]:
    return {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}


def test_a_folder_that_is_no_adapter_is_refused_and_the_name_stays(world: World) -> None:
    world.load("a", "one", "llama-qv")
    (world.root / "one" / "adapter_config.json").write_text("{}")
    (world.root / "empty").mkdir(exist_ok=True)
    for folder, words in (("one", "peft_type"), ("empty", "adapter_config.json")):
        answer = world.post(LOAD, lora_name="a", lora_path=folder, load_inplace=True)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
    assert world.text("a") == world.texts["llama-qv"]
    assert world.post(UNLOAD, lora_name="a").status_code == 200


def test_names_change_under_requests(world: World) -> None:
    """During reloads each request uses one version of the adapter throughout; later requests use the new version."""

    async def run() -> None:
        allowed = {world.texts[name] for name in ("llama-qv", "llama-rslora")}
        assert len(allowed) == 2
        found, done = [], asyncio.Event()

        async def ask() -> None:
            async with world.openai() as client:
                while not done.is_set():
                    answer = await client.completions.create(**_known("b"), extra_body={"ignore_eos": True})
                    found.append(answer.choices[0].text)

        await asyncio.to_thread(world.load, "b", "two", "llama-qv")
        asking = [asyncio.ensure_future(ask()) for _ in range(4)]
        for turn in range(6):
            name = ("llama-rslora", "llama-qv")[turn % 2]
            await asyncio.to_thread(world.load, "b", "two", name)
            assert await asyncio.to_thread(world.text, "b") == world.texts[name]
        done.set()
        await asyncio.gather(*asking)
        assert set(found) == allowed
        answer = await asyncio.to_thread(world.post, UNLOAD, lora_name="b")
        assert answer.status_code == 200
        async with world.openai() as client:
            with pytest.raises(openai.NotFoundError, match="'base' and the adapters 'pirate', 'poet'"):
                await client.completions.create(**_known("b"))

    asyncio.run(run())


def test_a_core_that_is_killed_takes_no_adapter_with_it(world: World) -> None:
    world.load("same", "three", "llama-qv")
    world.load("changed", "four", "llama-qv")
    world.load("gone", "five", "llama-qv")
    world.put("four", "llama-rslora")
    shutil.rmtree(world.root / "five")
    world.kill_core()
    assert world.text("pirate") == world.texts[ADAPTERS[0]]
    assert world.text("same") == world.texts["llama-qv"]
    assert world.text("changed") == world.texts["llama-rslora"]
    answer = world.post("/v1/completions", **asked("gone"))
    assert answer.status_code == 404
    assert "could not be loaded again when the engine was restarted" in answer.text
    assert "four has changed since it was loaded" in world.server.log()
    assert "adapter 'gone': " in world.server.log()
    for name in ("same", "changed", "gone"):
        assert world.post(UNLOAD, lora_name=name).status_code == 200
