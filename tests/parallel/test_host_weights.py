"""Weights of layers in host memory, copied to the device in a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxinfer.parallel.host_weights import LayerWeights

LAYERS, WIDTH = 4, 8


def layers(dtype, hosted):
    """Return the weights of layers, of which those of ``hosted`` are in host memory."""
    random = np.random.default_rng(0)
    places = {kind: SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("device", "pinned_host")}

    def layer(place):
        matrix = random.normal(size=(WIDTH, WIDTH)).astype(dtype)
        scale = random.normal(size=WIDTH).astype(dtype)
        kind = "pinned_host" if place in hosted else "device"
        return {"matrix": jax.device_put(matrix, places[kind]), "scale": jax.device_put(scale, places["device"])}

    return [layer(place) for place in range(LAYERS)]


def run(given, x):
    weights = LayerWeights(given)
    for place in range(LAYERS):
        own = weights.take(place, {"x": x})
        x = x + jnp.tanh((x * own["scale"]) @ own["matrix"])
    return x


@pytest.mark.parametrize("hosted", [(), (0,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_have_the_bits_of_weights_on_the_device(dtype, hosted):
    x = jnp.linspace(-1, 1, 3 * WIDTH, dtype=dtype).reshape(3, WIDTH)
    expected = jax.jit(run)(layers(dtype, ()), x)
    assert np.array_equal(jax.jit(run)(layers(dtype, hosted), x), expected)


def test_numbers_that_are_not_finite_stay_in_their_rows():
    """A layer waits for a number of the one before, which may be anything."""
    x = jnp.ones((3, WIDTH)).at[0].set(jnp.nan)
    found = jax.jit(run)(layers(jnp.float32, range(LAYERS)), x)
    assert np.isnan(found[0]).all()
    assert np.array_equal(found[1:], jax.jit(run)(layers(jnp.float32, ()), x)[1:])


def test_a_copy_waits_for_the_layer_with_such_weights_before_it():
    """The first two copies wait for nothing, any other for what the layer before the one ahead has computed."""
    x = jnp.ones((3, WIDTH))
    barriers = str(jax.make_jaxpr(run)(layers(jnp.float32, range(LAYERS)), x)).count("optimization_barrier")
    assert barriers == LAYERS - 2
    assert "optimization_barrier" not in str(jax.make_jaxpr(run)(layers(jnp.float32, ()), x))
    assert "device_put" not in str(jax.make_jaxpr(run)(layers(jnp.float32, ()), x))
