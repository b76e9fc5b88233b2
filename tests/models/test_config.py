"""config.json of every family with any value in any field: it is accepted, or rejected with the field and the value."""

import copy
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import family_for
from tests.models import test_config_fields as fields
from tests.models.test_config_fields import KNOWN
from tests.weights.test_hostile_folders import NUMBERS, ODD, places

VALUES = [*NUMBERS, *ODD, -math.inf]
WRONG_TYPES = ("a", [], {}, [1], {"a": 1}, math.nan, -math.inf)
FAST = 40


def said_of(config: Mapping[str, Any]) -> str | None:
    """Return the error message of a rejected config, or None if it is accepted."""
    try:
        family_for(config).config(config)
    except ConfigError as error:
        return str(error)
    return None


def edited(config: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    parent = result = copy.deepcopy(dict(config))
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return result


def edits(config: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return ((path, value) for path in places(dict(config)) if path for value in VALUES)


@pytest.mark.parametrize("count", [FAST, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", KNOWN)
def test_any_value_is_read_or_refused(architecture: str, count: int | None, seed: int) -> None:
    config = KNOWN[architecture]["config"]
    every = list(edits(config))
    for path, value in every if count is None else random.Random(seed).sample(every, count):
        said = said_of(edited(config, path, value))
        if said is not None and path[0] != "architectures":
            assert said.startswith("config.json: "), (path, value, said)
            assert said.isprintable(), (path, value, said)
            assert len(said) < 1000, (path, value, said)


@pytest.mark.parametrize("architecture", KNOWN)
def test_a_value_of_another_type_is_named(architecture: str) -> None:
    """The error names numbers and switches that change logits."""
    model = KNOWN[architecture]
    for number, edit in enumerate(fields.edits(model)):
        if (architecture, edit.field) in fields.OTHERWISE or not fields.acts(edit, model):
            continue
        if isinstance(model["config"].get(edit.field), int | float):
            value = WRONG_TYPES[number % len(WRONG_TYPES)]
            said = said_of({**model["config"], edit.field: value})
            assert said is not None, (edit.field, value)
            assert edit.field in said, (edit.field, value, said)


@pytest.mark.parametrize(
    ("architecture", "path", "value"),
    [
        ("Lfm2ForCausalLM", ("block_ffn_dim_multiplier",), 1e308),
        ("Gemma4ForCausalLM", ("hidden_size_per_layer_input",), 10**30),
        ("Gemma4ForCausalLM", ("hidden_size_per_layer_input",), []),
        ("HunYuanDenseV1ForCausalLM", ("rope_parameters", "alpha"), 1e308),
    ],
)
def test_values_that_were_read(architecture: str, path: tuple[str, ...], value: Any) -> None:
    said = said_of(edited(KNOWN[architecture]["config"], path, value))
    assert said is not None
    assert path[-1] in said
