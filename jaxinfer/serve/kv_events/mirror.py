"""Mirror of the cached pages, built from KV events. No jax."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxinfer.serve.core.messages import KvEvents, KvStored
from jaxinfer.types import LoRARef

TOKEN_BYTES = 4


class Block(NamedTuple):
    """A cached page, on each of its mediums.

    Attributes:
        parent: hash of the parent page.
        tokens: token ids, int32 [page_size].
        lora: adapter that computed it.
        extra: opaque key of its cache scope and salt, "" if there is neither.
        images: opaque key of the images in it, "" if there are none.
        mediums: mediums that hold it, in the order in which it came there.
    """

    parent: bytes | None
    tokens: bytes
    lora: LoRARef | None
    extra: str
    images: str
    mediums: tuple[str, ...]


class Copy(NamedTuple):
    """A copy of a page on one medium, with the page's hash."""

    digest: bytes
    block: Block
    medium: str


class Mirror:
    """The pages of one replica by hash; parents before their children."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._copies = 0

    def __len__(self) -> int:
        return self._copies

    @property
    def blocks(self) -> dict[bytes, Block]:
        """A copy of the pages by hash: its entries do not change any more."""
        return dict(self._blocks)

    def apply(self, events: KvEvents) -> None:
        """Apply the changes."""
        if events.cleared:
            self._blocks.clear()
            self._copies = 0
        for run in events.stored:
            self._store(run)
        for gone in events.removed:
            for digest in gone.hashes:
                self._remove(digest, gone.medium)

    def _store(self, run: KvStored) -> None:
        above = run.parent
        size = len(run.tokens) // max(1, len(run.hashes))
        for number, digest in enumerate(run.hashes):
            known = self._blocks.get(digest)
            if known is None:
                tokens = run.tokens[number * size : (number + 1) * size]
                known = Block(above, tokens, run.lora, run.extra, run.images, ())
            if run.medium not in known.mediums:
                self._blocks[digest] = known._replace(mediums=(*known.mediums, run.medium))
                self._copies += 1
            above = digest

    def _remove(self, digest: bytes, medium: str) -> None:
        known = self._blocks.get(digest)
        if known is None or medium not in known.mediums:
            return
        self._copies -= 1
        left = tuple(each for each in known.mediums if each != medium)
        if left:
            self._blocks[digest] = known._replace(mediums=left)
        else:
            del self._blocks[digest]

    def copies(self) -> list[Copy]:
        """Return all copies of all pages, parents before their children; later events do not change the list."""
        return [Copy(digest, block, medium) for digest, block in self._blocks.items() for medium in block.mediums]


def stored_of(copies: Sequence[Copy]) -> list[KvStored]:
    """Convert copies to stored events, in their order."""
    chains: list[list[Copy]] = []
    for copy in copies:
        last = chains[-1][-1] if chains else None
        if last is not None and _follows(copy, last):
            chains[-1].append(copy)
        else:
            chains.append([copy])
    return [_stored(chain) for chain in chains]


def _follows(copy: Copy, last: Copy) -> bool:
    same = copy.medium == last.medium and copy.block.images == last.block.images
    return same and copy.block.parent == last.digest


def _stored(chain: Sequence[Copy]) -> KvStored:
    block, medium = chain[0].block, chain[0].medium
    return KvStored(
        medium=medium,
        parent=block.parent,
        hashes=[copy.digest for copy in chain],
        tokens=b"".join(copy.block.tokens for copy in chain),
        lora=block.lora,
        extra=block.extra,
        images=block.images,
    )


def cut(copies: Sequence[Copy], most: int) -> Iterator[Sequence[Copy]]:
    """Yield slices of at most ``most`` copies; a single empty one if there are no copies."""
    yield from (tuple(part) for part in itertools.batched(copies, most)) if copies else ((),)
