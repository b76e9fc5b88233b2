"""Weight loading times: the four ways, on a small model."""

import pathlib

import jax
import numpy as np

from benchmarks import restore
from jaxinfer.weights import save_params
from jaxinfer.weights.native.writer import save_params as convert_params
from tests.fakes import llama_json, random_model


def test_the_ways_bring_the_same(tmp_path: pathlib.Path) -> None:
    model = random_model(dtype="bfloat16")
    specs = model.specs
    save_params(tmp_path / "safetensors", model.params, specs, llama_json())
    convert_params(tmp_path / "converted", model.params, specs, llama_json())
    ways = restore.ways(tmp_path, specs)
    for name in ("safetensors", "converted"):
        got = ways[name]()
        assert jax.tree.structure(got) == jax.tree.structure(model.params)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, got, model.params)))
    assert set(ways["orbax"]()) == set(model.params)
    assert ways["read"]() is None
    runs = restore.measure(2, ways, tmp_path)
    assert {len(taken[kind]) for taken in runs.values() for kind in ("clock", "processor")} == {2}
    lines = restore.table(1000, runs).splitlines()
    assert len(lines) == 4 + 8
    assert "| safetensors, warm | " in lines[4]
    assert lines[4].count("1.00") >= 2
