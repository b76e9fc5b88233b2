"""LM heads stored next to embeddings that config.json ties; comparison with transformers: tests/models/test_parity."""

import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import load_model
from jaxinfer.convert import main
from jaxinfer.models.model import Model, abstract
from jaxinfer.types import EMBEDDING
from tools.oracle.golden import Golden, load, names

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "models"
TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
LLAMA = "qwen3-tied-hub"


def tied_cases() -> list[str]:
    """Return a case of each architecture with tied embeddings, stored in the common form."""
    found: dict[str, str] = {}
    for name in names(GOLDENS):
        config = json.loads((GOLDENS / name / "config.json").read_text())
        if abstract(config, "float32").config.tied and not name.endswith(("two-tables-hub", "head-alone-hub")):
            found.setdefault(config["architectures"][0], name)
    return list(found.values())


def table_of(tensors: Mapping[str, np.ndarray]) -> str:
    return next(name for name in tensors if name.endswith(TABLES) and "per_layer" not in name)


def head_of(table: str) -> str:
    return "language_model.lm_head.weight" if table.startswith("language_model.model.") else "lm_head.weight"


def written(folder: pathlib.Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Model:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return load_model(str(folder), "float32", show_progress=False)


def with_head(case: Golden, change: float) -> dict[str, np.ndarray]:
    tensors = case.tensors()
    head = tensors[table_of(tensors)].copy()
    head[-1, -1] += change
    return {**tensors, head_of(table_of(tensors)): head}


def same(one: Model, other: Model) -> bool:
    return one.config == other.config and jax.tree.all(jax.tree.map(jnp.array_equal, one.params, other.params))


@pytest.mark.parametrize("name", tied_cases())
def test_a_head_that_differs_in_one_number_is_a_head_of_its_own(name: str, tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / name)
    tensors = with_head(case, 1.0)
    flags = ("tie_word_embeddings", "tie_embedding") if "tie_embedding" in case.config else ("tie_word_embeddings",)
    inner = {"text_config": case.config["text_config"] | {flags[0]: False}} if "text_config" in case.config else {}
    untied = {**case.config, **dict.fromkeys(flags, False), **inner}
    found = written(tmp_path / "tied", case.config, tensors)
    assert not found.config.tied
    assert same(found, written(tmp_path / "untied", untied, tensors))
    assert float(found.params["head"]["table"][-1, -1]) == float(tensors[head_of(table_of(tensors))][-1, -1])


@pytest.mark.parametrize("name", tied_cases())
def test_an_equal_head_and_a_head_alone_are_the_table(name: str, tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / name)
    both = with_head(case, 0.0)
    alone = {name: tensor for name, tensor in both.items() if name != table_of(both)}
    plain = written(tmp_path / "plain", case.config, case.tensors())
    for folder, tensors in (("both", both), ("alone", alone)):
        assert same(written(tmp_path / folder, case.config, tensors), plain)


def test_without_a_tie_both_must_be_there(tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / LLAMA)
    tensors = with_head(case, 0.0)
    del tensors[table_of(tensors)]
    with pytest.raises(ValueError, match=r"lacks a tensor .*embed_tokens"):
        written(tmp_path / "untied", case.config | {"tie_word_embeddings": False}, tensors)


def test_rows_behind_the_first_thousands_are_compared(tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / LLAMA)
    tensors = case.tensors()
    table = np.zeros((10_000, case.config["hidden_size"]), np.float32)
    head = table.copy()
    head[9_999, 0] = 1.0
    sized = {**case.config, "vocab_size": 10_000}
    for folder, other in (("same", table.copy()), ("other", head)):
        found = written(tmp_path / folder, sized, {**tensors, table_of(tensors): table, "lm_head.weight": other})
        assert found.config.tied == (folder == "same")


def test_a_tie_that_does_not_hold_is_said_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jaxinfer"):
        written(tmp_path / "tied", load(GOLDENS / LLAMA).config, with_head(load(GOLDENS / LLAMA), 1.0))
        load_model(str(tmp_path / "tied"), "float32", show_progress=False)
    said = [record.getMessage() for record in caplog.records if "lm_head.weight" in record.getMessage()]
    assert len(said) == 1


def test_what_is_saved_and_converted_has_both(tmp_path: pathlib.Path) -> None:
    model = written(tmp_path / "tied", load(GOLDENS / LLAMA).config, with_head(load(GOLDENS / LLAMA), 1.0))
    model.save(tmp_path / "saved")
    assert main([str(tmp_path / "tied"), str(tmp_path / "converted")]) == 0
    for folder in ("saved", "converted"):
        assert same(load_model(str(tmp_path / folder), "float32", show_progress=False), model)


def test_what_is_saved_of_a_head_alone_is_a_table(tmp_path: pathlib.Path) -> None:
    tensors = with_head(load(GOLDENS / LLAMA), 0.0)
    del tensors[table_of(tensors)]
    model = written(tmp_path / "alone", load(GOLDENS / LLAMA).config, tensors)
    model.save(tmp_path / "saved")
    assert same(load_model(str(tmp_path / "saved"), "float32", show_progress=False), model)
    assert EMBEDDING[0] in model.params
    assert "head" not in model.params


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_a_quantised_table_and_head_that_differ_are_read_apart(method: str, tmp_path: pathlib.Path) -> None:
    """Only layers are quantised here; the tables are unquantised."""
    case = load(GOLDENS / LLAMA)
    written(tmp_path / "tied", case.config, with_head(case, 1.0))
    assert main([str(tmp_path / "tied"), str(tmp_path / "made"), "--quantize", method]) == 0
    again = load_model(str(tmp_path / "made"), "float32", show_progress=False)
    assert not again.config.tied
    assert not jnp.array_equal(again.params["head"]["table"], again.params["embed"]["table"])
