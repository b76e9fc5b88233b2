"""An adapter reads the same for every naming of its base model: text model, wrapper, or model without a head."""

import json
import logging
import pathlib
import re
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.naming import find_naming, is_of_others
from jaxinfer.lora.peft.read import read_adapter
from tests.lora.goldens import GOLDENS, golden
from tests.lora.goldens import read as read_lora
from tests.lora.peft.test_read import changed, own_base, read, specs_of

Rename = Callable[[str], str]
BEGIN = "base_model.model."
SPELLINGS: Mapping[str, Rename] = {
    "wrapper": lambda name: re.sub(r"^model\.", "model.language_model.", name),
    "wrapper of before 4.52": lambda name: f"language_model.{name}",
    "without a head": lambda name: re.sub(r"^(model|transformer)\.", "", name),
    "wrapper without a head": lambda name: re.sub(r"^model\.", "language_model.", name),
}
NAMES = ("llama-patterns", "llama-dora", "qwen2-bias-all", "llama-vocabulary", "llama-tokens", "mixtral-experts")


def respelt(name: str, folder: pathlib.Path, rename: Rename, config: Mapping[str, Any] | None = None) -> pathlib.Path:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        for tensor in list(tensors):
            tensors[BEGIN + rename(tensor.removeprefix(BEGIN))] = tensors.pop(tensor)

    return changed(name, folder, edit, config)


def assert_same_deltas(name: str, folder: pathlib.Path) -> None:
    base = bases(name)
    expected, found = read(name, GOLDENS / name, base=base).deltas, read(name, folder, base=base).deltas
    assert found.keys() == expected.keys()
    for path, delta in expected.items():
        for kind in ("a", "b", "magnitude", "bias"):
            assert np.array_equal(getattr(found[path], kind), getattr(delta, kind)), (path, kind)


def bases(name: str) -> Any:
    """Return the base model's parameters if the adapter has copies of them."""
    return own_base(name) if "vocabulary" in name else None


def has_head(name: str) -> bool:
    return "lm_head" in (GOLDENS / name / "adapter_config.json").read_text()


SPELT = [(name, spelling) for name in NAMES for spelling in SPELLINGS if not ("without" in spelling and has_head(name))]
"""Adapters and spellings. Spellings without the causal model's names exist only for models without a head."""


@pytest.mark.parametrize(("name", "spelling"), SPELT)
def test_an_adapter_is_read_by_any_spelling(name: str, spelling: str, tmp_path: pathlib.Path):
    rename = SPELLINGS[spelling]
    rules = {"llama-patterns": {"alpha_pattern": alpha(rename)}}.get(name)
    assert_same_deltas(name, respelt(name, tmp_path, rename, rules))


def alpha(rename: Rename) -> dict[str, int]:
    """Return the ``alpha_pattern`` of the case, whose second key is a pattern of a whole module name."""
    return {"(q|k)_proj": 2, f"^{rename('model.layers.0.self_attn.v_proj')}": 7, "k_proj": 9}


def test_gpt2_without_a_head(tmp_path: pathlib.Path):
    assert_same_deltas("gpt2-dora", respelt("gpt2-dora", tmp_path, SPELLINGS["without a head"]))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rules_are_about_the_writers_names(spelling: str, tmp_path: pathlib.Path):
    rename = SPELLINGS[spelling]
    begin = re.escape(rename("model.layers").removesuffix("layers"))
    rules = {"target_modules": rf"{begin}layers\.\d+\.self_attn\.(q|v)_proj", "exclude_modules": r".*visual.*"}
    assert_same_deltas("llama-qv", respelt("llama-qv", tmp_path, rename, rules))
    whole = [rename(f"model.layers.{layer}.self_attn.{one}_proj") for layer in range(2) for one in "qv"]
    assert_same_deltas("llama-qv", respelt("llama-qv", tmp_path / "whole", rename, {"target_modules": whole}))


def test_towers_are_passed_over(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    """Tensors of a vision tower are ignored with a warning, since a text model has none."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        for tensor in list(tensors):
            tensors[tensor.replace("model.model.", "model.model.language_model.")] = tensors.pop(tensor)
        for which, shape in (("A", (4, 8)), ("B", (8, 4))):
            tensors[f"{BEGIN}model.visual.blocks.0.attn.qkv.lora_{which}.weight"] = np.ones(shape, np.float32)

    config = {"target_modules": ["q_proj", "v_proj", "qkv"]}
    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        assert_same_deltas("llama-qv", folder := changed("llama-qv", tmp_path, edit, config))
    assert any("model.visual.blocks.0.attn.qkv" in record.getMessage() for record in caplog.records)
    with pytest.raises(AdapterError, match=r"vision tower.*model\.visual\.blocks\.0\.attn\.qkv"):
        read_adapter(folder, specs_of("llama-qv"), max_rank=64, tower=True)


def test_an_adapter_of_a_tower_alone_is_refused(tmp_path: pathlib.Path):
    folder = respelt("llama-qv", tmp_path, lambda name: name.replace("model.layers", "model.visual.blocks"))
    with pytest.raises(AdapterError, match="adapts nothing"):
        read("llama-qv", folder)


def test_a_module_in_two_spellings_is_refused(tmp_path: pathlib.Path):
    def edit(tensors: dict[str, np.ndarray]) -> None:
        for tensor in list(tensors):
            tensors[tensor.replace("model.model.", "model.model.language_model.")] = tensors[tensor].copy()

    with pytest.raises(AdapterError, match="adapts twice: 'model"):
        read("llama-qv", changed("llama-qv", tmp_path, edit))


@pytest.mark.parametrize(
    ("name", "others"),
    [("model.visual.blocks.0", True), ("vision_tower.a", True), ("model.layers.0.visual", False), ("visual", True)],
)
def test_what_a_text_model_has_not(name: str, others: bool):
    assert is_of_others(name) is others


def test_a_file_of_nothing_is_named_as_the_model_is():
    assert find_naming([], ["model.layers.0"]).prefixes == ()
    assert find_naming(["lm_head"], ["model.layers.0", "lm_head"]).own("lm_head") == "lm_head"
    assert golden("llama-qv").config["model_type"] == "llama"


ON_A_WRAPPER: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},  # includes the tower, which text does not reach
    {"target_modules": r".*language_model.*\.(q_proj|down_proj)", "rank_pattern": {r"layers\.1\.mlp\.down_proj": 3}},
    {"target_modules": ["o_proj"], "trainable_token_indices": [5, 9]},
]


@pytest.mark.parity
@pytest.mark.parametrize("lora", ON_A_WRAPPER)
def test_peft_on_a_wrapper(
    lora: dict[str, Any], oracle_python: pathlib.Path, repo: pathlib.Path, tmp_path: pathlib.Path
):
    tokens = [1, 2, 3, 4, 5, 9, 7, 8]
    said = json.dumps({"r": 4, "lora_alpha": 8, **lora})
    command = [oracle_python, "-m", "tools.oracle.wrapped_adapter", str(tmp_path), said, json.dumps(tokens)]
    subprocess.run(command, cwd=repo, check=True)
    model = load_model(str(tmp_path / "base"), dtype="float32", show_progress=False)
    logits = model.with_lora(read_lora(tmp_path / "adapter", model))(jnp.asarray([tokens]))[0]
    expected = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-5)
    assert np.abs(np.asarray(model(jnp.asarray([tokens]))[0]) - expected).max() > 0.1
