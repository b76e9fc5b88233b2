"""Static trees give paths in the order of their nodes."""

import pytest

from jaxinfer.spec import leading_paths

NODES = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 1), (3,))


@pytest.mark.parametrize(
    ("most", "depth", "paths"),
    [
        (1, 3, ((0, 0, 0),)),
        (4, 3, ((0, 0, 0), (1, 0), (0, 1), (2,))),
        (9, 3, ((0, 0, 0), (1, 0), (0, 1), (2,), (0, 0, 1), (3,))),
        (9, 2, ((0, 0), (1, 0), (0, 1), (2,), (3,))),
        (9, 1, ((0,), (1,), (2,), (3,))),
    ],
)
def test_each_path_leads_through_the_first_node_that_is_left(
    most: int, depth: int, paths: tuple[tuple[int, ...], ...]
) -> None:
    assert leading_paths(NODES, most, depth) == paths


def test_no_nodes_are_no_paths() -> None:
    assert leading_paths((), 3, 4) == ()
