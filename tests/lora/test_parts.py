"""Adapters in the shapes of banks: padded, complete, and rejected if they do not fit."""

import numpy as np
import pytest

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.parts import parts, random_adapter, random_parts
from jaxinfer.types import LoRATarget

TARGETS = {
    ("layers_2", "mlp", "up"): LoRATarget((4, 6), (5, 4), ("mlp", "embed")),
    ("layers_2", "mlp", "down"): LoRATarget((4, 5), (6, 4), ("embed", "mlp")),
    ("layers_10", "experts"): LoRATarget((3, 4, 6), (3, 2, 5, 4), ("expert", None, "mlp", "embed")),
}
UP = ("layers_2", "mlp", "up")


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_what_an_adapter_lacks_is_neutral():
    delta = Delta(numbers(3, 6), numbers(5, 3), bias=numbers(5))
    first, second = parts(Adapter("x", 3, {UP: delta}), TARGETS)
    assert list(first) == [
        f"layers_2/mlp/{name}:{kind}" for name in ("up", "down") for kind in ("a", "b", "magnitude", "bias")
    ]
    np.testing.assert_array_equal(first["layers_2/mlp/up:a"], np.concatenate([delta.a, np.zeros((1, 6))]))
    np.testing.assert_array_equal(first["layers_2/mlp/up:b"], np.concatenate([delta.b, np.zeros((5, 1))], 1))
    np.testing.assert_array_equal(first["layers_2/mlp/up:magnitude"], np.ones(5))
    np.testing.assert_array_equal(first["layers_2/mlp/up:bias"], delta.bias)
    for kind, wanted in (("a", 0), ("b", 0), ("magnitude", 1), ("bias", 0)):
        assert (second[f"layers_10/experts:{kind}"] == wanted).all()
        assert second[f"layers_10/experts:{kind}"].shape == TARGETS["layers_10", "experts"].shapes[kind]


def test_experts_are_padded_one_by_one():
    delta = Delta(numbers(3, 2, 6), numbers(3, 2, 5, 2), magnitude=numbers(3, 2, 5))
    _, second = parts(Adapter("x", 2, {("layers_10", "experts"): delta}), TARGETS)
    np.testing.assert_array_equal(second["layers_10/experts:a"][:, :2], delta.a)
    np.testing.assert_array_equal(second["layers_10/experts:b"][..., :2], delta.b)
    np.testing.assert_array_equal(second["layers_10/experts:magnitude"], delta.magnitude)
    assert not second["layers_10/experts:a"][:, 2:].any()


@pytest.mark.parametrize(
    ("path", "delta", "sentence"),
    [
        (("head", "table"), Delta(numbers(1, 6), numbers(9, 1)), r"head\.table: there is no bank"),
        (UP, Delta(numbers(5, 6), numbers(5, 5)), r"layers_2\.mlp\.up has an adapter of rank 5, .* room for 4"),
        (UP, Delta(numbers(2, 7), numbers(5, 2)), r"up: a of the adapter is \(2, 7\) and must be \(2, 6\)"),
        (UP, Delta(numbers(6), numbers(5, 2)), r"up: a of the adapter is \(6,\)"),
        (UP, Delta(numbers(2, 6), numbers(4, 2)), r"up: b of the adapter is \(4, 2\) and must be \(5, 2\)"),
        (UP, Delta(numbers(2, 6), numbers(5, 2), bias=numbers(1)), r"up: bias of the adapter is \(1,\)"),
    ],
)
def test_what_does_not_fit_is_refused(path, delta, sentence):
    with pytest.raises(ValueError, match=sentence):
        parts(Adapter("x", 1, {path: delta}), TARGETS)


def test_random_parts_have_the_form_of_an_adapters():
    drawn, again, other = (list(random_parts(TARGETS, seed)) for seed in (1, 1, 2))
    for made, known in zip(drawn, parts(Adapter("x", 1, {}), TARGETS), strict=True):
        assert {name: array.shape for name, array in made.items()} == {name: x.shape for name, x in known.items()}
        assert all(array.dtype == np.float32 for array in made.values())
        assert all(abs(array - name.endswith("magnitude")).max() < 0.5 for name, array in made.items())
    assert all((drawn[0][name] == again[0][name]).all() for name in drawn[0])
    assert all((drawn[0][name] != other[0][name]).any() for name in drawn[0])


def test_a_random_adapter_covers_every_target():
    adapter, other = random_adapter(TARGETS, 1), random_adapter(TARGETS, 2)
    assert (adapter.rank, list(adapter.deltas)) == (4, sorted(TARGETS))
    assert adapter.identity != other.identity
    for known, made in zip(random_parts(TARGETS, 1), parts(adapter, TARGETS), strict=True):
        assert known.keys() == made.keys()
        assert all((known[name] == made[name]).all() for name in known)
