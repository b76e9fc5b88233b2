"""Regular expressions of config.json, matched with module names."""

import re
import time

import pytest

from jaxinfer.weights.formats.patterns import Patterns
from tests.weights.files import refused

NAMES = ["model.layers.0.mlp.up_proj", "model.layers.18.mlp.gate_proj", "lm_head", "a.*", ""]
PATTERNS = [
    *(
        r".*\.18\..*gate.*",
        r"model",
        r"layers",
        r"^lm_head$",
        r"\.mlp\.(?:up|down)_proj$",
        r".*(?!x)",
        r"a\.*",
        r"l.*d",
    ),
    *(r"model\.layers\.(?!18\.)\d+\.mlp", "", ".*", "up|lm", r"[a-z]+\.layers\.[01]\."),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_they_match_as_pythons_do(pattern: str, name: str) -> None:
    patterns = Patterns("dynamic")
    assert patterns.match(pattern, name) == (re.match(pattern, name) is not None)
    assert patterns.search(pattern, name) == (re.search(pattern, name) is not None)


@pytest.mark.parametrize("pattern", [".*a" * 8 + "x", "a?" * 40 + "x"])
def test_a_search_that_would_take_for_ever(pattern: str) -> None:
    begin = time.process_time()
    with refused("take too long to be matched"):
        Patterns("dynamic").search(pattern, "a" * 200)
    assert time.process_time() - begin < 60


def test_rules_of_all_layers_of_a_mixture_are_matched() -> None:
    """60 layers of 128 experts, and ten rules with two repetitions each."""
    patterns = Patterns("dynamic")
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(128)]
    found = [sum(patterns.match(rf".*\.{layer}\..*up.*", name) for name in names) for layer in range(10)]
    assert found[9] >= 128
