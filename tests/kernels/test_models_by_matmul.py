"""A whole model whose products are the Mosaic kernel's, interpreted on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quant import Plain
from pallas_kernels import compat
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.matmul import api
from pallas_kernels.matmul.mosaic import launch
from tests.fakes import random_model

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_hidden_layers": 1}
TOKENS = jnp.array([[5, 3, 90, 17, 2, 61]])


def logits(model, tokens):
    return np.asarray(compat.interpreted(lambda: jax.jit(model.apply)(model.params, tokens)))


def test_a_model_gives_a_row_the_same_bits_however_many_there_are(monkeypatch):
    plain = random_model("bfloat16", gain=1.0, **SHAPE)
    model, calls = plain.for_kernels("mosaic"), []
    assert isinstance(model.params["layers_0"]["mlp"]["gate_up"], Plain)
    interpreted = functools.partial(launch.matmul, interpret=compat.interpret_params())

    def counted(*arguments, **options):
        calls.append(options["gated"])
        return interpreted(*arguments, **options)

    monkeypatch.setattr(launch, "matmul", counted)
    monkeypatch.setattr(api, "lowering_target", lambda: Target("gpu", HOPPER))
    whole = logits(model, TOKENS)
    assert sorted(calls) == [False] * 4 + [True]  # qkv, out, down and the head; gate and up
    np.testing.assert_array_equal(whole[:, :2], logits(model, TOKENS[:, :2]))
    monkeypatch.undo()
    exact = np.asarray(in_float32(plain)(TOKENS))
    near = np.asarray(plain(TOKENS))
    assert np.abs(whole - exact).max() <= 1.5 * np.abs(near - exact).max()


def in_float32(model):
    """The same model in float32."""
    wide = random_model("float32", gain=1.0, **SHAPE)
    return wide.replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), model.params))
