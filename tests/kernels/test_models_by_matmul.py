"""A whole model that uses the Mosaic matmul kernel, interpreted on the CPU."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quant import LoRAWeight, Unquantized, matmul
from jaxinfer.quant.layouts import Grouped
from pallas_kernels import compat
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.matmul import api
from pallas_kernels.matmul.mosaic import launch
from pallas_kernels.token_quant import api as token_quant
from pallas_kernels.token_quant import mosaic as rounding
from tests.fakes import random_model
from tests.quant.models import stored_and_plain

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_hidden_layers": 1}
SHAPES = ((3, 64), (64, 3, 32), (3, 32))  # of inputs, of a weight and of its bias
TOKENS = jnp.array([[5, 3, 90, 17, 2, 61]])


def logits(model, tokens):
    return np.asarray(compat.interpreted(lambda: jax.jit(model.apply)(model.params, tokens)))


def test_a_model_gives_a_row_the_same_bits_however_many_there_are(monkeypatch):
    plain = random_model("bfloat16", gain=1.0, **SHAPE)
    model, calls = plain.for_kernels("mosaic"), []
    assert isinstance(model.params["layers_0"]["mlp"]["gate_up"], Unquantized)
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


def test_a_bias_is_added_in_the_launch_of_its_product(monkeypatch):
    """The result is bitwise that of a bias added after the product, as for weights with adapters."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, bias = (jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, SHAPES, strict=True))
    plain, calls = Unquantized(weight, "in first", ("kv", None, None), "mosaic"), []
    interpreted = functools.partial(launch.matmul, interpret=compat.interpret_params())

    def counted(x, weights, extras, **options):
        calls.append(extras.bias is not None)
        return interpreted(x, weights, extras, **options)

    monkeypatch.setattr(launch, "matmul", counted)
    monkeypatch.setattr(api, "lowering_target", lambda: Target("gpu", HOPPER))
    within, behind = (
        np.asarray(compat.interpreted(lambda w=w: jax.jit(matmul)(x, w, bias))) for w in (plain, LoRAWeight(plain))
    )
    assert calls == [True, False]
    np.testing.assert_array_equal(within, behind)
    assert np.abs(within - np.einsum("rk,khd->rhd", *(np.asarray(one, np.float32) for one in (x, weight)))).max() > 0.1


def in_float32(model):
    """Return the same model in float32."""
    wide = random_model("float32", gain=1.0, **SHAPE)
    return wide.replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), model.params))


def test_a_model_whose_inputs_are_rounded(monkeypatch, tmp_path):
    """Kernels do the rounding and all products, the 16-bit head included; queries, keys and values are one product."""
    shape = SHAPE | {"hidden_size": 128}

    def choose(name, inputs):
        return Grouped("int8", inputs, activations="int8", int8_steps=127.0) if "layers" in name else None

    stored, _ = stored_and_plain(random_model("bfloat16", gain=1.0, **shape), tmp_path, choose)
    model, calls = stored.for_kernels("mosaic"), []

    def counted(kernel):
        def call(*arguments, **options):
            calls.append(kernel.__module__.split(".")[1])
            return kernel(*arguments, **options, interpret=compat.interpret_params())

        return call

    monkeypatch.setattr(launch, "matmul", counted(launch.matmul))
    monkeypatch.setattr(rounding, "quantize", counted(rounding.quantize))
    for module in ("matmul.api", "choice"):
        monkeypatch.setattr(f"pallas_kernels.{module}.lowering_target", lambda: Target("gpu", HOPPER))
    whole = logits(model, TOKENS)
    assert collections.Counter(calls) == {"matmul": 5, "token_quant": 1}  # traced once for tokens of one shape
    np.testing.assert_array_equal(whole[:, :2], logits(model, TOKENS[:, :2]))
    monkeypatch.undo()
    token_quant._kernel.cache_clear()
    near = np.asarray(stored(TOKENS))
    assert np.abs(whole - near).max() <= 0.05 * np.abs(near).max()
