"""Models with an adapter among their parameters: logits of the merged weights, and gradients of its arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.models.model import Model, abstract
from jaxinfer.quant import LoRAWeight
from jaxinfer.weights import init_params
from tests.fakes import llama_json, random_model

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SHAPES = {  # [rank, in] and [*out, rank]
    ("embed", "table"): ((2, 97), (32, 2)),
    ("layers_0", "attention", "qkv"): ((6, 32), (2, 4, 8, 6)),
    ("layers_1", "attention", "out"): ((2, 32), (32, 2)),
    ("layers_1", "mlp", "gate_up"): ((4, 32), (2, 48, 4)),
    ("layers_1", "mlp", "down"): ((2, 48), (32, 2)),
    ("head", "table"): ((2, 32), (97, 2)),
}


def adapter(shapes=SHAPES, *, dora: bool = True) -> Adapter:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    rest = {path: (1 + drawn(*b[:-1]), drawn(*b[:-1])) if dora else () for path, (_, b) in shapes.items()}
    return Adapter("x", 2, {path: Delta(drawn(*a), drawn(*b), *rest[path]) for path, (a, b) in shapes.items()})


def merged(model: Model, adapter: Adapter) -> Model:
    """Return the same function with merged arrays, for adapters without a bias."""
    params = jax.tree.map(np.asarray, model.params)
    for path, delta in adapter.deltas.items():
        *parents, last = path
        node = params
        for name in parents:
            node = node[name]
        low = (
            np.einsum("...r,rk->...k", delta.b, delta.a)
            if delta.a.ndim == 2
            else np.einsum("e...r,erk->e...k", delta.b, delta.a)
        )
        scale = 1.0 if delta.magnitude is None else delta.magnitude[..., None]
        whole = delta.a.ndim == 2 and path[-1] not in ("gate_up",) and path[0] != "head"  # [in, *out]
        weight = np.moveaxis(node[last], 0, -1) if whole else node[last]
        weight = scale * (weight + low)
        node[last] = np.moveaxis(weight, -1, 0) if whole else weight
    return model.replace(params=jax.tree.map(jnp.asarray, params))


def without_bias(adapter: Adapter) -> Adapter:
    deltas = {path: dataclasses.replace(delta, bias=None) for path, delta in adapter.deltas.items()}
    return dataclasses.replace(adapter, deltas=deltas)


def test_apply_equals_that_of_the_merged_weights():
    model, own = random_model(gain=3.0), without_bias(adapter())
    want = merged(model, own)(TOKENS)
    np.testing.assert_allclose(model.with_lora(own)(TOKENS), want, atol=1e-5 * float(jnp.abs(want).max()))
    assert float(jnp.abs(want - model(TOKENS)).max()) > 0.1


def test_experts():
    model = random_model_of(MIXTRAL)
    shapes = {
        ("layers_0", "mlp", "gate_up"): ((4, 4, 32), (4, 2, 48, 4)),
        ("layers_1", "mlp", "down"): ((4, 2, 48), (4, 32, 2)),
    }
    own = without_bias(adapter(shapes))
    want = merged(model, own)(TOKENS)
    np.testing.assert_allclose(model.with_lora(own)(TOKENS), want, atol=1e-5 * float(jnp.abs(want).max()))


def random_model_of(config) -> Model:
    model = abstract(llama_json(**config), "float32")
    return model.replace(
        params=jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, init_params(model.specs, 0, "float32"))
    )


def test_gradients_of_an_adapters_arrays_are_finite_differences():
    model = random_model(gain=3.0).with_lora(adapter())
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((1, 8, 97)))

    def loss(params):
        return (model.apply(params, TOKENS) * weights).sum()

    gradients = jax.grad(loss)(model.params)
    for path in SHAPES:
        for name in ("a", "b", "magnitude", "bias"):
            direction = jax.tree.map(jnp.zeros_like, model.params)
            node, of = gradients, direction
            for step in path:
                node, of = node[step], of[step]
            assert isinstance(node, LoRAWeight)
            slope = getattr(node, name)
            unit = slope / jnp.sqrt((slope**2).sum())
            object.__setattr__(of, name, unit)
            ends = [loss(jax.tree.map(lambda x, d, s=s: x + s * d, model.params, direction)) for s in (1e-2, -1e-2)]
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-2, (slope * unit).sum(), rtol=0.02)


def test_what_cannot_have_an_adapter_is_refused():
    model, delta = random_model(), Delta(np.zeros((2, 32), np.float32), np.zeros((32, 2), np.float32))
    for path in (("layers_0", "mlp_norm", "scale"), ("layers_7", "mlp", "down"), ("layers_0", "mlp")):
        with pytest.raises(ValueError, match=rf"{'.'.join(path)} cannot have an adapter"):
            model.with_lora(Adapter("x", 2, {path: delta}))
    with pytest.raises(ValueError, match=r"layers_0\.mlp\.down: a of the adapter is \(2, 32\) and must be \(2, 48\)"):
        model.with_lora(Adapter("x", 2, {("layers_0", "mlp", "down"): delta}))
    once = Adapter("x", 2, {("layers_0", "attention", "out"): delta})
    with pytest.raises(ValueError, match="has one already"):
        model.with_lora(once).with_lora(once)
