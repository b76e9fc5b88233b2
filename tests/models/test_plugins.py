"""Model families defined outside of the package."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from jaxinfer import LLM
from jaxinfer.loading import abstract_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.plugins import find_families
from jaxinfer.models.registry import LLAMA
from jaxinfer.opening import model_folder
from jaxinfer.serve.core.__main__ import build
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.settings import ServeConfig
from jaxinfer.weights import save_params
from tests.fakes import llama_json, random_model

MODULE = """
import dataclasses
from jaxinfer.models.registry import LLAMA

MINE = dataclasses.replace(LLAMA, ignore=("mine",))
NUMBER = 3
"""
TOKENIZER = model_folder("demo") / "tokenizer.json"
NAMED = {"architectures": ["MyForCausalLM"]}


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return a folder on Python's import path that contains a module of a family."""
    (tmp_path / "a_family_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def entry(architecture: str) -> str:
    return f"[jaxinfer.models.plugins]\n{architecture} = a_family_of_mine:MINE\n"


def install(site: pathlib.Path, architecture: str) -> None:
    """Write the files that pip would: a distribution with an entry point."""
    info = site / "mine-1.0.dist-info"
    info.mkdir()
    for name, text in {**METADATA, "entry_points.txt": entry(architecture)}.items():
        (info / name).write_text(text)


def wheel(folder: pathlib.Path, architecture: str) -> pathlib.Path:
    """Return a wheel with one module, as a build produces it."""
    path = folder / "mine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a_family_of_mine.py", MODULE)
        for name, text in {**METADATA, "entry_points.txt": entry(architecture)}.items():
            archive.writestr(f"mine-1.0.dist-info/{name}", text)
    return path


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Write the folder of a tiny Llama under an unknown architecture."""
    model, config = random_model(), llama_json(architectures=["MyForCausalLM"])
    save_params(folder, model.params, model.specs, config)
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return folder


@pytest.mark.usefixtures("site")
def test_a_named_family_is_that_of_whatever_config_json_names() -> None:
    found = find_families(NAMED, "a_family_of_mine:MINE")
    assert {name: family.ignore for name, family in found.items()} == {"MyForCausalLM": ("mine",)}
    assert find_families(NAMED) == {}
    assert find_families({}, "a_family_of_mine:MINE") == {}


def test_installed_families_are_found_by_architecture(site: pathlib.Path) -> None:
    install(site, "MyForCausalLM")
    assert find_families(NAMED)["MyForCausalLM"].ignore == ("mine",)
    assert find_families({"architectures": ["OtherForCausalLM"]}) == {}


def test_what_is_installed_can_be_left_alone(site: pathlib.Path) -> None:
    install(site, "MyForCausalLM")
    assert find_families(NAMED, "jaxinfer") == {}


def test_an_installed_family_does_not_take_the_place_of_a_known_one(site: pathlib.Path) -> None:
    install(site, "LlamaForCausalLM")
    assert find_families({"architectures": ["LlamaForCausalLM"]}) == {}


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("a_family_of_mine", "family = 'a_family_of_mine' must be auto, jaxinfer or module:NAME"),
        ("no/path.py:X", "must be auto, jaxinfer or module:NAME"),
        ("transformers", "family = 'transformers' must be auto, jaxinfer or module:NAME"),
        ("no_such_module:X", "family = 'no_such_module:X' cannot be imported: No module named 'no_such_module'"),
        ("a_family_of_mine:YOURS", "cannot be imported: module 'a_family_of_mine' has no attribute 'YOURS'"),
        ("a_family_of_mine:NUMBER", "is a int, and must be a Family"),
    ],
)
def test_what_is_no_family_is_refused(family: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_families(NAMED, family)


def test_a_servers_family_reaches_the_process_that_loads_the_model() -> None:
    settings = CoreSettings.of(ServeConfig(model="demo", family="no_such_module:X"), "/socket")
    with pytest.raises(ConfigError, match="family = 'no_such_module:X' cannot be imported"):
        build(CoreSettings.from_json(settings.to_json()), lambda startup: None)


@pytest.mark.usefixtures("site")
def test_a_model_of_an_unknown_architecture_is_served_by_a_named_family(tmp_path: pathlib.Path) -> None:
    folder = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"MyForCausalLM.* is not supported"):
        abstract_model(str(folder))
    few: dict[str, Any] = {"max_num_seqs": 1, "num_pages": 16, "page_size": 16, "prefill_sizes": [16]}
    with LLM(str(folder), family="a_family_of_mine:MINE", **few) as llm:
        assert llm.model.family.module is LLAMA.module
        assert len(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0


@pytest.mark.slow
def test_a_package_that_pip_installs_is_found_by_the_command_line(tmp_path: pathlib.Path) -> None:
    """Install the wheel and generate text in separate processes that share only a search path."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, str(wheel(tmp_path, "MyForCausalLM"))], check=True, timeout=300)
    assert (tmp_path / "site/mine-1.0.dist-info/entry_points.txt").exists()
    folder = str(write_model(tmp_path / "model"))
    few = ["--max-num-seqs", "1", "--num-pages", "16", "--page-size", "16", "--prefill-sizes", "16"]
    command = [
        sys.executable,
        "-m",
        "jaxinfer",
        "generate",
        folder,
        "--prompt",
        "A",
        "--max-tokens",
        "3",
        *few,
        "--json",
    ]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    refused = subprocess.run([*command, "--model-impl", "jaxinfer"], **_SAID, env=path)
    assert refused.returncode == 2
    assert "['MyForCausalLM'] is not supported; the nearest is LlamaForCausalLM" in refused.stderr
    done = subprocess.run(command, **_SAID, env=path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) > 0


_SAID: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
