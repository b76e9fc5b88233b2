"""Run the blocks of docs/functional.md in order; their assertions hold."""

import json
import pathlib
import re
import urllib.request
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import load_model
from tests.serve.processes import ServerProcess


def blocks_of(repo: pathlib.Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (repo / "docs/functional.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_runs(repo: pathlib.Path) -> None:
    blocks = blocks_of(repo)
    assert len(blocks) == 20
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/functional.md", "exec"), names)
    assert float(names["change"]) > 0


@pytest.mark.slow
def test_a_folder_is_served_by_the_pages_family(repo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`jaxinfer serve FOLDER --family steered:STEERED` serves a folder with the page's block as steered.py."""
    (source,) = (block for block in blocks_of(repo) if "STEERED = " in block)
    (tmp_path / "steered.py").write_text(source)
    family: dict[str, Any] = {}
    exec(compile(source, "steered.py", "exec"), family)
    plain, layer = load_model("demo", dtype="float32"), family["LAYER"]
    direction = 0.5 * jax.random.normal(jax.random.key(0), (plain.config.hidden_size,))
    params = {**plain.params, layer: {**plain.params[layer], "direction": direction}}
    model, folder = plain.replace(family=family["STEERED"], params=params), tmp_path / "model"
    model.save(folder)
    few = ["--max-num-seqs", "2", "--max-model-len", "64", "--page-size", "16", "--prefill-sizes", "16"]
    named = ["--family", "steered:STEERED", "--dtype", "float32", "--http-port", "0", "--grpc-port", "0"]
    arguments = ["-m", "jaxinfer", "serve", str(folder), *named, *few]
    server = ServerProcess(arguments, tmp_path / "server.log", environment={"PYTHONPATH": str(tmp_path)})
    try:
        server.until_logged("ready: ")
        prompt = model.tokenizer.encode("To be, or not")
        logprobs = asked(server.http_port, prompt)
    finally:
        server.end()
    expected, before = (jax.nn.log_softmax(each(jnp.asarray([prompt]))[0, -1]) for each in (model, plain))
    assert abs(logprobs - float(expected.max())) < 1e-4
    assert abs(float(expected.max() - before.max())) > 1e-2


def asked(port: int, prompt: list[int]) -> float:
    """Return the logprob of the greedy token that a server returns after the prompt."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return float(json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][0])
