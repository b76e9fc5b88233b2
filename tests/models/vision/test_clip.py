"""LLaVA's vision: names of tensors, and its layers. Values: `test_towers`."""

import json
import pathlib

import jax
import pytest
from safetensors.numpy import save_file

from jaxinfer import load_model
from jaxinfer.models.model import Model
from jaxinfer.models.vision.clip import ClipConfig
from tests.models.vision.towers import edited, golden_of, load, row_error, with_tower

NAME = "llava"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(golden_of(NAME), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("prefix", "tower"),
    [("", "vision_tower.vision_model."), ("model.", "vision_tower.vision_model."), ("model.", "vision_tower.")],
)
def test_names_of_older_and_newer_checkpoints_are_read(
    model: Model, tmp_path: pathlib.Path, prefix: str, tower: str
) -> None:
    golden = golden_of(NAME)

    def spelled(name: str) -> str:
        name = name.replace("vision_tower.", tower)
        return name if name.startswith("language_model.") else prefix + name

    tensors = {spelled(name): tensor for name, tensor in golden.tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(golden.files["config.json"]))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(golden.files["preprocessor_config.json"]))
    other = load_model(str(tmp_path), dtype="float32", show_progress=False)
    same = jax.tree.map(lambda one, two: bool((one == two).all()), other.params, model.params)
    assert all(jax.tree.leaves(same))


def test_the_last_layer_is_noticed_which_is_skipped(model: Model) -> None:
    params = model.params["vision"]
    wrong = with_tower(model, depth=3)
    wrong = wrong.replace(params={**model.params, "vision": {**params, "layers_2": params["layers_0"]}})
    assert row_error(wrong, golden_of(NAME).scenes["one"]) > 10


def test_other_towers_are_left_out(tmp_path: pathlib.Path) -> None:
    """LLaVA with a tower other than CLIP's runs as a text model."""
    files = golden_of(NAME).files
    other = edited(NAME, "vision_config.model_type", "siglip_vision_model")
    save_file(golden_of(NAME).tensors(), tmp_path / "model.safetensors")
    for name, content in {**files, "config.json": other}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_model(str(tmp_path), dtype="float32", show_progress=False).vision is None


@pytest.mark.parametrize(("layer", "depth"), [(-1, 3), (-2, 2), (1, 1), (0, 0), (-4, 0)])
def test_the_layer_whose_output_is_projected(layer: int, depth: int) -> None:
    assert ClipConfig.from_json(edited(NAME, "vision_feature_layer", layer)).depth == depth
