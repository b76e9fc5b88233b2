"""Mistral 3's vision: its tokens. Values: `test_towers`."""

import json
import pathlib

from tests.images.towers import shaped
from tests.models.vision.towers import golden_of, load, vision_of


def test_the_tokens_after_rows_are_those_of_the_vocabulary(tmp_path: pathlib.Path) -> None:
    vocabulary = {f"w{index}": index for index in range(62)} | {"[IMG_BREAK]": 62, "[IMG_END]": 63}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    assert vision_of(load(golden_of("mistral3"), tmp_path)).processor.expand(shaped((1, 4, 2))) == [[62, 62, 62, 63]]
