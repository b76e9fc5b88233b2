"""Every field of a config.json has the same effect as in transformers, or its value is rejected.

The golden file has the effect of another value of each field on a tiny model (`tools/oracle/config_fields.py`): fields
that change logits or shapes there must change the parsed config here. The live test also compares logits.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import load_model
from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import family_for
from jaxinfer.weights import CheckpointError
from tests.models.answers import Answers, load_answers
from tools.oracle.golden import make_tensors

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "config_fields.json.gz"
SEED = 5  # seed of the oracle
NOISE = 1e-5
# transformers 5 clips the time steps of prompts to it, but not those of generated tokens: `nemotron_h`.
OTHERWISE = {("NemotronHForCausalLM", "time_step_min")}


class Edit(NamedTuple):
    """An edited field value and its result in transformers: logits, or "refused", and changed shapes."""

    field: str
    value: Any
    logits: list[float] | str
    shapes: Mapping[str, list[int] | None]


KNOWN = load_answers(GOLDEN)


def read(config: Mapping[str, Any]) -> Any:
    """Return the parsed config; None: rejected."""
    try:
        return family_for(config).config(config)
    except ConfigError:
        return None


def edits(model: Mapping[str, Any]) -> Iterator[Edit]:
    return (Edit(field, *told) for field, told in model["fields"].items())


def acts(edit: Edit, model: Mapping[str, Any]) -> bool:
    """Return whether transformers accepts the value and has other logits or shapes for it."""
    if isinstance(edit.logits, str):
        return False
    return bool(edit.shapes) or bool(np.abs(np.subtract(edit.logits, model["logits"])).max() > NOISE)


def overlooked(architecture: str, model: Mapping[str, Any]) -> list[str]:
    """Return the fields with an edited value that has an effect in transformers but not here."""
    base = read(model["config"])
    assert base is not None
    acting = [edit for edit in edits(model) if (architecture, edit.field) not in OTHERWISE and acts(edit, model)]
    return [edit.field for edit in acting if read({**model["config"], edit.field: edit.value}) == base]


@pytest.mark.parametrize("architecture", KNOWN)
def test_no_field_is_overlooked(architecture: str) -> None:
    assert overlooked(architecture, KNOWN[architecture]) == []


def test_many_fields_act() -> None:
    """Otherwise the test would cover too little."""
    acting = [
        edit
        for model in KNOWN.values()
        for edit in edits(model)
        if edit.shapes or (edit.logits != "refused" and edit.logits != model["logits"])
    ]
    assert len(acting) > 10 * len(KNOWN) > 500


def logits_of(model: Mapping[str, Any], edit: Edit, folder: pathlib.Path) -> np.ndarray | None:
    """Return the logits of jaxinfer; None: the value is rejected."""
    shapes = {name: tuple(shape) for name, shape in {**model["shapes"], **edit.shapes}.items() if shape is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**model["config"], edit.field: edit.value}))
    save_file(make_tensors(SEED, shapes, model["norm_centre"], model["query_share"]), folder / "model.safetensors")
    try:
        made = load_model(str(folder), "float32", show_progress=False)
    except (ConfigError, CheckpointError):
        return None
    return np.asarray(jax.jit(made.apply)(made.params, jnp.asarray(model["prompt"]))[-1, : len(model["logits"])])


def differing(model: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """Return the fields with an edited value that gives other logits here than in transformers."""
    base, found = read(model["config"]), []
    folder.mkdir()
    for edit in edits(model):
        mine = read({**model["config"], edit.field: edit.value})
        if not isinstance(edit.logits, str) and mine not in (None, base):
            logits = logits_of(model, edit, folder / edit.field)
            # The last bit may decide between experts.
            if logits is not None and not np.abs(logits - edit.logits).max() <= 3.0 * NOISE:
                found.append(edit.field)
    return found


@pytest.mark.parity
@pytest.mark.parametrize("architecture", KNOWN)
def test_live(architecture: str, live_answers: Callable[[str], Answers], tmp_path: pathlib.Path) -> None:
    """All architectures take 20 CPU minutes: each loads and compiles about twenty models."""
    model = live_answers("config_fields")[architecture]
    assert overlooked(architecture, model) == []
    assert differing(model, tmp_path / architecture) == []


@pytest.mark.parity
def test_the_oracle_answers_for_all_architectures(live_answers: Callable[[str], Answers]) -> None:
    assert live_answers("config_fields").keys() == KNOWN.keys()
