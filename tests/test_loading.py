"""Loading of the files next to the weights in a model folder."""

import json
import pathlib
from typing import Any

import pytest

from jaxinfer import load_model
from jaxinfer.weights import CheckpointError
from tests.models.test_parity import golden
from tools.oracle.golden import write_checkpoint


def folder_with(folder: pathlib.Path, generation_config: Any) -> str:
    write_checkpoint(golden("llama-mha"), folder)
    text = generation_config if isinstance(generation_config, str) else json.dumps(generation_config)
    (folder / "generation_config.json").write_text(text)
    return str(folder)


def test_what_generation_config_recommends_is_kept(tmp_path: pathlib.Path) -> None:
    model = load_model(folder_with(tmp_path, {"top_k": 20.0}), show_progress=False)
    assert model.generation_config == {"top_k": 20.0}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"top_k": "many"}, r"generation_config\.json: top_k='many' must be an integer"),
        ({"temperature": -1}, r"generation_config\.json: temperature=-1.0 must be at least 0"),
        ("[1]", r"generation_config\.json is not a JSON object"),
        ("{", r"generation_config\.json is not valid JSON"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused(said: Any, named: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_model(folder_with(tmp_path, said), show_progress=False)
