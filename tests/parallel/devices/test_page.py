"""The section of docs/parallelism.md about functions runs: its code blocks in order, with their assertions."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.config import EngineConfigError
from jaxinfer.models.model import Model
from tests.fakes import random_model


def test_the_page_runs(repo: pathlib.Path) -> None:
    page = repo / "docs" / "parallelism.md"
    section = page.read_text(encoding="utf-8").partition("## Functions on several devices")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    model, alone = names["m"], load_model("demo", dtype="float32")
    assert isinstance(model, Model)
    assert repr(model).endswith("6 layers, 8 devices>")
    np.testing.assert_allclose(names["logits"], alone(names["ids"]), atol=1e-4)


def test_a_mesh_of_other_axes_loads_no_model() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with pytest.raises(EngineConfigError, match=r"the axes data \(Explicit\), model \(Explicit\), and must have"):
        load_model("demo", mesh=mesh)


def test_tokens_on_explicit_axes_are_refused_in_a_program() -> None:
    model, mesh = random_model(), jax.make_mesh((8,), ("batch",))
    tokens = jax.device_put(np.ones((8, 4), np.int32), jax.NamedSharding(mesh, jax.P("batch")))
    with pytest.raises(TypeError, match=r"tokens lies on a mesh with Explicit axes \('batch',\)"):
        jax.jit(model.apply)(model.params, tokens)
