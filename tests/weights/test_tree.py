"""Places in parameter trees."""

from typing import Any

import numpy as np
import pytest

from jaxinfer.types import ParamSpec
from jaxinfer.weights.tree import Index, leaf_of, shape_at, whole_index

SPEC = ParamSpec((2, 3), (None, None))
TREE = {"a": {"b": np.zeros((2, 3))}, "c": np.zeros(3)}


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ((), (slice(0, 5), slice(0, 7))),
        ((slice(1, 3), slice(None)), (slice(1, 3), slice(0, 7))),
        ((slice(None, 2), slice(4, None)), (slice(0, 2), slice(4, 7))),
    ],
)
def test_indices_are_completed(index: Index, expected: Index) -> None:
    assert whole_index(index, (5, 7)) == expected
    assert shape_at((5, 7), index) == np.zeros((5, 7))[index].shape


def test_a_leaf() -> None:
    assert leaf_of(TREE, ("a", "b"), SPEC) is TREE["a"]["b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("a", "x"), "the parameters lack a/x"),
        (("x", "b"), "the parameters lack x/b"),
        (("c", "d"), "the parameters lack c/d"),
        (("c",), r"c has shape \(3,\) where its spec says \(2, 3\)"),
    ],
)
def test_a_leaf_that_is_missing(path: tuple[str, ...], message: str) -> None:
    tree: Any = TREE
    with pytest.raises(ValueError, match=message):
        leaf_of(tree, path, SPEC)
