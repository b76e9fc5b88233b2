"""The tool that trains demo-vision: its pictures, and a quick run."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from tools.train_demo import __main__ as tool
from tools.train_demo.pictures import COLOURS, Picture, Shape, draw, random_picture
from tools.train_demo.vision import BLOCK, SIDES


@pytest.mark.parametrize("kind", ["circle", "triangle", "square", "cross"])
def test_a_picture_shows_what_its_description_says(kind: str) -> None:
    picture = Picture(Shape(kind, "red", "large", (0, 2)), "white")
    assert str(picture) == f"A large red {kind} at the top right, on a white background."
    pixels = np.asarray(draw(picture, 112, 84, np.random.default_rng(0)), np.int32)

    def nearest(row: int, column: int) -> str:
        return min(COLOURS, key=lambda name: np.abs(pixels[row, column] - COLOURS[name]).sum())

    assert pixels.shape == (84, 112, 3)
    assert (nearest(26, 86), nearest(70, 20)) == ("red", "white")


def test_pictures_are_told_apart_by_their_seed() -> None:
    drawn = [str(random_picture(np.random.default_rng(seed))) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_a_quick_run_writes_a_folder_that_loads(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--vision", "--quick", "--out", str(tmp_path)]) == 0
    assert "vision step 6/6" in capsys.readouterr().out
    model = load_model(str(tmp_path / "vision"), show_progress=False)
    assert model.vision is not None
    image = model.vision.processor.prepare(np.zeros((SIDES[0], SIDES[0], 3), np.uint8))
    (begin, pad, end) = model.tokenizer.encode(BLOCK, add_special_tokens=False)
    tokens = jnp.array([begin, *[pad] * (image.patches.shape[0] // 4), end])
    assert model.apply(model.params, tokens, [image]).shape == (len(tokens), 512)
