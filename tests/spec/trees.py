"""Draft trees for tests: some paths are right up to a depth, the others arbitrary."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from jaxinfer.spec import Drafted, Tree


def random_tree(rng: random.Random, truth: list[int], depth: int, vocab: int) -> Tree:
    """Return a tree of paths that follow ``truth`` up to a random depth: some share prefix nodes, some duplicate them;
    some are too deep, some have invalid tokens."""
    tokens, parents = list[int](), list[int]()
    for _ in range(rng.randint(0, 5)):
        right, length = rng.choice((0, 0, 1, 2, depth)), rng.randint(1, depth + 2)
        path = [*truth[:right], *(rng.randrange(vocab) for _ in range(length))][:length]
        if rng.random() < 0.1:
            path[rng.randrange(length)] = rng.choice((-1, -5, vocab, 2**40))
        parent, shares = -1, rng.random() < 0.7
        for token in path:
            known = [node for node in range(len(tokens)) if parents[node] == parent and tokens[node] == token]
            if known and shares:
                parent = known[0]
                continue
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64))


class TreesOfTruth:
    """A drafter of random trees around the true continuation.

    Args:
        truth: returns all tokens of a sequence, its prompt first.
    """

    def __init__(self, truth: Callable[[Drafted], list[int]], vocab: int) -> None:
        self._truth, self._vocab = truth, vocab

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        known = len(sequence.tokens)
        rng = random.Random(f"{sequence.number} {known}")
        return random_tree(rng, self._truth(sequence)[known:], limit, self._vocab)

    def end(self, sequence: Drafted) -> None: ...
    def reset(self) -> None: ...
