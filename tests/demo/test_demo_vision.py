"""demo-vision describes pictures that it has not seen, offline and at the terminal."""

import io
import pathlib

import numpy as np
import pytest
from PIL import Image, ImageDraw

from jaxinfer import LLM, SamplingParams
from jaxinfer.generate import main
from tools.train_demo.pictures import draw, random_picture

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def test_it_describes_pictures_it_has_not_seen() -> None:
    rng = np.random.default_rng(2024)
    pictures = [random_picture(rng) for _ in range(32)]
    drawn = [draw(picture, 112, 84, rng) for picture in pictures]
    asked = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for image in drawn]
    with LLM("demo-vision", max_num_seqs=8, max_model_len=128, show_progress=False) as llm:
        outputs = llm.chat(asked, GREEDY)
    texts = [output.outputs[0].text for output in outputs]
    assert sum(text == str(picture) for text, picture in zip(texts, pictures, strict=True)) >= 18
    coloured = [f" {picture.shape.colour} " in text for text, picture in zip(texts, pictures, strict=True)]
    assert sum(coloured) >= 28


@pytest.mark.slow
def test_it_describes_a_file_at_the_terminal(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/images.md has this picture."""
    picture = Image.new("RGB", (112, 112), "white")
    ImageDraw.Draw(picture).ellipse((50, 2, 110, 62), fill="blue")
    picture.save(tmp_path / "circle.png")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    main(["demo-vision", "--image", str(tmp_path / "circle.png"), "--temperature", "0"])
    assert "A large blue circle at the top right" in capsys.readouterr().out
