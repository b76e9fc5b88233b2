"""Named arrays of trees."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer.weights.trainers.tree import named_arrays

ONE = np.ones(2, np.float32)


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A pytree like a module of `equinox`."""

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("weight"), ONE), (jax.tree_util.GetAttrKey("bias"), None)], None

    def tree_flatten(self):
        return [ONE, None], None

    @classmethod
    def tree_unflatten(cls, form, leaves):
        return cls()


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"b": ONE, "a": {"x": ONE}}, ["b", "a.x"]),
        ({"layers": [ONE, {"w": ONE}]}, ["layers.0", "layers.1.w"]),
        (nnx.State({"layers": nnx.State({0: nnx.State({"w": nnx.Param(ONE)})})}), ["layers.0.w"]),
        ({"kernel": nn.Partitioned(ONE, names=("a",))}, ["kernel"]),
        ({"linear": Module()}, ["linear.weight"]),
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), ["bias", "kernel"]),
    ],
)
def test_paths_are_names(tree, names: list[str]):
    found = dict(named_arrays(tree))
    assert list(found) == names
    assert all(isinstance(value, np.ndarray | jax.Array) for value in found.values())


def test_other_leaves_are_refused():
    with pytest.raises(TypeError, match=r"a\.0 is a float"):
        list(named_arrays({"a": [1.0]}))
