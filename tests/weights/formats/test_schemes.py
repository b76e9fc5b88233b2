"""Config groups of compressed-tensors: the group of each weight, and rejected groups."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from jaxinfer.weights.formats.fields import Fields
from jaxinfer.weights.formats.schemes import Schemes
from tests.weights.files import refused

WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}


def schemes(*targets: list[str], **more: Any) -> Schemes:
    """Return groups of 4 and 8 bits in turn."""
    groups = {
        f"group_{i}": {"targets": names, "weights": {**WEIGHTS, "num_bits": 4 + i % 2 * 4}}
        for i, names in enumerate(targets)
    }
    return Schemes(Fields({"format": "pack-quantized", "config_groups": groups, **more}, "quantization_config"))


@pytest.mark.parametrize(
    ("module", "bits"),
    [
        ("model.layers.0.mlp.down_proj", 8),  # its name takes precedence
        ("model.layers.1.mlp.down_proj", 4),  # the first of two patterns
        ("model.layers.1.mlp.up_proj", 8),
        ("model.layers.1.self_attn.q_proj", 4),  # by its class
    ],
)
def test_a_name_goes_before_a_pattern_and_that_before_a_class(module: str, bits: int) -> None:
    found = schemes(
        ["Linear", r"re:.*layers\.\d+\.mlp\.down_proj$"],
        ["model.layers.0.mlp.down_proj", "re:.*mlp.(down|up)_proj.*"],
    )
    assert found.of(module).bits == bits


def test_one_group_has_all() -> None:
    assert schemes(["re:nothing"]).of("a").bits == 4


def test_no_group_has_it() -> None:
    with refused("'lm_head' is quantised, but no group of config_groups has it among its targets"):
        schemes(["re:.*q_proj"], ["re:.*k_proj"]).of("lm_head")


def test_embeddings_are_of_a_class_of_their_own() -> None:
    assert schemes(["Linear"], ["Embedding"]).of("model.embed_tokens").bits == 8


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|b)*c", "((a)b)", "(", "[", r"(a)\1", "a" * 2000, "(?P<x>", "a{1000000000000}", "*"]
)
def test_patterns_that_are_refused(pattern: str) -> None:
    with refused("too complex to be matched|is not a regular expression|take too long"):
        schemes(["re:" + pattern], ["re:x"]).of("a" * 30)


@pytest.mark.parametrize("pattern", [".*a" * 8 + "x", "a?" * 40 + "x", "(a|a|a|a)" * 20 + "x"])
def test_patterns_that_would_take_for_ever(pattern: str) -> None:
    begin = time.perf_counter()
    with refused("take too long to be matched"):
        schemes(["re:" + pattern], ["re:x"]).of("a" * 200)
    assert time.perf_counter() - begin < 60


def test_many_matches_are_bounded_together() -> None:
    found = schemes(["re:.*a.*b.*c.*d.*"], ["Linear"])
    with refused("take too long"):
        for index in range(10_000):
            found.of("a" * 100 + str(index))


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"num_bits": 3}, "config_groups.group_0.weights.num_bits of config.json is 3: known are 4, 8"),
        ({"type": "float"}, "weights.type of config.json is 'float': known are int"),
        ({"strategy": "block"}, "weights.strategy of config.json is 'block': known are tensor, channel, group"),
        ({"group_size": None}, "weights.group_size of config.json is absent"),
        ({"group_size": 10**30}, "weights.group_size of config.json is 1000"),
        ({"symmetric": 2}, "weights.symmetric of config.json is 2"),
    ],
)
def test_weights(weights: Mapping[str, Any], sentence: str) -> None:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}}
    with refused(sentence):
        Schemes(Fields({"format": "pack-quantized", "config_groups": {"group_0": group}}, "quantization_config"))


@pytest.mark.parametrize(
    ("form", "weights", "sentence"),
    [
        ("marlin-24", WEIGHTS, "format of config.json is 'marlin-24': known are float-quantized"),
        (
            "nvfp4-pack-quantized",
            {**WEIGHTS, "type": "float", "strategy": "tensor_group"},
            "group_size .* known are 16",
        ),
        ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "block"}, "block_structure .* is absent"),
        ("float-quantized", {"type": "float", "num_bits": 8, "symmetric": False}, "symmetric .* is False"),
        ("mixed-precision", WEIGHTS, "format of config.json is 'mixed-precision'"),
    ],
)
def test_formats(form: str, weights: Mapping[str, Any], sentence: str) -> None:
    group = {"targets": ["Linear"], "weights": weights}
    with refused(sentence):
        Schemes(Fields({"format": form, "config_groups": {"group_0": group}}, "quantization_config"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"config_groups": {}}, "config_groups of config.json is .*: known are one group or more"),
        ({"config_groups": []}, "config_groups of config.json is .*: known are an object"),
        ({"config_groups": {"a": 1}}, "config_groups.a of config.json is 1: known are an object"),
        ({"config_groups": {"a\nb" * 99: 1}}, r"config_groups.'a\\nb"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": WEIGHTS}}}, "config_groups.a.targets of config.json"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config of config.json"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config of config.json"),
    ],
)
def test_configurations(config: Mapping[str, Any], sentence: str) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}
    with refused(sentence):
        Schemes(Fields({"format": "pack-quantized", "config_groups": groups, **config}, "quantization_config"))
