"""Saved adapters read back equal, here and in PEFT."""

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.peft.module_paths import find_places
from jaxinfer.lora.peft.read import read_adapter
from jaxinfer.lora.peft.write import save_adapter
from jaxinfer.lora.trainable import init_adapter
from jaxinfer.models.model import abstract
from tests.lora.goldens import GOLDENS, golden, load_base, read

PLAIN = (
    *("llama-qv", "llama-all-linear", "llama-rslora", "llama-patterns", "llama-regex", "llama-one-layer"),
    *("qwen2-qkv", "gpt2-attention", "mixtral-attention", "gemma-all", "phi3-all", "falcon-all"),
)
QKV = ("layers_0", "attention", "qkv")


def specs_of(name: str) -> Any:
    return abstract(golden(name).config, "float32").specs


def reread(folder: pathlib.Path, specs: Any) -> Adapter:
    return read_adapter(folder, specs, max_rank=64)


def product(delta: Delta) -> np.ndarray:
    return np.einsum("...r,ri->...i", np.asarray(delta.b, np.float64), delta.a)


def assert_same(first: Adapter, second: Adapter, atol: float = 1e-6) -> None:
    assert first.deltas.keys() == second.deltas.keys()
    for path, delta in first.deltas.items():
        np.testing.assert_allclose(product(delta), product(second.deltas[path]), atol=atol, err_msg=str(path))


@pytest.mark.parametrize("name", PLAIN)
def test_what_was_read_is_saved_with_its_modules_and_ranks(name: str, tmp_path: pathlib.Path):
    specs = specs_of(name)
    first = reread(GOLDENS / name, specs)
    second = reread(save_adapter(tmp_path, first, specs), specs)
    assert_same(first, second)
    for path, delta in first.deltas.items():
        assert second.deltas[path].a.shape == delta.a.shape
    assert second.rank == first.rank
    assert reread(save_adapter(tmp_path / "again", second, specs), specs).identity == second.identity


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("llama-dora", "layers_0/.* has a magnitude"),
        ("llama-lora-bias", "layers_0/.* has a bias"),
        ("llama-vocabulary", "embed/table is of embeddings"),
        ("mixtral-experts", "layers_0/.* is of experts"),
    ],
)
def test_what_is_not_written_is_refused_before_there_is_a_folder(name: str, named: str, tmp_path: pathlib.Path):
    specs = specs_of(name)
    adapter = read_adapter(GOLDENS / name, specs, max_rank=64, base=lambda path: _base(specs, path))
    with pytest.raises(ValueError, match=named):
        save_adapter(tmp_path / "out", adapter, specs)
    assert not (tmp_path / "out").exists()


def _base(specs: Any, path: tuple[str, ...]) -> np.ndarray:
    """Return ones, or PEFT's saved copy for a vocabulary table."""
    for key in path:
        specs = specs[key]
    saved = load_file(GOLDENS / "llama-vocabulary" / "adapter_model.safetensors")
    names = {"embed": "embed_tokens", "head": "lm_head"}
    copies = [tensor for name, tensor in saved.items() if f"{names.get(path[0])}.base_layer" in name]
    return copies[0] if copies else np.ones(specs.shape, np.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: {("layers_9", "mlp", "down"): d}, "no parameter layers_9/mlp/down"),
        (
            lambda d: {QKV: dataclasses.replace(d, a=d.a[:, :5])},
            r"inputs and outputs \(5, 2, 4, 8\) and must have \(32,",
        ),
        (lambda d: {QKV: dataclasses.replace(d, a=d.a[:1])}, "layers_0/attention/qkv"),
        (lambda d: {QKV: dataclasses.replace(d, b=d.b * np.nan)}, "qkv holds NaN"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(change: Any, named: str, tmp_path: pathlib.Path):
    specs = specs_of("llama-qv")
    delta = reread(GOLDENS / "llama-qv", specs).deltas[QKV]
    with pytest.raises(ValueError, match=named):
        save_adapter(tmp_path, Adapter("", 4, change(delta)), specs)


def test_another_dtype_is_refused_by_name(tmp_path: pathlib.Path):
    specs = specs_of("llama-qv")
    with pytest.raises(ValueError, match="dtype is 'float8' and must be one of float32, bfloat16"):
        save_adapter(tmp_path, reread(GOLDENS / "llama-qv", specs), specs, dtype="float8")


def test_bfloat16_rounds_once_and_halves_the_file(tmp_path: pathlib.Path):
    specs = specs_of("llama-all-linear")
    first = reread(GOLDENS / "llama-all-linear", specs)
    wide, narrow = (save_adapter(tmp_path / dtype, first, specs, dtype=dtype) for dtype in ("float32", "bfloat16"))
    second = reread(narrow, specs)
    for path, delta in first.deltas.items():
        rounded = np.asarray(jnp.asarray(delta.a, jnp.bfloat16), np.float32)
        assert sorted(map(tuple, second.deltas[path].a)) == sorted(map(tuple, rounded))
    sizes = [(folder / "adapter_model.safetensors").stat().st_size for folder in (wide, narrow)]
    assert 0.4 < sizes[1] / sizes[0] < 0.85


def test_the_configuration_names_modules_shortly_where_it_can(tmp_path: pathlib.Path):
    specs = specs_of("llama-qv")
    one = reread(GOLDENS / "llama-one-layer", specs)
    for name, adapter in (("all", reread(GOLDENS / "llama-qv", specs)), ("one", one)):
        save_adapter(tmp_path / name, adapter, specs)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("all", "one")]
    assert [config["target_modules"] for config in configs] == [
        ["q_proj", "v_proj"],
        ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"],
    ]
    assert configs[0]["r"] == configs[0]["lora_alpha"] == 4


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(1, 5), share=st.floats(0.0, 1.0))
def test_any_adapter_with_any_zeros_is_read_again(
    seed: int, rank: int, share: float, tmp_path_factory: pytest.TempPathFactory
):
    specs, rng = specs_of("llama-qv"), np.random.default_rng(seed)
    deltas = {}
    for path, place in find_places(specs).of_paths.items():
        if path[0].startswith("layers") and (rng.random() < 0.5 or path == QKV):
            b = rng.standard_normal((*place.form, rank)) * (
                rng.random((*place.form[:2], *[1] * len(place.form[2:]), rank)) < share
            )
            deltas[path] = Delta(rng.standard_normal((rank, place.sizes[0])).astype(np.float32), b.astype(np.float32))
    first = Adapter("", rank, deltas)
    assert_same(first, reread(save_adapter(tmp_path_factory.mktemp("any"), first, specs), specs), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["llama-patterns", "gpt2-attention", "phi3-all"])
def test_peft_reads_what_was_saved(name: str, oracle_python: pathlib.Path, repo: pathlib.Path, tmp_path: pathlib.Path):
    case = golden(name)
    model = load_base(case, tmp_path / "base")
    given = read(GOLDENS / name, model)
    made = init_adapter(model, 3, jax.random.key(0))
    trained = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), made)
    for word, adapter in (("given", given), ("trained", trained)):
        save_adapter(tmp_path / word, adapter, find_specs(model))
        arguments = [str(tmp_path / "base"), str(tmp_path / word), json.dumps(case.tokens), str(tmp_path / "out.npy")]
        subprocess.run([oracle_python, "-m", "tools.oracle.saved_adapter", *arguments], cwd=repo, check=True)
        logits = np.asarray(model.with_lora(adapter)(jnp.asarray([case.tokens]))[0])
        np.testing.assert_allclose(logits, np.load(tmp_path / "out.npy"), atol=1e-5)


def find_specs(model: Any) -> Any:
    return model.family.param_specs(model.config)
