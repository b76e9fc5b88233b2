"""Images of a family from outside of the package: a server answers as `LLM` does, to the bit."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.llm import LLM
from jaxinfer.models.plugins import GROUP, find_families
from jaxinfer.serve.settings import ServeConfig
from jaxinfer.weights import init_params, save_params
from tests.fakes import llama_json
from tests.images.pictures import picture, saved
from tests.serve.live import Live, live
from tests.serve.test_images_served import ENGINE, by_grpc, by_http, by_llm, with_words

PROCESSOR = """
from jaxinfer.images.pixels import rgb
from tests.fake_vision_processor import FakeProcessor

class Doubled(FakeProcessor):
    def prepare(self, picture, /, **options):
        picture = rgb(picture)
        return super().prepare(picture.resize((2 * picture.width, 2 * picture.height)), **options)

def make(config_json, files):
    return Doubled(config_json["image_token_id"], most_rows=256)
"""
FAMILY = """
import dataclasses

from jaxinfer.models.registry import LLAMA
from jaxinfer.models.specs import plain
from jaxinfer.models.vision.tower import VisionFamily
from outside_processor import make
from tests.fake_vision import FakeTower, FakeTowerConfig

def config(config_json):
    return FakeTowerConfig(config_json["hidden_size"])

def specs(cfg):
    return {"projection": plain("visual.projection", (13, cfg.width), (None, None))}

SEES = dataclasses.replace(LLAMA, vision=VisionFamily(config, specs, FakeTower, make))
"""
CONFIG = llama_json(architectures=["OutsideForCausalLM"], vocab_size=64, image_token_id=62)
FILES = [saved(picture(8, 6, seed=1)), saved(picture(4, 10, seed=2))]


@pytest.fixture(scope="module")
def installed(repo: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Return a folder on the import path of all processes, with the files that pip would write."""
    site = tmp_path_factory.mktemp("site")
    (site / "outside_family.py").write_text(FAMILY)
    (site / "outside_processor.py").write_text(PROCESSOR)
    info = site / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nOutsideForCausalLM = outside_family:SEES\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(repo), os.environ.get("PYTHONPATH", "")]))
        yield site


@pytest.fixture(scope="module")
def folder(installed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    family, made = find_families(CONFIG)["OutsideForCausalLM"], tmp_path_factory.mktemp("models")
    assert family.vision is not None
    tower = family.vision.param_specs(family.vision.config(CONFIG))
    specs = {**family.param_specs(family.config(CONFIG)), "vision": tower}
    save_params(made, init_params(specs, seed=0), specs, CONFIG)
    return with_words(made)


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Live]:
    config = ServeConfig(
        model=str(folder), grpc_port=0, http_port=0, dtype="float32", engine=EngineConfig(**ENGINE, max_logprobs=5)
    )
    with live(config) as found:
        yield found


def test_a_server_prepares_its_images_as_llm_does(server: Live, folder: pathlib.Path) -> None:
    with LLM(str(folder), "float32", show_progress=False, **ENGINE) as llm:
        for files in (FILES, FILES[:1], FILES[::-1]):
            prompt, *answer = by_llm(llm, files)
            assert prompt.count(62) == (48 if len(files) == 1 else 48 + 40)
            assert by_http(server, files) == (prompt, *answer)
            assert by_grpc(server, files) == (len(prompt), *answer)


@pytest.mark.usefixtures("installed")
def test_its_processor_needs_no_jax() -> None:
    code = "import sys, outside_processor; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
