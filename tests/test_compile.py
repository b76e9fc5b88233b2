"""`python -m jaxinfer.compile`: a start needs nothing beyond the programs that it leaves."""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxinfer.compile import Compilation, compile_for, main
from jaxinfer.config import EngineConfig
from jaxinfer.opening import model_folder
from pallas_kernels.check.plugins import default_folder, environment
from tests.gpu_plugins import needs_plugins

FLAGS = ["--max-model-len", "64", "--page-size", "32", "--prefill-sizes", "32", "--max-num-seqs", "2"]

START = """
import json, sys
from jaxinfer.config import EngineConfig
from jaxinfer.compilations import count_cache_use
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams

with count_cache_use() as use:
    config = EngineConfig(max_model_len=64, page_size=32, prefill_sizes=(32,), max_num_seqs=2)
    llm = LLM(sys.argv[1], config=config, compilation_cache_dir=sys.argv[2], show_progress=False)
    llm.generate(["ROMEO:"], SamplingParams(temperature=0.0, max_tokens=3))
print(json.dumps([use.wanted, use.found, use.kept, llm.engine.stats().compilations]))
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(model_folder("demo-draft"), tmp_path / "model"))


def test_settings_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The path that "auto" selects depends on the target GPU, not on the machine that compiles."""
    within: list[bool] = []

    class Here:
        devices = staticmethod(lambda count: jax.devices()[:count])

        @staticmethod
        @contextlib.contextmanager
        def current() -> Iterator[None]:
            within.append(True)
            yield
            within.append(False)

    class PreparedError(Exception):
        pass

    def prepared(*_: Any) -> None:
        raise PreparedError(within)

    monkeypatch.setattr("jaxinfer.compile.DEVICES", {"a100": Here})
    monkeypatch.setattr("jaxinfer.compile.use_compilation_cache", lambda _: None)
    monkeypatch.setattr("jaxinfer.compile.prepare", prepared)
    with pytest.raises(PreparedError) as caught:
        compile_for("a100", Compilation("demo", EngineConfig(num_pages=8), "auto", tmp_path))
    assert caught.value.args == ([True],)


def test_the_next_start_compiles_nothing(folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "jaxinfer.compile", "--model", str(folder), *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cache = folder / "compiled"
    made = re.search(r"(\d+) programs: (\d+) compiled, 0 found in the cache", done.stdout)
    assert made is not None
    assert made[1] == made[2]
    assert "could not be kept" not in done.stdout
    assert f"--compilation-cache-dir {cache}\n" in done.stdout
    start = [sys.executable, "-c", START, str(folder), str(cache)]
    wanted, found, kept, serving = json.loads(subprocess.run(start, capture_output=True, check=True).stdout)
    assert wanted == found == int(made[1])
    assert kept == serving == 0


def test_what_cannot_be_is_one_sentence(folder: pathlib.Path, capsys) -> None:
    for flags, code, words in [
        (["--model", str(folder / "nothing")], 2, "no folder"),
        (["--model", str(folder), "--page-size", "3"], 2, "page_size = 3 must be a power of two"),
        (["--model", str(folder), "--target", "h100"], 2, "--target h100 needs --num-pages"),
        (
            ["--model", str(folder), "--target", "a100", "--num-pages", "8", "--plugins", str(folder)],
            3,
            "compiling for a GPU needs JAX's CUDA plugin",
        ),
    ]:
        assert main(flags) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert words in captured.err
    assert not (folder / "compiled").exists()


@pytest.mark.slow
@needs_plugins
def test_for_a_gpu_that_is_not_there(folder: pathlib.Path) -> None:
    """Programs for H100 and H200, which share machine code, are kept as separate files."""
    kept = []
    for target in ("h100", "h200"):
        command = [sys.executable, "-m", "jaxinfer.compile", "--model", str(folder), *FLAGS]
        command += ["--target", target, "--num-pages", "16"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(default_folder()))
        assert re.search(r"(\d+) programs: \1 compiled, 0 found in the cache", done.stdout)
        assert "not kept: " in done.stdout
        kept.append({path.name for path in (folder / "compiled").glob("jit_decode-*-cache")})
    assert len(kept[1]) == 2 * len(kept[0]) > 0
    assert kept[0] < kept[1]
