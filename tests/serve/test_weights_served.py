"""Tests of a server of a real model whose weights change under load, sleep, and survive the engine core."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.client import Control, InvalidRequest
from jaxinfer.config import EngineConfig
from jaxinfer.loading import load_model
from jaxinfer.serve.settings import ServeConfig
from tests.serve.live import Live, live

UPDATES, CLIENTS, TOKENS, KILLS = 200, 4, 48, 6
BOUND = 240.0
PROMPTS = ("Once upon a time", "The fox", "One day", "A king")
ENGINE = EngineConfig(max_num_seqs=4, max_model_len=256, page_size=16, num_pages=128, prefill_sizes=(32,))


@dataclasses.dataclass
class Made:
    """An output: its tokens, and (version, start, end) of those of each version of weights."""

    prompt: list[int]
    tokens: list[int]
    ranges: list[tuple[int, int, int]]


class World:
    """A server whose weights of odd versions are ``b``, and of even ones ``a``."""

    def __init__(self, served: Live, root: pathlib.Path) -> None:
        self.served, self.root = served, root
        self.http = httpx.Client(base_url=served.url, timeout=BOUND)

    @property
    def version(self) -> int:
        return self.http.get("/weight_info").json()["weight_version"]

    def update(self, mode: str = "wait", by: int = 1) -> int:
        """Serve the other weights, or by 2 the same again; return their version."""
        version = self.version + by
        answer = self.http.post("/update_weights", json={"path": "ab"[version % 2], "mode": mode, "version": version})
        assert (answer.status_code, answer.json()["weight_version"]) == (200, version), answer.text
        assert answer.json()["bytes"] > 2**20
        return version

    def make(self, prompt: str | list[int], tokens: int = TOKENS) -> Made:
        """Stream a greedy completion."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        choices = list[dict[str, Any]]()
        with self.http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices += json.loads(line.removeprefix("data: "))["choices"]
        *first, last = choices
        assert not any("weight_version" in choice for choice in first)
        made = [token for choice in choices for token in choice["token_ids"]]
        ranges = [tuple(each.values()) for each in last.get("weight_versions", [])]
        assert not ranges or ranges[-1][0] == last["weight_version"]
        return Made(choices[0]["prompt_token_ids"], made, ranges or [(last["weight_version"], 0, len(made))])

    def most_likely(self, prompt: list[int], tokens: list[int]) -> list[bool]:
        """Return whether each of these tokens, forced as the output, is the most likely one."""
        body = {"prompt": prompt, "forced_token_ids": tokens, "temperature": 0, "logprobs": 1}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()["choices"][0]["logprobs"]
        best = [max(each.values()) for each in found["top_logprobs"]]
        return [own == most for own, most in zip(found["token_logprobs"], best, strict=True)]

    def compilations(self) -> int:
        with Control(f"127.0.0.1:{self.served.server.control_port}", timeout=BOUND) as control:
            return control.stats()["compilations"]

    def info(self) -> dict[str, Any]:
        """Return what is served, with its checksums."""
        return self.http.get("/weight_info", params={"checksums": "true"}).json()

    def checksums(self) -> dict[str, str]:
        return self.info()["checksums"]

    def kill_the_core(self) -> None:
        """Kill the engine core, and wait for the next one."""
        restarts = self.served.server.restarts
        os.kill(self.served.server._supervisor._child.process.pid, signal.SIGKILL)
        end = time.monotonic() + BOUND
        while self.served.server.restarts == restarts or self.http.get("/ready").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)

    def under_load(self, mode: str, updates: int) -> list[Made]:
        """Update while clients stream; return their outputs."""
        made, ended = list[Made](), threading.Event()

        def client(prompt: str) -> None:
            while not ended.is_set():
                made.append(self.make(prompt))

        threads = [threading.Thread(target=client, args=(prompt,)) for prompt in PROMPTS[:CLIENTS]]
        for thread in threads:
            thread.start()
        try:
            for _ in range(updates):
                self.update(mode)
                time.sleep(0.05)
        finally:
            ended.set()
            for thread in threads:
                thread.join(BOUND)
        return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root, random = tmp_path_factory.mktemp("weights"), np.random.default_rng(0)
    model = load_model("demo", show_progress=False)
    model.save(root / "a")

    def changed(array: Any) -> Any:
        return (np.asarray(array) * (1 + 0.2 * random.standard_normal(array.shape))).astype(array.dtype)

    model.replace(params=jax.tree.map(changed, model.params)).save(root / "b")
    config = ServeConfig(
        model="demo", grpc_port=0, http_port=0, control_port=0, weights_root=str(root), engine=ENGINE, step_timeout=60.0
    )
    with live(config) as served:
        yield World(served, root)


def own_continuations(world: World, outputs: list[Made]) -> None:
    """Check that each range of tokens is the greedy continuation by the weights of its version: a forced output has the
    bits of a generated one, which a longer prompt may not have."""
    for parity in (0, 1):
        while world.version % 2 != parity:
            world.update()
        checked = set[tuple[Any, ...]]()
        for output in outputs:
            for version, start, end in output.ranges:
                key = (*output.prompt, *output.tokens[:end], start)
                if version % 2 == parity and key not in checked:
                    checked.add(key)
                    assert all(world.most_likely(output.prompt, output.tokens[:end])[start:])
        assert checked


def test_updates_under_load_that_wait_mix_no_versions_and_compile_nothing(world):
    before = world.compilations()
    outputs = world.under_load("wait", UPDATES)
    assert all(len(output.ranges) == 1 for output in outputs)
    assert len({output.ranges[0][0] for output in outputs}) > 4
    own_continuations(world, outputs)
    assert world.compilations() == before == 0


def test_updates_under_load_that_keep_requests_tell_whose_tokens_are_whose(world):
    outputs = world.under_load("keep", UPDATES)
    assert max(len(output.ranges) for output in outputs) > 1
    for output in outputs:
        ends = [0, *(end for _, _, end in output.ranges)]
        assert ends[:-1] == [start for _, start, _ in output.ranges]
        assert ends[-1] == TOKENS
        versions = [version for version, _, _ in output.ranges]
        assert versions == sorted(set(versions))
    own_continuations(world, outputs)
    assert world.compilations() == 0


def test_what_sleeps_lets_requests_wait_and_wakes_to_the_same_outputs(world):
    before, found = world.make(PROMPTS[0]).tokens, list[Made]()
    for level in (1, 2):
        assert world.http.post("/sleep", params={"level": level}).json()["is_sleeping"]
        waiting = threading.Thread(target=lambda: found.append(world.make(PROMPTS[0])))
        waiting.start()
        for path in ("/resume", "/update_weights"):
            answer = world.http.post(path, json={"path": "a"})
            assert answer.status_code == 400
        assert not world.http.post("/wake_up").json()["is_sleeping"]
        if level == 2:
            assert world.http.get("/is_paused").json()["is_paused"]
            world.update("keep", by=2)
        waiting.join(BOUND)
        assert not waiting.is_alive()
    assert [made.tokens for made in found] == [before] * 2
    assert world.compilations() == 0


def test_metrics_and_the_stats_rpc_tell_the_state_of_the_weights(world):
    def told() -> tuple[dict[str, float], dict[str, Any]]:
        found = re.findall(r"^jaxinfer:(?:weight|engine)_.*$", world.http.get("/metrics").text, re.MULTILINE)
        pairs = (line.rsplit(" ", 1) for line in found)
        scraped = {name.removeprefix("jaxinfer:"): float(value) for name, value in pairs}
        with Control(f"127.0.0.1:{world.served.server.control_port}", timeout=BOUND) as control:
            return scraped, control.stats()["weights"]

    def sample(scraped: dict[str, float], name: str, label: str = "") -> float:
        (value,) = (value for key, value in scraped.items() if key.startswith(name) and label in key)
        return value

    before, _ = told()
    version = world.update()
    scraped, weights = told()
    assert (sample(scraped, "weight_version"), weights["weight_version"]) == (version, version)
    assert sample(scraped, "weight_updates_total") == sample(before, "weight_updates_total") + 1 == weights["updates"]
    assert sample(scraped, "weight_update_seconds_sum") > sample(before, "weight_update_seconds_sum")
    assert sample(scraped, "engine_paused") == 0
    world.http.post("/sleep", params={"tags": "kv_cache"})
    scraped, weights = told()
    assert (sample(scraped, "engine_paused"), weights["is_paused"], weights["asleep"]) == (1, True, ["kv_cache"])
    states = [sample(scraped, "engine_sleep_state", f'"{state}"') for state in ("awake", "kv_cache", "weights")]
    assert states == [0, 1, 0]
    world.http.post("/wake_up")
    assert sample(told()[0], "engine_sleep_state", '"awake"') == 1


def test_weights_that_cannot_be_served_change_nothing(world):
    before, text = world.version, world.make(PROMPTS[0]).tokens
    for name, change in (("cut", cut), ("other", other_model), ("empty", lambda folder: None)):
        folder = world.root / name
        folder.mkdir()
        change(folder, world.root / "b") if name != "empty" else None
        with (
            Control(f"127.0.0.1:{world.served.server.control_port}", timeout=BOUND) as control,
            pytest.raises(InvalidRequest),
        ):
            control.update_weights(name)
    assert (world.version, world.make(PROMPTS[0]).tokens) == (before, text)


def test_parts_of_a_checkpoint_are_served_together(world):
    """As two updates over HTTP, and as one over gRPC; a tensor that no part has, or two have, changes nothing."""
    source = world.root / "b"
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    for folder, some in (("b1", names[::2]), ("b2", names[1::2]), ("b3", names[1:4])):
        (world.root / folder).mkdir()
        save_file({name: tensors[name] for name in some}, world.root / folder / "model.safetensors")
    (world.root / "b1" / "config.json").write_bytes((source / "config.json").read_bytes())
    if world.version % 2:
        world.update()
    before, text = world.version, world.make(PROMPTS[0]).tokens
    world.http.post("/start_weight_update")
    for folder in ("b1", "b3"):
        assert world.http.post("/update_weights", json={"path": folder}).json()["weight_version"] == before
    answer = world.http.post("/finish_weight_update")
    assert answer.status_code == 400
    assert any(name in answer.json()["error"]["message"] for name in names)
    with Control(f"127.0.0.1:{world.served.server.control_port}", timeout=BOUND) as control:
        world.http.post("/start_weight_update")
        for folder in ("b1", "b2"):
            world.http.post("/update_weights", json={"path": folder})
        made = world.make(PROMPTS[0])
        assert (made.tokens, made.ranges[0][0]) == (text, before)
        assert world.http.post("/finish_weight_update").json()["weight_version"] == before + 1
        parts = world.http.get("/weight_info", params={"checksums": "true"}).json()["checksums"]
        new = world.make(PROMPTS[0]).tokens
        with pytest.raises(InvalidRequest, match=r"is in .*b1 and in .*b1"):
            control.update_weights("b1", parts=["b1", "b2"])
        assert control.update_weights("b1", parts=["b2"]).weight_version == before + 2
        assert dict(control.weight_info(checksums=True).checksums) == parts
    assert world.make(PROMPTS[0]).tokens == new
    world.update()  # to the whole folder
    assert world.http.get("/weight_info", params={"checksums": "true"}).json()["checksums"] == parts
    assert world.compilations() == 0


def cut(folder: pathlib.Path, source: pathlib.Path) -> None:
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    data = (source / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_model(folder: pathlib.Path, source: pathlib.Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())


def test_the_next_engine_core_serves_the_last_weights(world):
    version = world.update()
    if version % 2 == 0:
        version = world.update()
    text, sums = world.make(PROMPTS[0]), world.checksums()
    world.kill_the_core()
    assert world.info() == {"weight_version": version, "is_paused": False, "is_sleeping": False, "checksums": sums}
    assert world.make(PROMPTS[0]) == text


def test_an_update_whose_engine_core_is_killed_leaves_the_old_weights_whole(world, monkeypatch):
    """The moments of the kills cover the whole time of an update, and some time before and after it."""
    supervisor = world.served.server._supervisor
    monkeypatch.setattr(supervisor, "_patience", dataclasses.replace(supervisor._patience, longest_pause=0.0))
    sums, texts = dict[int, Any](), dict[int, list[int]]()
    for _ in range(2):
        parity, begun = world.update() % 2, time.monotonic()
        sums[parity], texts[parity] = world.checksums(), world.make(PROMPTS[0]).tokens
    world.update()
    ended, failed = time.monotonic() - begun, 0
    for kill in range(KILLS):
        before = world.version
        update = {"path": "ab"[(before + 1) % 2], "version": before + 1}
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            updating = thread.submit(world.http.post, "/update_weights", json=update)
            time.sleep(1.2 * ended * kill / KILLS)
            world.kill_the_core()
            answer = updating.result(BOUND)
        assert answer.status_code in (200, 503), answer.text
        failed += answer.status_code != 200
        version = before + (answer.status_code == 200)
        assert world.version == version
        assert (world.checksums(), world.make(PROMPTS[0]).tokens) == (sums[version % 2], texts[version % 2])
    assert failed
