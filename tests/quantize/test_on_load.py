"""Quantisation while a model is loaded: the parameters of a converted checkpoint, in its memory."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxinfer import LLM, load_model
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.config.aliases import SettingNameError, our_settings
from jaxinfer.config.quantization import ON_LOAD, QuantizationConfig
from jaxinfer.loading import abstract_model
from jaxinfer.quant.make.recipe import METHODS
from jaxinfer.quantize import Recipe, read_calibration
from jaxinfer.quantize.driver import quantize
from jaxinfer.text import load_tokenizer
from jaxinfer.weights import save_params
from jaxinfer.weights.errors import WeightsError
from jaxinfer.weights.formats import ADAPTERS
from tests.fakes import llama_json, random_model
from tests.quantize.models import folder_of

RECIPES = {
    "int8": Recipe("int8"),
    "fp8": Recipe("fp8"),
    "w8a8": Recipe("int8", activations=True),
    "int4": Recipe("int4", group_size=32),
    "nf4": Recipe("nf4"),
    "fp4": Recipe("fp4"),
    "mxfp4": Recipe("mxfp4"),
    "gptq": Recipe("gptq", group_size=32),
    "awq": Recipe("awq", group_size=32),
    "smoothquant": Recipe("smoothquant"),
}
SAMPLES = {"calibration_samples": 6, "calibration_length": 40}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return folder_of("qwen2-bias", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).integers(0, 64, 400)
    path.write_text(" ".join(f"w{word}" for word in words))
    return path


def settings(method: str, text: pathlib.Path, group_size: int = 32) -> QuantizationConfig:
    needs = {"calibration_data": str(text), **SAMPLES} if method in ("gptq", "awq", "smoothquant") else {}
    return QuantizationConfig(quantization=method, quantization_group_size=group_size, **needs)


def on_disk(source: pathlib.Path, folder: pathlib.Path, recipe: Recipe, text: pathlib.Path):
    samples = read_calibration(str(text), load_tokenizer(source), 6, 40) if recipe.calibrated else None
    quantize(str(source), folder, recipe, samples)
    return load_model(str(folder), show_progress=False)


def require_equal(found, expected) -> None:
    assert jax.tree.structure(found.params) == jax.tree.structure(expected.params)  # layouts are part of it
    for (path, a), b in zip(jax.tree.leaves_with_path(found.params), jax.tree.leaves(expected.params), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if name in ("gptq", "awq") else ()) for name in RECIPES]
)
def test_it_is_the_converted_checkpoint(
    method: str, source: pathlib.Path, text: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    asked = settings(method, text)
    found = load_model(str(source), show_progress=False, quantization=asked)
    require_equal(found, on_disk(source, tmp_path / "made", RECIPES[method], text))
    planned = abstract_model(str(source), quantization=asked)
    assert jax.tree.structure(planned.params) == jax.tree.structure(found.params)
    assert all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(planned.params), jax.tree.leaves(found.params), strict=True)
    )
    assert found.folded is (method in ("awq", "smoothquant"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen2_moe-hub", "int8"),
        pytest.param("qwen2_moe-hub", "smoothquant", marks=pytest.mark.slow),
        ("phi3-partial-hub", "fp8"),
        pytest.param("deepseek_v3-hub", "nf4", marks=pytest.mark.slow),
        pytest.param("falcon-40b-hub", "w8a8", marks=pytest.mark.slow),
        pytest.param("gemma2-window", "awq", marks=pytest.mark.slow),
        pytest.param("gemma3n_text-hub", "smoothquant", marks=pytest.mark.slow),
        pytest.param("gemma4_text-effective-hub", "awq", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa-every-other", "gptq", marks=pytest.mark.slow),
    ],
)
def test_families_whose_tensors_lie_otherwise(
    name: str, method: str, text: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Experts, tensors that fill several parameters, grouped queries, latents, layers that read more than states."""
    folder = folder_of(name, tmp_path / "source")
    found = load_model(str(folder), show_progress=False, quantization=settings(method, text))
    require_equal(found, on_disk(folder, tmp_path / "made", RECIPES[method], text))


def test_every_method_is_a_recipe() -> None:
    assert set(ON_LOAD) == {*METHODS, "w8a8"} == set(RECIPES)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"quantization": "int3"}, "quantization"),
        ({"quantization": "int4", "quantization_group_size": 4}, "quantization_group_size"),
        ({"quantization": "int8", "calibration_data": "a.txt"}, "calibration_data"),
        ({"quantization": "gptq", "calibration_data": "a.txt", "calibration_samples": 0}, "calibration_samples"),
        ({"quantization": "gptq", "calibration_data": "a.txt", "calibration_length": 1}, "calibration_length"),
        ({"quantization": "gptq"}, "calibration_data"),  # of a model that is not quantised
        ({"quantization": "gptq", "calibration_data": "absent.txt"}, "calibration_data"),
        ({"quantization": "compressed-tensors"}, "quantization"),
        ({"quantization": "int4", "quantization_group_size": 96}, "quantization"),  # no weight has such groups
        ({"quantization": "awq", "calibration_data": "a.txt", "enable_lora": True}, "quantization"),
    ],
)
def test_a_setting_that_cannot_be_is_named(given: dict, field: str, source: pathlib.Path) -> None:
    with pytest.raises(EngineConfigError, match=f"^{field} = "):
        LLM(str(source), show_progress=False, **given)


def test_a_quantised_checkpoint_keeps_its_method(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    quantize(str(source), tmp_path / "made", Recipe("nf4"))
    stored = load_model(str(tmp_path / "made"), show_progress=False)
    require_equal(load_model(str(tmp_path / "made"), show_progress=False, quantization="bitsandbytes"), stored)
    for other in ("fp8", "awq", "gguf"):
        with pytest.raises(EngineConfigError, match=f"^quantization = '{other}': .* quant_method = 'bitsandbytes'"):
            load_model(str(tmp_path / "made"), show_progress=False, quantization=other)


def test_names_of_another_engine_mean_a_method() -> None:
    """vLLM's "bitsandbytes" quantises a plain checkpoint in 4 bits; its kernels are no methods here."""
    of_plain = {"bitsandbytes": "nf4", "awq_marlin": "awq", "gptq_marlin": "gptq", "fp8": "fp8"}
    assert {name: QuantizationConfig(quantization=name).method_on_load for name in of_plain} == of_plain
    assert QuantizationConfig(quantization="awq_marlin").is_of("AWQ")
    assert all(not list(QuantizationConfig(quantization=name).faults()) for name in ADAPTERS)


def test_transformers_names_are_methods() -> None:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    assert our_settings({"load_in_4bit": True}, names) == {"quantization": "nf4"}
    assert our_settings({"load-in-8bit": True, "quantization": "int8"}, names) == {"quantization": "int8"}
    assert our_settings({"load_in_4bit": False, "load_in_8bit": False}, names) == {}
    with pytest.raises(SettingNameError, match="load_in_4bit"):
        our_settings({"quantization": "fp8", "load_in_4bit": True}, names)


def test_a_model_in_memory_is_served_as_it_is(source: pathlib.Path) -> None:
    with pytest.raises(EngineConfigError, match=r"^quantization = "):
        LLM(load_model(str(source), show_progress=False), show_progress=False, quantization="int8")


@pytest.mark.slow
def test_an_engine_serves_it_and_takes_new_weights(source: pathlib.Path) -> None:
    """Weights of a trainer, which are not quantised, are quantised again."""
    plain, small = load_model(str(source), show_progress=False), {"max_model_len": 64, "max_num_seqs": 2}
    with LLM(str(source), show_progress=False, config=EngineConfig(quantization="int8", **small)) as llm:
        before = {path: np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(llm.model.params)}
        assert any(leaf.dtype == np.int8 for leaf in before.values())
        llm.update_weights(jax.tree.map(lambda leaf: 2 * leaf, plain.params))
        doubled = dict(jax.tree.leaves_with_path(llm.model.params))
        assert any(not np.array_equal(np.asarray(doubled[path]), leaf) for path, leaf in before.items())
        llm.update_weights(plain.params)
        for path, leaf in jax.tree.leaves_with_path(llm.model.params):
            assert np.asarray(leaf).tobytes() == before[path].tobytes(), path


@pytest.mark.slow
def test_folded_layers_are_updated_together(source: pathlib.Path, text: pathlib.Path) -> None:
    """AWQ leaves layers whose weights do not fit those of a trainer one by one."""
    plain, asked = load_model(str(source), show_progress=False), settings("smoothquant", text)
    small = {"max_model_len": 64, "max_num_seqs": 2, **dataclasses.asdict(asked)}
    with LLM(str(source), show_progress=False, **small) as llm:
        with pytest.raises(WeightsError, match=r"^partial"):
            llm.update_weights({"layers_0": plain.params["layers_0"]}, partial=True)
        assert llm.update_weights(plain.params).version == 1


_PEAK = """
import pathlib, re, sys, threading, time
import jax, jax.numpy as jnp
from jaxinfer import load_model
def own():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
load_model(sys.argv[1], show_progress=False, quantization=sys.argv[3])  # compiles
begin, most, ended = own(), [0], []
def watch():
    while not ended:
        most[0] = max(most[0], own())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[2], show_progress=False, quantization=sys.argv[3])
ended.append(True)
thread.join()
held = sum(leaf.size * (4 if leaf.dtype.name.endswith("int4") else 8 * leaf.dtype.itemsize) // 8
           for leaf in jax.tree.leaves(model.params))  # JAX counts a byte for 4 bits
print(most[0] - begin, held)
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("method", ["int8", "nf4"])
def test_memory_is_that_of_the_quantised_model_and_a_layer(method: str, tmp_path: pathlib.Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 256}
    for layers in (1, 24):
        model = random_model(num_hidden_layers=layers, **shape)
        save_params(tmp_path / str(layers), model.params, model.specs, llama_json(num_hidden_layers=layers, **shape))
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params["layers_0"]))
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "1"), str(tmp_path / "24"), method]
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # what is freed is the system's
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | at_once)
    peak, held = map(int, done.stdout.split())
    assert held < 0.26 * 24 * layer
    assert peak < held + layer, f"{peak / 1e6:.0f} MB for {held / 1e6:.0f} MB, a layer is {layer / 1e6:.0f} MB"
