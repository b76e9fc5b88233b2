"""Keys of pages, and the cached page with the longest common prefix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kv.radix import Mark, Node, PageKeys, RadixTree

PAGE = 4


def code(split: int, kind: int = 0) -> int:
    return kind * (PAGE + 1) + split


def page(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=8))
def test_keys_grow_with_the_tokens(pieces):
    keys, known = PageKeys(b"", PAGE), []
    for piece in pieces:
        keys.extend(piece)
        known += piece
        assert keys.tokens.tolist() == known
        for index in range(len(known) // PAGE):
            assert keys.page_bytes(index) == page(*known[index * PAGE : (index + 1) * PAGE])


def test_keys_take_arrays_and_cut_a_page_once():
    keys = PageKeys(b"", PAGE)
    keys.extend(np.arange(9, dtype=np.int32))
    assert keys.tokens.dtype == np.int32
    assert keys.page_bytes(1) is keys.page_bytes(1)
    with pytest.raises(IndexError, match="page 2 of 9 tokens is not full"):
        keys.page_bytes(2)


def marked(*marks: Mark, count: int = 2 * PAGE) -> PageKeys:
    keys = PageKeys(b"", PAGE, marks)
    keys.extend([7] * count)
    return keys


def test_a_page_with_another_image_or_another_part_of_it_has_another_key():
    images = [(), (Mark(2, 6, "a"),), (Mark(2, 6, "b"),), (Mark(1, 6, "a"),), (Mark(2, 3, "a"), Mark(3, 6, "b"))]
    for page in (0, 1):
        assert len({marked(*marks).page_bytes(page) for marks in images}) == len(images) - (page == 1)
    assert marked(Mark(2, 4, "a")).page_bytes(1) == marked().page_bytes(1)


@pytest.mark.parametrize("length", [PAGE, PAGE - 1])
def test_pages_share_the_tokens_before_the_first_image_that_differs(tree, length):
    root = tree.plant(b"")
    first, other = marked(Mark(1, 2, "a"), Mark(2, 9, "b")), marked(Mark(1, 2, "a"), Mark(2, 9, "c"))
    node = tree.add(root, (code(4), first.page_bytes(0)))
    found = [
        tree.closest(root, code(4), keys.range_bytes(0, length), length, lambda node: True)
        for keys in (first, other, marked(), marked(Mark(0, 1, "d")))
    ]
    assert found == [(node, length), (node, 2), (node, 1), (None, 0)]


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(1, PAGE)


def nearest(tree: RadixTree, root: Node, wanted: int, *tokens: int) -> tuple[bytes | None, int]:
    node, count = tree.closest(root, wanted, page(*tokens), len(tokens), lambda node: True)
    return node and node.key[1], count


def test_the_longest_common_head_wins(tree):
    root = tree.plant(b"")
    for tokens in [(1, 2, 3, 4), (1, 2, 9, 9), (1, 3, 0, 0), (7, 7, 7, 7)]:
        tree.add(root, (code(4), page(*tokens)))
    assert nearest(tree, root, code(4), 1, 2, 3) == (page(1, 2, 3, 4), 3)
    assert nearest(tree, root, code(4), 1, 2, 9, 8) == (page(1, 2, 9, 9), 3)
    assert nearest(tree, root, code(4), 7) == (page(7, 7, 7, 7), 1)
    assert nearest(tree, root, code(4), 5, 2, 3) == (None, 0)


@given(
    children=st.sets(st.tuples(*[st.integers(0, 2)] * PAGE), min_size=1, max_size=12),
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=PAGE),
)
def test_it_is_the_longest_of_all(children, wanted):
    tree = RadixTree(1, PAGE)
    root = tree.plant(b"")
    for tokens in children:
        tree.add(root, (code(4), page(*tokens)))
    heads = [next((i for i in range(len(wanted)) if tokens[i] != wanted[i]), len(wanted)) for tokens in children]
    assert nearest(tree, root, code(4), *wanted)[1] == max(heads)


@pytest.mark.parametrize(
    ("wanted", "cached", "count"),
    [
        (code(4), code(4), 3),
        (code(4), code(2), 2),  # the cached page decoded its last two tokens
        (code(1), code(4), 1),  # this sequence decodes from the second token on
        (code(2), code(2), 3),  # both prefill two tokens and decode the rest
        (code(0), code(0), 3),
        (code(0), code(4), 0),
        (code(4), code(4, kind=1), 0),
    ],
)
def test_tokens_of_other_programs_do_not_count(tree, wanted, cached, count):
    root = tree.plant(b"")
    tree.add(root, (cached, page(1, 2, 3, 4)))
    assert nearest(tree, root, wanted, 1, 2, 3)[1] == count


def test_a_nearer_page_that_cannot_be_used_is_passed_over(tree):
    root = tree.plant(b"")
    tree.add(root, (code(4), page(1, 2, 3, 4)))
    far = tree.add(root, (code(4), page(1, 2, 9, 9)))
    assert tree.closest(root, code(4), page(1, 2, 3), 3, lambda node: node is far) == (far, 2)


def test_pruning_takes_parents_that_lead_to_nothing(tree):
    root = tree.plant(b"salt")
    first = tree.add(root, (code(4), page(1, 1, 1, 1)))
    second = tree.add(first, (code(4), page(2, 2, 2, 2)))
    sibling = tree.add(first, (code(4), page(3, 3, 3, 3)))
    sibling.pages[0] = 5
    tree.prune(second)
    assert list(tree.nodes()) == [first, sibling]
    sibling.pages[0] = -1
    tree.prune(sibling)
    assert tree.root(b"salt") is None
    tree.check()


def test_pruning_a_removed_node_leaves_others_alone(tree):
    node = tree.add(tree.plant(b""), (code(4), page(1, 1, 1, 1)))
    tree.prune(node)
    other = tree.add(tree.plant(page(1, 1, 1, 1)), (code(4), page(2, 2, 2, 2)))  # a namespace with the page's bytes
    tree.prune(node)
    assert list(tree.nodes()) == [other]


def test_a_pinned_node_stays(tree):
    node = tree.add(tree.plant(b""), (code(4), page(1, 1, 1, 1)))
    node.pins = 1
    tree.prune(node)
    assert list(tree.nodes()) == [node]


def _wrong_parent(root, node):
    node.parent = node


def _wrong_key(root, node):
    node.key = (code(4), page(9, 9, 9, 9))


def _wrong_order(root, node):
    root._order.reverse()


def _useless(root, node):
    node.pages[0] = -1


def _empty_root(root, node):
    root.children.clear()
    root._order.clear()


@pytest.mark.parametrize("damage", [_wrong_parent, _wrong_key, _wrong_order, _useless, _empty_root])
def test_check_sees(damage, tree):
    root = tree.plant(b"")
    for index, tokens in enumerate([(1, 1, 1, 1), (2, 2, 2, 2)]):
        node = tree.add(root, (code(4), page(*tokens)))
        node.pages[0] = index
    tree.check()
    damage(root, node)
    with pytest.raises(AssertionError):
        tree.check()
