"""The built-in calibration text is nearly as good as in-domain text, and better than none."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.loading import load_model
from jaxinfer.opening import model_folder
from jaxinfer.quantize import BUILT_IN, Recipe, read_calibration
from jaxinfer.quantize.driver import quantize
from jaxinfer.text import load_tokenizer

LENGTH = 128


@pytest.mark.slow
def test_it_is_nearly_as_good_as_ones_own(test_data: pathlib.Path, tmp_path: pathlib.Path):
    """Compare divergences of the draft model's next tokens on Shakespeare; the in-domain text is another part of it."""
    text = (test_data / "text" / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    border, tokenizer = len(text) * 4 // 5, load_tokenizer(model_folder("demo-draft"))
    own = tmp_path / "own.txt"
    own.write_text(text[:border], encoding="utf-8")
    held_out = np.asarray(tokenizer.encode(text[border : border + 40_000])[: 24 * LENGTH]).reshape(-1, LENGTH)

    def logprobs(folder: str) -> np.ndarray:
        model = load_model(folder, "float32", show_progress=False)
        return np.asarray(jax.jit(lambda p: jax.nn.log_softmax(model.apply(p, jnp.asarray(held_out))))(model.params))

    exact = logprobs("demo-draft")

    def divergence(name: str, method: str, path: str | None) -> float:
        recipe = Recipe(method, group_size=64, symmetric=False, weight_format="compressed-tensors")
        samples = None if path is None else read_calibration(path, tokenizer, 32, LENGTH)
        quantize("demo-draft", tmp_path / name, recipe, samples, output_format="orbax")
        return float((np.exp(exact) * (exact - logprobs(str(tmp_path / name)))).sum(-1).mean())

    rounded = divergence("rounded", "int4", None)
    mine, built_in = divergence("own", "gptq", str(own)), divergence("built-in", "gptq", BUILT_IN)
    assert mine < built_in < 0.65 * rounded
    assert built_in < 1.35 * mine
