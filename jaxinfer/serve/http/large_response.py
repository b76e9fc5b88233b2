"""Long responses, serialized in chunks: one JSON dump of a million numbers would block the event loop."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from starlette.responses import Response, StreamingResponse

from jaxinfer.serve.runtime.event_loop import INLINE

_CHUNK = 4096


def tokens_answer(about: Mapping[str, int], ids: Sequence[int], spell: Callable[[int], str] | None) -> Response:
    """Return ``about``, the ids as ``tokens`` and, with ``spell``, their texts as ``token_strs``.

    A thread serializes long lists while they are sent: the complete JSON would be several times the text's size.
    """
    chunks = _tokens_json(about, ids, spell)
    if len(ids) <= INLINE:
        return Response(b"".join(chunks), media_type="application/json")
    return StreamingResponse(chunks, media_type="application/json")


def text_json(name: str, text: str) -> bytes:
    """Return a JSON object with one text."""
    parts = (json.dumps(chunk)[1:-1].encode() for chunk in _chunks(text))
    return b'{%s: "%s"}' % (json.dumps(name).encode(), b"".join(parts))


def _tokens_json(about: Mapping[str, int], ids: Sequence[int], spell: Callable[[int], str] | None) -> Iterator[bytes]:
    yield json.dumps(about)[:-1].encode() + b', "tokens": ['
    yield from _commas(map(list, _chunks(ids)))
    yield b'], "token_strs": ' + (b"null}" if spell is None else b"[")
    if spell is not None:
        known = functools.cache(spell)  # cached per request: a shared cache would reveal other requests by timing
        yield from _commas(list(map(known, chunk)) for chunk in _chunks(ids))
        yield b"]}"


def _chunks[S: (str, Sequence[int])](whole: S) -> Iterator[S]:
    return (whole[at : at + _CHUNK] for at in range(0, len(whole), _CHUNK))


def _commas(chunks: Iterable[list[int] | list[str]]) -> Iterator[bytes]:
    """Serialize a list that comes in chunks, without its brackets."""
    for number, chunk in enumerate(chunks):
        yield (b", " if number else b"") + json.dumps(chunk)[1:-1].encode()
