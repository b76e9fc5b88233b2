"""Helpers that fill slots as an engine does, for tests of the manager."""

from jaxinfer.kv.manager import KVConfig, KVManager
from tests.kv.fake_device import FakeSequence

PAGE = 4
PROMPT = list(range(10, 27))  # four pages and a token


def manager(pages: int = 16, **settings) -> KVManager:
    return KVManager(KVConfig(pages=pages, page_size=PAGE, slots=4, width=8, **settings))


def sequence(tokens=PROMPT, prompt: int | None = None, salt: bytes = b"", kind: int = 0) -> FakeSequence:
    return FakeSequence(salt, list(tokens), len(tokens) if prompt is None else prompt, kind, PAGE)


def match(kv: KVManager, new: FakeSequence, limit: int | None = None):
    return kv.match(new.keys, new.codes, len(new.tokens) - 1 if limit is None else limit)


def serve(kv: KVManager, slot: int, new: FakeSequence) -> list[int]:
    """Compute a whole sequence and publish (cache) its pages; return its pages in the first group."""
    assert kv.admit(slot, match(kv, new), len(new.tokens))
    kv.take_moves()
    kv.publish(slot, new.keys, new.codes, len(new.tokens))
    kv.check()
    return kv.tables[0, slot, : kv.pages_for(len(new.tokens))].tolist()


def served(kv: KVManager, new: FakeSequence) -> list[int]:
    pages = serve(kv, 3, new)
    kv.release(3)
    return pages
