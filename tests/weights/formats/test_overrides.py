"""Per-module settings that override those of the checkpoint, as GPTQModel and auto-round write them."""

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of
from tests.weights.formats.test_gptq import OUT, as_version_1, config, made

UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round"}


def of_three(prefix: str = "") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a module of 4 bits in groups of 32, one of 8 bits in groups of 48, and a head of 2 bits in one group."""
    tensors, expected = {}, {}
    for name, bits, size in ((UP, 4, 32), (DOWN, 8, 48), (HEAD, 2, 96)):
        name = name.replace("model.", prefix) if prefix else name
        parts, weight = made(bits, size=size)
        tensors |= {f"{name}.{part.removeprefix('a.')}": value for part, value in parts.items()}
        expected[f"{name}.weight"] = weight
    return tensors, expected


def assert_read(folder: pathlib.Path, said: dict[str, Any], prefix: str = "") -> None:
    tensors, expected = of_three(prefix)
    weights, _ = weights_of(folder, tensors, said)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(numbers(weight), expected[name])


@pytest.mark.parametrize(
    "dynamic",
    [
        {r"+:.*down_proj": {"bits": 8, "group_size": 48}, "+:lm_head": {"bits": 2, "group_size": -1}},
        {r"model\.layers\.0\.mlp\.down": {"bits": 8.0, "group_size": "48"}, "lm_head": {"bits": 2, "group_size": -1}},
        # the first matching rule applies alone
        {
            r".*\.0\..*down_proj$": {"bits": 8, "group_size": 48},
            r".*proj": {},
            r"-:.*\.1\..*": {},
            r"+:.*": {"bits": 2, "group_size": -1, "desc_act": True},
        },
        # patterns match at the beginning of a name
        {"down_proj": {"bits": 3}, ".*down": {"bits": 8, "group_size": 48}, "lm": {"bits": 2, "group_size": -1}},
    ],
)
def test_dynamic(tmp_path: pathlib.Path, dynamic: dict[str, Any]) -> None:
    assert_read(tmp_path, config(4, dynamic=dynamic))


def test_dynamic_symmetry(tmp_path: pathlib.Path) -> None:
    one, other = made(4), made(4, symmetric=True)
    tensors = {
        name.replace("a.", f"{module}."): value
        for module, made_ in (("a", one), ("b", other))
        for name, value in made_[0].items()
    }
    weights, _ = weights_of(tmp_path, tensors, config(4, dynamic={"b": {"sym": True}}))
    assert {name: weight.layout.zeros for name, weight in weights.items()} == {"a.weight": True, "b.weight": False}
    np.testing.assert_array_equal(numbers(weights["b.weight"]), other[1])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_module_is_found_by_the_name_that_its_model_has_for_it(tmp_path: pathlib.Path, prefix: str) -> None:
    rules = {r"^model\.layers\.0\.mlp\.down_proj$": {"bits": 8, "group_size": 48}, HEAD: {"bits": 2, "group_size": -1}}
    assert_read(tmp_path, config(4, dynamic=rules), prefix)


@pytest.mark.parametrize(
    "extra",
    [
        {DOWN: {"bits": 8, "group_size": 48}, HEAD: {"bits": 2, "group_size": -1}},
        # a name before patterns; patterns match anywhere
        {r".*mlp.*": {"bits": 2}, DOWN: {"bits": 8, "group_size": 48}, UP: {}, "head": {"bits": 2, "group_size": -1}},
        {r"0\.mlp\.down": {"bits": 8, "group_size": 48}, HEAD: {"bits": 2, "group_size": -1}, "visual": {"bits": 16}},
    ],
)
def test_extra_config(tmp_path: pathlib.Path, extra: dict[str, Any]) -> None:
    assert_read(tmp_path, {**ROUND, "extra_config": extra})


def test_a_name_of_another_module_is_no_pattern(tmp_path: pathlib.Path) -> None:
    tensors, expected = made(4)
    tensors |= {"layers.a.weight": np.ones((2, 2), np.float32)}
    tensors = {
        name.replace("a.q", "layers.a.b.q").replace("a.s", "layers.a.b.s"): value
        for name, value in tensors.items()
        if name != "a.g_idx"
    }
    weights, _ = weights_of(tmp_path, tensors, {**ROUND, "extra_config": {"layers.a": {"bits": 16}}})
    np.testing.assert_array_equal(numbers(weights["layers.a.b.weight"]), expected)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"dynamic": {"-:a": {}}},
            r"'a' is stored quantised, but quantization_config.dynamic.'-:a' of config.json says",
        ),
        ({"dynamic": {"a": {"bits": 8}}}, r"'a.scales' .* asks \[2, 32\]"),
        ({"dynamic": {"a": {"bits": 5}}}, "dynamic.a.bits of config.json is 5: known are 2, 3, 4, 8"),
        ({"dynamic": {"a": {"group_size": 0}}}, "dynamic.a.group_size of config.json is 0"),
        ({"dynamic": {"a": {"pack_dtype": "int8"}}}, "dynamic.a.pack_dtype of config.json is 'int8'"),
        ({"dynamic": {"a": 8}}, "dynamic.a of config.json is 8: known are an object"),
        ({"dynamic": ["a"]}, "dynamic of config.json is .*: known are an object"),
        ({"dynamic": {"+:(a+)+b": {}}}, "pattern '.*' of dynamic is too complex"),
        ({"dynamic": {"+:[": {}}}, "pattern '.*' of dynamic is not a regular expression"),
        ({"extra_config": {"a": {"bits": 16}}}, "'a' is stored quantised, but .*extra_config.a of config.json says"),
        ({"extra_config": {"a": {"data_type": "mx_fp"}}}, "extra_config.a.data_type of config.json is 'mx_fp'"),
        ({"extra_config": {"a": {"act_bits": 8}}}, "extra_config.a.act_bits of config.json is 8"),
    ],
)
def test_what_is_refused(tmp_path: pathlib.Path, said: dict[str, Any], sentence: str) -> None:
    whole = {**(config(4) if "dynamic" in said else ROUND), **said}
    with refused(sentence):
        weights_of(tmp_path, made(4)[0], whole)


def test_versions_are_of_all_modules(tmp_path: pathlib.Path) -> None:
    tensors, expected = made(8, size=48)
    tensors["a.qzeros"] = as_version_1(tensors["a.qzeros"], 8, OUT)
    said = config(4, dynamic={"a": {"bits": 8, "group_size": 48}}, checkpoint_format="gptq")
    np.testing.assert_array_equal(numbers(weights_of(tmp_path, tensors, said)[0]["a.weight"]), expected)
