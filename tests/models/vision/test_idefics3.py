"""Vision of Idefics3 and SmolVLM: the order of patches, sides, and saved names. Values: `test_towers`."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.models.vision.idefics3 import Idefics3Config
from jaxinfer.types import VISION
from tests.models.vision.towers import edited, golden_of, load, row_error

NAMES = ("idefics3", "smolvlm")


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    return request.param, load(golden_of(request.param), tmp_path_factory.mktemp("model"))


def test_squares_of_patches_in_another_order_are_noticed(loaded: tuple[str, Model]) -> None:
    """A token's patches are read row by row."""
    name, model = loaded
    vision = model.params[VISION]
    parts = np.asarray(vision["project"]).reshape(32, *[golden_of(name).files["config.json"]["scale_factor"]] * 2, 32)
    params = {**vision, "project": jnp.asarray(parts.swapaxes(1, 2).reshape(32, -1))}
    other = model.replace(params={**model.params, VISION: params})
    assert row_error(other, golden_of(name).scenes["one"]) > 10


def test_a_saved_model_has_the_names_of_transformers(loaded: tuple[str, Model], tmp_path: pathlib.Path) -> None:
    name, model = loaded
    model.save(tmp_path)
    saved = {tensor for path in tmp_path.glob("*.safetensors") for tensor in load_file(path)}
    assert saved == set(golden_of(name).shapes)


def test_a_side_at_which_positions_of_transformers_coincide_is_refused() -> None:
    with pytest.raises(ConfigError, match="image_size"):
        Idefics3Config.from_json(edited(NAMES[0], "vision_config.patch_size", 19))
