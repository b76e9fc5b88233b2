"""Gemma 3's vision: attention in both directions, and gradients. Values: `test_towers`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.model import Model
from jaxinfer.types import ImageInput
from tests.models.vision.towers import golden_of, images_of, load, logit_faults, vision_of

NAME = "gemma3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(golden_of(NAME), tmp_path_factory.mktemp("model"))


def test_attention_in_one_direction_is_noticed(model: Model) -> None:
    vision = vision_of(model)
    causal = dataclasses.replace(vision, config=dataclasses.replace(vision.config, bidirectional=False))
    assert logit_faults(dataclasses.replace(model, vision=causal), golden_of(NAME).scenes["one"]) != []


def test_each_token_sees_the_end_of_its_own_image(model: Model) -> None:
    (image,) = vision_of(model).placeholders
    tokens = np.array([[1, image, image, 2, image, 3], [image, image, 1, 1, image, image]])
    assert vision_of(model).ends(tokens).tolist() == [[0, 2, 2, 3, 4, 5], [1, 1, 2, 3, 5, 5]]


def test_logits_are_differentiable_in_pixels(model: Model) -> None:
    scene, vision = golden_of(NAME).scenes["one"], vision_of(model)
    (image,), tokens = images_of(model, scene), jnp.asarray([scene.prompt])

    def loss(pixels: jax.Array) -> jax.Array:
        return model.apply(model.params, tokens, [ImageInput(pixels, image.grid)])[0, -1, 3]

    pixels = vision.normalised(image.patches)
    gradient = jax.grad(loss)(pixels)
    direction = jax.random.normal(jax.random.key(0), pixels.shape)
    slope = (loss(pixels + 1e-2 * direction) - loss(pixels - 1e-2 * direction)) / 2e-2
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=0.05, abs=1e-3)
