"""Draft trees against a walk of every path."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.spec import Bounded, Drafted, NgramDrafter, SuffixDrafter, Tree
from tests.spec.sequences import sequence
from tests.spec.trees import random_tree

VOCAB = 5
SAID = Drafted(1, b"", 1, np.array([1], np.int32))


@st.composite
def trees(draw: st.DrawFn, wild: bool = False) -> Tree:
    """Draw trees with parents before children; wild ones with any parents and tokens."""
    count = draw(st.integers(0, 12))
    tokens = st.sampled_from([-1, 0, 1, 2, VOCAB - 1, VOCAB, 2**40]) if wild else st.integers(0, 2)
    parents = [draw(st.integers(-3, count + 2) if wild else st.integers(-1, node - 1)) for node in range(count)]
    few = draw(st.integers(0, count)) if wild else count
    said = draw(st.lists(tokens, min_size=few, max_size=few))
    return Tree(np.array(said, np.int64), np.array(parents, np.int64))


def naive(tree: Tree, node: int = -1) -> list[list[int]]:
    """Return the nodes of every path below a node, the first children first."""
    children = [child for child, parent in enumerate(tree.parents.tolist()) if parent == node]
    if not children:
        return [[]]
    return [[child, *rest] for child in children for rest in naive(tree, child)]


def words(tree: Tree) -> list[list[int]]:
    """Return all paths as tokens: the main one, then in the order of the nodes that begin them."""
    first, *others = naive(tree)
    eldest = {parent: node for node, parent in reversed(list(enumerate(tree.parents.tolist())))}
    begins = [(max(node for node in path if eldest[tree.parents[node]] != node), path) for path in others]
    return [tree.tokens[path].tolist() for path in (first, *(path for _, path in sorted(begins)))]


@given(tree=trees(), most=st.integers(1, 9))
def test_the_paths_of_a_tree_are_those_from_its_root_to_its_leaves(tree: Tree, most: int) -> None:
    wanted = list[list[int]]()
    for word in words(tree):
        if word and not any(other[: len(word)] == word for other in wanted):
            wanted.append(word)
    assert tree.paths(most) == wanted[:most]


@given(tree=trees(wild=True), depth=st.integers(0, 5))
def test_whatever_a_tree_says_it_can_be_fed(tree: Tree, depth: int) -> None:
    class Says:
        def propose(self, sequence: Drafted, limit: int) -> Tree:
            return tree

        def end(self, sequence: Drafted) -> None: ...
        def reset(self) -> None: ...

    good = Bounded(Says(), VOCAB).propose(SAID, depth)
    assert good.tokens.dtype == good.parents.dtype == np.int32
    assert ((good.tokens >= 0) & (good.tokens < VOCAB)).all()
    assert ((good.parents >= -1) & (good.parents < np.arange(len(good.parents)))).all()
    assert max(map(len, naive(good))) <= depth
    kept, places = list[tuple[int, int]](), {-1: (-1, 0)}
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=False)):
        if 0 <= token < VOCAB and parent in places and places[parent][1] < depth:
            places[node] = len(kept), places[parent][1] + 1
            kept.append((token, places[parent][0]))
    assert list(zip(good.tokens.tolist(), good.parents.tolist(), strict=True)) == kept


@given(words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
def test_the_tree_of_some_paths_has_them(words: list[list[int]]) -> None:
    tree = Tree.of_paths(words)
    found = tree.paths(99)
    nodes = {tuple(word[:end]) for word in words for end in range(1, len(word) + 1)}
    assert len(tree.tokens) == len(nodes), "what begins alike is there once"
    assert {tuple(path[:end]) for path in found for end in range(1, len(path) + 1)} == nodes
    assert not words or found[0][: len(words[0])] == words[0], "the first is the main path"


def test_a_chain_is_one_path() -> None:
    tree = Tree.chain(np.array([3, 1, 3], np.int32))
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.paths(4) == tree.paths(1) == [[3, 1, 3]]
    assert Tree.chain(np.zeros(0, np.int32)).paths(2) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_say_the_truth_and_more(seed: int) -> None:
    tree = random_tree(random.Random(seed), [1, 2, 3], 3, VOCAB).bounded(3, VOCAB)
    assert all(len(path) <= 3 for path in tree.paths(99))


# ---- drafters


def test_ngrams_go_on_as_other_places_do() -> None:
    """Longer matches come first, then later ones; no continuation is repeated."""
    history = [7, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 5, 7, 1, 2, 3, 8, 1, 2, 3, 0, 9, 1, 2]
    for most, wanted in ((1, [[3, 0]]), (2, [[3, 0], [5, 7]]), (9, [[3, 0], [5, 7], [4, 0]])):
        tree = NgramDrafter(2, 4, most).propose(sequence(history), 2)
        assert tree.paths(9) == wanted
    assert NgramDrafter(2, 4, 3).propose(sequence([1, 2, 3, 4]), 2).paths(3) == []


def test_suffixes_go_on_as_most_places_do_then_as_others() -> None:
    for most, wanted in ((1, [[7]]), (2, [[7], [8]]), (3, [[7], [8], [9]]), (4, [[7], [8], [9]])):
        drafter = SuffixDrafter(1000, most)
        for number, last in enumerate([7, 8, 7, 8, 7, 9]):
            drafter.end(sequence([1, 2, last, 5], number, prompt=0))
        assert drafter.propose(sequence([1, 2], 9), 1).paths(9) == wanted


def test_a_suffix_turns_on_the_way_and_follows_the_turn() -> None:
    drafter = SuffixDrafter(1000, 3)
    for number, text in enumerate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]):
        drafter.end(sequence([9, *text, 0], number, prompt=0))
    assert drafter.propose(sequence([9, 1, 2], 9), 3).paths(9) == [[3, 4, 5], [3, 6, 7]]


@given(text=st.lists(st.integers(0, 3), max_size=60), limit=st.integers(1, 5), most=st.integers(2, 4))
def test_trees_begin_with_what_a_chain_would_be(text: list[int], limit: int, most: int) -> None:
    for chains, trees in (
        (NgramDrafter(1, 3), NgramDrafter(1, 3, most)),
        (SuffixDrafter(100), SuffixDrafter(100, most)),
    ):
        chain, tree = (drafter.propose(sequence(text), limit).paths(99) for drafter in (chains, trees))
        assert tree[:1] == chain
        assert len(tree) <= most
        assert all(0 < len(path) <= limit for path in tree)
