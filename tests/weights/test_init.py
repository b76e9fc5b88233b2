"""Random initial weights: their distribution and dependencies."""

import jax
import numpy as np
import pytest

from jaxinfer.types import ParamSpec
from jaxinfer.weights import init_params
from jaxinfer.weights.tree import Fill, Path
from tests.weights.files import tiny_specs


def keep(path: Path, spec: ParamSpec, fill: Fill) -> np.ndarray:
    del path, spec
    return fill(())


def spec(*shape: int, init: str = "normal", scale: float = 0.02) -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape), init=init, scale=scale)


def test_same_seed_same_weights() -> None:
    one, again, other = (init_params(tiny_specs(), seed, "float32", keep) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one["block"]["qkv"], again["block"]["qkv"])
    assert (one["block"]["qkv"] != other["block"]["qkv"]).all()


def test_a_parameter_depends_on_its_path_alone() -> None:
    alone = init_params({"a": {"x": spec(50)}}, 1, "float32", keep)
    crowd = init_params({"b": {"x": spec(50)}, "a": {"w": spec(50), "x": spec(50)}}, 1, "float32", keep)
    np.testing.assert_array_equal(alone["a"]["x"], crowd["a"]["x"])
    assert (crowd["a"]["w"] != crowd["a"]["x"]).all()
    assert (crowd["b"]["x"] != crowd["a"]["x"]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_the_same_weights_rounded(dtype: str) -> None:
    exact = init_params({"x": spec(1000)}, 3, "float32", keep)["x"]
    rounded = init_params({"x": spec(1000)}, 3, dtype, keep)["x"]
    assert rounded.dtype.name == dtype
    np.testing.assert_array_equal(rounded, exact.astype(rounded.dtype))


def test_normal_has_the_scale() -> None:
    values = init_params({"x": spec(3, 700_000, scale=0.05)}, 0, "float32", keep)["x"].reshape(-1)
    assert abs(values.mean()) < 5 * 0.05 / np.sqrt(values.size)
    assert values.std() == pytest.approx(0.05, rel=5 / np.sqrt(values.size))
    assert np.unique(values[:1000]).size > 990
    assert abs(np.corrcoef(values[:1_000_000], values[1 << 20 :][:1_000_000])[0, 1]) < 0.005


def test_constants_and_the_default_device() -> None:
    params = init_params({"one": spec(3, init="ones"), "zero": spec(2, init="zeros")}, 0, "bfloat16")
    assert isinstance(params["one"], jax.Array)
    assert params["one"].dtype.name == "bfloat16"
    assert params["one"].tolist() == [1, 1, 1]
    assert params["zero"].tolist() == [0, 0]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="a: init must be normal, ones or zeros, got 'uniform'"):
        init_params({"a": spec(3, init="uniform")}, 0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        init_params({"a": spec(3)}, 0, "float8")
