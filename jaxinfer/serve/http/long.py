"""Answers that may be long, made in pieces: the JSON of a million numbers, in one, holds everybody up."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from starlette.responses import Response, StreamingResponse

_INLINE = 1000
_PIECE = 4096


async def off_loop[*A, T](work: int, function: Callable[[*A], T], *args: *A) -> T:
    """``function(*args)``, in a thread if there are more than a few items to ``work`` on."""
    return function(*args) if work <= _INLINE else await asyncio.to_thread(function, *args)


def tokens_answer(about: Mapping[str, int], ids: Sequence[int], spell: Callable[[int], str] | None) -> Response:
    """``about``, the ids as ``tokens`` and, with ``spell``, their texts as ``token_strs``.

    Many ids are written as they are read, by a thread: the whole would be several times the text.
    """
    pieces = _tokens_json(about, ids, spell)
    if len(ids) <= _INLINE:
        return Response(b"".join(pieces), media_type="application/json")
    return StreamingResponse(pieces, media_type="application/json")


def text_json(name: str, text: str) -> bytes:
    """An object of one text."""
    parts = (json.dumps(piece)[1:-1].encode() for piece in _pieces(text))
    return b'{%s: "%s"}' % (json.dumps(name).encode(), b"".join(parts))


def _tokens_json(about: Mapping[str, int], ids: Sequence[int], spell: Callable[[int], str] | None) -> Iterator[bytes]:
    yield json.dumps(about)[:-1].encode() + b', "tokens": ['
    yield from _commas(map(list, _pieces(ids)))
    yield b'], "token_strs": ' + (b"null}" if spell is None else b"[")
    if spell is not None:
        known = functools.cache(spell)  # of this text alone: what others have asked must not show in its time
        yield from _commas(list(map(known, piece)) for piece in _pieces(ids))
        yield b"]}"


def _pieces[S: (str, Sequence[int])](whole: S) -> Iterator[S]:
    return (whole[at : at + _PIECE] for at in range(0, len(whole), _PIECE))


def _commas(pieces: Iterable[list[int] | list[str]]) -> Iterator[bytes]:
    """What stands between the brackets of a list of them all."""
    for number, piece in enumerate(pieces):
        yield (b", " if number else b"") + json.dumps(piece)[1:-1].encode()
