"""Radix tree of cached pages, keyed by their tokens. No jax.

Its edges are whole pages (after RadixAttention, Zheng et al. 2024): a node represents a page of tokens in the context
of all pages above it. Its key has the tokens and a *code*, which identifies the programs that computed them, since
equal tokens from other programs may not be bitwise identical. Behind the tokens the key has a `Mark` for each image
that overlaps the page, since equal tokens of other images have other keys and values.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

PageKey = tuple[int, bytes]
Rank = tuple[int, bytes, int]  # class of a code, tokens, code
TOKEN_BYTES = np.dtype(np.int32).itemsize
# Neighbours compared on either side. More matter only where many pages share a prefix and few of them are usable.
_NEIGHBOURS = 16


class Mark(NamedTuple):
    """An image in the tokens of a sequence: positions [start, stop), and the hash of its content."""

    start: int
    stop: int
    digest: str


_MARK = struct.Struct("<ii16s")  # place in the page, offset in the image, hash of its digest


class Buffer:
    """Numbers at indices ``start`` to ``end``; indices stay the same while older numbers are dropped."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.start = self.end = 0
        self._offset = 0  # array position of index `start`
        self._array = np.empty(64, dtype)

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, place: int) -> int:
        return int(self._array[place - self.start + self._offset])

    def view(self) -> np.ndarray:
        """Return a view of all numbers, valid until the next `extend`."""
        return self._array[self._offset : self._offset + len(self)]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at ``places``, which must be in the buffer."""
        return self._array[places - (self.start - self._offset)]

    def extend(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Append numbers. Amortised O(1) each."""
        count = len(self)
        if self._offset + count + len(numbers) > len(self._array):
            grown = np.empty(max(64, count + len(numbers), 2 * count), self._array.dtype)
            grown[:count] = self.view()
            self._array, self._offset = grown, 0
        self._array[self._offset + count : self._offset + count + len(numbers)] = numbers
        self.end += len(numbers)

    def forget(self, count: int) -> None:
        """Drop the ``count`` oldest numbers."""
        self.start += count
        self._offset += count


class PageKeys:
    """Tokens of one sequence and the keys of its full pages, each computed once.

    Args:
        namespace: sequences of different namespaces share nothing (`jaxinfer.kv.cache_key.cache_identity`).
        page_size: tokens per page.
        marks: images among the tokens, in order.
    """

    def __init__(self, namespace: bytes, page_size: int, marks: Sequence[Mark] = ()) -> None:
        self.namespace = namespace
        self.page_size = page_size
        self._marks = marks
        self._tokens = Buffer(np.int32)
        self._pages: list[bytes] = []

    @property
    def tokens(self) -> np.ndarray:
        """View of the known tokens, int32 ``[tokens]``, valid until the next `extend`."""
        return self._tokens.view()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens. Amortised O(1) each."""
        self._tokens.extend(tokens)

    def page_bytes(self, page: int) -> bytes:
        """Return the tokens of full page ``page`` as bytes.

        Raises:
            IndexError: the page is not full.
        """
        while len(self._pages) <= page:
            end = (len(self._pages) + 1) * self.page_size
            if end > len(self._tokens):
                raise IndexError(f"page {len(self._pages)} of {len(self._tokens)} tokens is not full")
            self._pages.append(self.range_bytes(end - self.page_size, end))
        return self._pages[page]

    def range_bytes(self, start: int, end: int) -> bytes:
        """Return the tokens of a page, or of its head, and the marks of images in them, as bytes."""
        found = [mark for mark in self._marks if mark.start < end and mark.stop > start]
        packed = (_packed(mark, start) for mark in found)
        return b"".join((self.tokens[start:end].tobytes(), *packed))


def _packed(mark: Mark, page: int) -> bytes:
    content = hashlib.blake2b(mark.digest.encode(), digest_size=16).digest()
    return _MARK.pack(max(0, mark.start - page), max(0, page - mark.start), content)


class Node:
    """One page of tokens. Its bytes are on the device, in a host page, in both, or (windowed groups) nowhere.

    A large cache has as many nodes as pages, and the garbage collector traverses every list and dict of a node: so most
    nodes, which have at most one child, have no container except ``children``.

    Attributes:
        pages: the device page in each group, -1: none.
        host: the host page with a copy of the groups in ``stored``, -1: none.
        pins: number of sequences whose last published page this is; a pinned node is not removed.
        digest, label: set by the journal, see `jaxinfer.kv.journal`.
    """

    __slots__ = ("_order", "children", "digest", "host", "key", "label", "pages", "parent", "pins", "stored")

    def __init__(self, parent: Node | None, key: PageKey, groups: int) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[PageKey, Node] = {}
        self.pages = array("i", [-1]) * groups
        self.host = -1
        self.stored = (False,) * groups
        self.pins = 0
        self.digest: bytes | None = None
        self.label: Any = None
        self._order: list[Rank] | None = None  # of the children, sorted; None: there was never more than one

    def has(self, group: int) -> bool:
        """Return whether the bytes of a group are on the device or on the host."""
        return self.pages[group] >= 0 or (self.host >= 0 and self.stored[group])

    @property
    def empty(self) -> bool:
        return self.host < 0 and all(page < 0 for page in self.pages)


class RadixTree:
    """Nodes by their path from the root of a namespace; the pools track which pages are free or in use.

    ``changes`` counts the removals of pages that could have been matched. With a journal, ``touched`` has the nodes
    whose pages have changed since the journal last read it, and ``cleared`` is set if all nodes were removed since.
    """

    def __init__(self, groups: int, page_size: int) -> None:
        self._groups = groups
        self._codes = page_size + 1  # codes of one class
        self._roots: dict[bytes, Node] = {}
        self.changes = 0
        self.touched: dict[Node, None] | None = None
        self.cleared = False

    def root(self, namespace: bytes) -> Node | None:
        return self._roots.get(namespace)

    def plant(self, namespace: bytes) -> Node:
        """Return the root of a namespace, created if there is none."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, (0, namespace), self._groups)
        return root

    def add(self, parent: Node, key: PageKey) -> Node:
        """Add a child without pages."""
        if parent.children or parent._order is not None:
            parent._order = self._sorted(parent)
            bisect.insort(parent._order, self._rank(key))
        node = parent.children[key] = Node(parent, key, self._groups)
        return node

    def prune(self, node: Node) -> None:
        """Remove a node without pages, children and pins, and then each ancestor that has become such a node."""
        self.changes += 1
        while node.empty and not node.children and not node.pins:
            self.touch(node)
            parent, (code, tokens) = node.parent, node.key
            if parent is None:
                if self._roots.get(tokens) is node:  # else it was removed before
                    del self._roots[tokens]
                return
            del parent.children[node.key]
            if parent._order is not None:
                del parent._order[bisect.bisect_left(parent._order, self._rank((code, tokens)))]
            node.parent = None
            node = parent

    def clear(self) -> None:
        """Remove every node; none may have pages or pins."""
        self.changes += 1
        self._roots.clear()
        if self.touched is not None:
            self.touched, self.cleared = {}, True

    def touch(self, node: Node) -> None:
        """Mark a node's pages as changed for the journal, if there is one."""
        if self.touched is not None:
            self.touched[node] = None

    def closest(
        self, parent: Node, code: int, wanted: bytes, length: int, usable: Callable[[Node], bool]
    ) -> tuple[Node | None, int]:
        """Find the child whose page shares the most reusable leading tokens with ``wanted``, and their number.

        Children are sorted by their bytes, so the longest common prefixes are next to the insertion point of
        ``wanted``. Under another code of the same class only tokens that prefill computes in both pages count.

        Args:
            wanted: the first ``length`` tokens of a page, as `PageKeys.range_bytes`.
        """
        kind, split = divmod(code, self._codes)
        order, most, size = self._sorted(parent), length * TOKEN_BYTES, (self._codes - 1) * TOKEN_BYTES
        tokens, marks = wanted[:most], wanted[most:]
        at = bisect.bisect_left(order, (kind, wanted if most == size else tokens))
        best: tuple[Node | None, int] = (None, 0)
        for near in (order[at : at + _NEIGHBOURS], order[max(0, at - _NEIGHBOURS) : at][::-1]):
            for other_kind, other, other_code in near:
                common = _common_tokens(other[:size], tokens)
                if other_kind != kind or common <= best[1]:
                    break
                common = int(min(common, _unlike(other[size:], marks)))
                count = common if other_code == code else min(common, split, other_code % self._codes)
                node = parent.children[(other_code, other)]
                if count > best[1] and usable(node):
                    best = (node, count)
        return best

    def nodes(self) -> Iterator[Node]:
        """Yield every node except the roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def check(self) -> None:
        """Raise AssertionError if a link is wrong, or a node has no pages, children and pins."""
        for root in self._roots.values():
            if not root.children and not root.pins:
                raise AssertionError("the root of an empty namespace was left")
        for parent in [*self._roots.values(), *self.nodes()]:
            if self._sorted(parent) != sorted(map(self._rank, parent.children)):
                raise AssertionError("the order of a node's children is not that of its keys")
            for key, node in parent.children.items():
                if node.parent is not parent or node.key != key:
                    raise AssertionError("a child does not know its parent or its key")
                if node.empty and not node.children and not node.pins:
                    raise AssertionError("a node that leads to nothing was left")

    def _sorted(self, parent: Node) -> list[Rank]:
        """Return the ranks of a node's children in order."""
        return list(map(self._rank, parent.children)) if parent._order is None else parent._order

    def _rank(self, key: PageKey) -> Rank:
        return key[0] // self._codes, key[1], key[0]


def _common_tokens(first: bytes, second: bytes) -> int:
    """Return the number of leading tokens that two pages have in common."""
    count = min(len(first), len(second)) // TOKEN_BYTES
    differ = np.frombuffer(first, np.int32, count) != np.frombuffer(second, np.int32, count)
    return int(differ.argmax()) if differ.any() else count


def _unlike(first: bytes, second: bytes) -> float:
    """Return the place of the first image in which the marks of two pages differ."""
    if first == second:
        return math.inf
    pairs = itertools.zip_longest(_MARK.iter_unpack(first), _MARK.iter_unpack(second))
    return next(min(mark[0] for mark in pair if mark is not None) for pair in pairs if pair[0] != pair[1])
