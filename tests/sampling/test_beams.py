"""Beam paths of trees against an exhaustive search in float64."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.beams import best, deviations, expand, ranked


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_best_are_the_largest_in_order() -> None:
    scores = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32)
    values, places = best(jnp.asarray(scores), 4)
    np.testing.assert_array_equal(places, np.argsort(-scores, axis=-1)[:, :4])
    np.testing.assert_array_equal(values, -np.sort(-scores, axis=-1)[:, :4])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_expanded_paths_are_the_likeliest_beside_the_own_one(count: int) -> None:
    chance = np.random.default_rng(count)
    logits = chance.normal(size=(4, count, 30)).astype(np.float32) * 3
    scores = -chance.random((4, count)).astype(np.float32)
    own = np.argmax(logits[:, 0], axis=-1)
    parents, tokens, found = expand(jnp.asarray(logits), jnp.asarray(scores), count)
    every = log_softmax(logits) + scores[..., None]
    for slot in range(4):
        rest = [pair for pair in itertools.product(range(count), range(30)) if pair != (0, own[slot])]
        wanted = sorted(rest, key=lambda pair: -every[slot][pair])[: count - 1]
        pairs = list(zip(parents[slot].tolist(), tokens[slot].tolist(), strict=True))
        assert pairs == [(0, own[slot]), *wanted]
        np.testing.assert_allclose(found[slot], [every[slot][pair] for pair in pairs], atol=1e-5)


@pytest.mark.parametrize("count", [2, 4])
def test_deviations_leave_the_own_path_where_that_is_likeliest(count: int) -> None:
    chance = np.random.default_rng(count)
    logits = chance.normal(size=(3, 4, 20)).astype(np.float32) * 3
    own = np.argmax(logits, -1)
    paths = np.asarray(deviations(jnp.asarray(logits), count))
    every = log_softmax(logits)
    for slot in range(3):
        along = [every[slot, depth, own[slot, depth]] for depth in range(4)]
        places = itertools.product(range(4), range(20))
        scores = {
            (depth, token): sum(along[:depth]) + every[slot, depth, token]
            for depth, token in places
            if token != own[slot, depth]
        }
        wanted = [own[slot].tolist()]
        for depth, token in sorted(scores, key=lambda place: -scores[place])[: count - 1]:
            wanted.append([token if at == depth else own[slot, at] for at in range(4)])
        assert paths[slot].tolist() == wanted


def test_a_static_tree_names_ranks() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 2, 20)).astype(np.float32)
    order = np.argsort(-logits, axis=-1)
    paths = np.asarray(ranked(jnp.asarray(logits), [[0, 0], [0, 3], [2, 1]]))
    for slot in range(3):
        one, two = order[slot]
        assert paths[slot].tolist() == [[one[0], two[0]], [one[0], two[3]], [one[2], two[1]]]
