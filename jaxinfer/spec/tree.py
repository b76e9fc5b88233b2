"""Draft trees: several continuations with common prefixes. No jax."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Integer


class Tree(NamedTuple):
    """Draft tokens, each following another draft token or the last known token.

    Attributes:
        tokens: token ids.
        parents: parent node of each token, an earlier node; -1: the last known token. Children of a node are in order
        of likelihood.
    """

    tokens: Integer[np.ndarray, " nodes"]
    parents: Integer[np.ndarray, " nodes"]

    @staticmethod
    def chain(tokens: Integer[np.ndarray, " nodes"]) -> Tree:
        """Return the tree of one continuation."""
        return Tree(tokens, np.arange(-1, len(tokens) - 1, dtype=np.int32))

    @staticmethod
    def of_paths(paths: list[list[int]]) -> Tree:
        """Return the tree of several continuations, the likeliest first: common prefixes are merged."""
        nodes: dict[tuple[int, int], int] = {}
        for path in paths:
            at = -1
            for token in path:
                at = nodes.setdefault((at, token), len(nodes))
        pairs = np.array(list(nodes), np.int32).reshape(-1, 2)
        return Tree(pairs[:, 1], pairs[:, 0])

    def paths(self, most: int) -> list[list[int]]:
        """Return at most ``most`` paths from the root to a leaf, as tokens. The main path comes first: the first child
        of each node. Each further child begins another path, in node order, continued with first children. No path is a
        prefix of an earlier one."""
        if most == 1 or _is_chain(self.parents):
            return [self._main()] if len(self.tokens) else []
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        eldest: dict[int, int] = {}
        for node, parent in enumerate(parents):
            eldest.setdefault(parent, node)
        starts = [node for node, parent in enumerate(parents) if parent < 0 or eldest[parent] != node]
        found = list[list[int]]()
        for start in starts:
            path = _path(start, tokens, parents, eldest)
            if not any(other[: len(path)] == path for other in found):
                found.append(path)
            if len(found) == most:
                break
        return found

    def bounded(self, depth: int, vocab_size: int) -> Tree:
        """Return the nodes that are valid to feed: ids of the vocabulary, at depth at most ``depth``, whose parents are
        such nodes and precede them."""
        tokens, parents = self.tokens, self.parents
        count = min(len(tokens), len(parents))
        good = (tokens[:count] >= 0) & (tokens[:count] < vocab_size)
        if len(tokens) == count <= depth and good.all() and _is_chain(parents):
            return Tree.chain(tokens.astype(np.int32, copy=False))
        places: dict[int, tuple[int, int]] = {-1: (-1, 0)}  # of each kept node: its index, and its depth
        kept = list[tuple[int, int]]()
        for node, (token, parent) in enumerate(zip(tokens[:count].tolist(), parents[:count].tolist(), strict=True)):
            if good[node] and parent in places and places[parent][1] < depth:
                places[node] = len(kept), places[parent][1] + 1
                kept.append((token, places[parent][0]))
        columns = np.array(kept, np.int32).reshape(-1, 2)
        return Tree(columns[:, 0], columns[:, 1])

    def _main(self) -> list[int]:
        """Return the tokens of the main path."""
        if _is_chain(self.parents):
            return self.tokens.tolist()
        path, at = list[int](), -1
        for node, (token, parent) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            if parent == at:
                path.append(token)
                at = node
        return path


def _is_chain(parents: Integer[np.ndarray, " nodes"]) -> bool:
    return bool((parents == np.arange(-1, len(parents) - 1)).all())


def _path(start: int, tokens: list[int], parents: list[int], eldest: dict[int, int]) -> list[int]:
    """Return the tokens from the root through a node, continued with first children."""
    path, node = list[int](), start
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    path.reverse()
    node = eldest.get(start, -1)
    while node >= 0:
        path.append(tokens[node])
        node = eldest.get(node, -1)
    return path
