"""Static draft trees as Medusa's ``medusa_choices`` gives them: a node is the ranks of the tokens up to it. No jax."""

from __future__ import annotations

from collections.abc import Sequence

Ranks = tuple[int, ...]


def leading_paths(nodes: Sequence[Ranks], most: int, depth: int) -> tuple[Ranks, ...]:
    """Return at most ``most`` paths from the root to a leaf, cut at ``depth``.

    Nodes are listed by their worth, as Medusa's are: each path leads through the first node that no earlier path has,
    and from there to a leaf by the first child of each node.

    Args:
        nodes: different ones; with each node its parents.
    """
    known = [node for node in nodes if len(node) <= depth]
    waiting, found = known, list[Ranks]()
    while waiting and len(found) < most:
        path = waiting[0]
        while (child := next((node for node in known if node[:-1] == path), None)) is not None:
            path = child
        found.append(path)
        waiting = [node for node in waiting if node != path[: len(node)]]
    return tuple(found)
