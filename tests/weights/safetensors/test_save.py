"""Saving is the inverse of loading, and other libraries read the files."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxinfer.types import ParamSpec, Source
from jaxinfer.weights import init_params, load_params, save_params
from jaxinfer.weights.safetensors.reader import DTYPES, SafetensorsFile
from tests.weights.files import tiny_specs, tiny_tensors, write_tensors
from tests.weights.test_load import keep

CONFIG = {"model_type": "llama", "hidden_size": 4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_file_comes_back_byte_for_byte(tmp_path: pathlib.Path, dtype: str) -> None:
    tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in tiny_tensors().items()}
    (tmp_path / "in").mkdir()
    write_tensors(tmp_path / "in" / "model.safetensors", tensors)
    params = load_params(tmp_path / "in", tiny_specs(), dtype)
    save_params(tmp_path / "out", params, tiny_specs(), CONFIG)
    back = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)


def test_the_folder_is_an_ordinary_one(tmp_path: pathlib.Path) -> None:
    save_params(tmp_path / "a" / "b", init_params(tiny_specs(), 0, "bfloat16"), tiny_specs(), CONFIG)
    folder = tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == {**CONFIG, "torch_dtype": "bfloat16"}
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("mlp.gate.weight").get_shape() == [5, 4]
    assert int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_a_dtype_on_request(tmp_path: pathlib.Path) -> None:
    params = init_params(tiny_specs(), 0)
    save_params(tmp_path, params, tiny_specs(), {**CONFIG, "dtype": "float32"}, dtype="float16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    back = load_params(tmp_path, tiny_specs(), "auto", keep)
    np.testing.assert_array_equal(back["block"]["qkv"], np.asarray(params["block"]["qkv"]).astype(np.float16))


def test_mixed_dtypes_stay_as_they_are_and_aligned(tmp_path: pathlib.Path) -> None:
    specs = {n: ParamSpec((3,), (None,), sources=(Source(f"{n}.weight", (3,)),)) for n in ("a", "b")}
    save_params(tmp_path, {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros(3)}, specs, CONFIG)
    back = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {name: value.dtype.name for name, value in back.items()} == {"a.weight": "bfloat16", "b.weight": "float32"}
    for info in SafetensorsFile(tmp_path / "model.safetensors").tensors.values():
        assert info.start % DTYPES[info.dtype].itemsize == 0
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
    assert load_params(tmp_path, specs, "float32", keep)["a"].tolist() == [1, 1, 1]


def test_saving_again_replaces(tmp_path: pathlib.Path) -> None:
    for seed in (0, 1):
        save_params(tmp_path, init_params(tiny_specs(), seed), tiny_specs(), CONFIG)
    expected = init_params(tiny_specs(), 1, "float32", keep)
    np.testing.assert_array_equal(load_params(tmp_path, tiny_specs(), "float32", keep)["embed"], expected["embed"])


@pytest.fixture
def shared() -> dict[str, Any]:
    return {
        "embed": ParamSpec((3, 2), (None, None), sources=(Source("e", (3, 2)),)),
        "head": ParamSpec((2, 3), (None, None), sources=(Source("e", (3, 2), transpose=True),)),
    }


def test_a_shared_tensor_is_written_once(tmp_path: pathlib.Path, shared: dict[str, Any]) -> None:
    embed = np.arange(6, dtype=np.float32).reshape(3, 2)
    save_params(tmp_path, {"embed": embed, "head": embed.T}, shared, CONFIG)
    params = load_params(tmp_path, shared, "float32", keep)
    np.testing.assert_array_equal(params["head"], embed.T)
    with pytest.raises(ValueError, match="two parameters that share the tensor 'e' differ"):
        save_params(tmp_path, {"embed": embed, "head": embed.T + 1}, shared, CONFIG)


def test_parameters_that_do_not_fit_their_specs(tmp_path: pathlib.Path) -> None:
    params = init_params(tiny_specs(), 0)
    with pytest.raises(ValueError, match=r"embed has shape \(4, 7\) where its spec says \(7, 4\)"):
        save_params(tmp_path, {**params, "embed": params["embed"].T}, tiny_specs(), CONFIG)
    with pytest.raises(ValueError, match="the parameters lack block/norm"):
        save_params(tmp_path, {"embed": params["embed"], "block": {}}, tiny_specs(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_in_parts(tmp_path: pathlib.Path) -> None:
    """A fused checkpoint tensor [d, 3 * heads * dim], whose thirds are separate slices of the parameter."""
    thirds = [slice(8 * index, 8 * index + 8) for index in range(3)]
    sources = tuple(
        Source("fused", (3, 24), reshape=(3, 2, 4), where=(slice(None), slice(None), i), part=(slice(None), third))
        for i, third in enumerate(thirds)
    )
    specs = {"qkv": ParamSpec((3, 2, 3, 4), (None,) * 4, sources=sources)}
    fused = np.arange(72, dtype=np.float32).reshape(3, 24)
    safetensors.numpy.save_file({"fused": fused}, tmp_path / "model.safetensors")
    told: list[tuple[int, int]] = []
    loaded = load_params(tmp_path, specs, "float32", keep, progress=lambda done, total, _: told.append((done, total)))
    np.testing.assert_array_equal(loaded["qkv"], fused.reshape(3, 3, 2, 4).swapaxes(1, 2))
    assert told == [(96, 288), (192, 288), (288, 288)]
    save_params(tmp_path / "again", loaded, specs, CONFIG)
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "again/model.safetensors")["fused"], fused)
    short = {"qkv": ParamSpec((3, 2, 3, 4), (None,) * 4, sources=sources[:2])}
    with pytest.raises(ValueError, match="its sources hold 48 values of 72"):
        load_params(tmp_path, short, "float32", keep)


def test_a_parameter_that_keeps_its_dtype(tmp_path: pathlib.Path) -> None:
    sources = {name: (Source(name, (3,)),) for name in ("bias", "w")}
    specs = {
        "bias": ParamSpec((3,), (None,), sources=sources["bias"], dtype="float32"),
        "w": ParamSpec((3,), (None,), sources=sources["w"]),
    }
    fine = np.float32([1.0001, -2.0003, 3.0007])
    safetensors.numpy.save_file(dict.fromkeys(sources, fine), tmp_path / "model.safetensors")
    loaded = load_params(tmp_path, specs, "bfloat16", keep)
    assert {name: value.dtype.name for name, value in loaded.items()} == {"bias": "float32", "w": "bfloat16"}
    np.testing.assert_array_equal(loaded["bias"], fine)
    assert init_params(specs, 0, "bfloat16", keep)["bias"].dtype == np.float32
    save_params(tmp_path / "again", loaded, specs, CONFIG, dtype="bfloat16")
    assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "bfloat16"
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "again/model.safetensors")["bias"], fine)
