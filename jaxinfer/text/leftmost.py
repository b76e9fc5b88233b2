"""Pieces of SentencePiece whose scores have ties: of joins with equal scores the leftmost comes first.

The tokenizers library gives each join a rank of its own, so that of two it does one everywhere before the other. Where
different pieces have the same score, a text is cut here, and the library finds each part in its vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from tokenizers import NormalizedString, PreTokenizedString
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer


def is_needed(model: BPE, scores: Mapping[str, float]) -> bool:
    """Whether two pieces of several characters have one score, so that ``model``, which ranks them, may join others.

    Published vocabularies have one score for all runs of spaces, whose order mostly makes no difference: that is tried.
    """
    first: dict[float, str] = {}
    joined = ((piece, first.setdefault(score, piece)) for piece, score in scores.items() if len(piece) > 1)
    tied = [(piece, other) for piece, other in joined if piece != other]
    if any(len({*piece, *other}) > 1 for piece, other in tied):
        return True
    longest = {piece[0]: piece for piece, _ in sorted(tied, key=lambda pair: len(pair[0]))}
    runs = (character * count for character, piece in longest.items() for count in range(2, 4 * len(piece)))
    return any([token.value for token in model.tokenize(run)] != join(run, scores) for run in runs)


def pre_tokenizer(scores: Mapping[str, float], known: frozenset[str]) -> PreTokenizer:
    """What cuts a text into pieces; the library cannot write it into a file.

    Args:
        scores: of the pieces that two others can be joined to.
        known: all pieces. Neighbours that are none stay together.
    """
    return PreTokenizer.custom(_Cutter(scores, known))


class _Cutter:
    def __init__(self, scores: Mapping[str, float], known: frozenset[str]) -> None:
        self._scores, self._known = scores, known

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(self._cut)

    def _cut(self, rank: int, text: NormalizedString) -> list[NormalizedString]:
        del rank
        ends = list(_ends(join(text.normalized, self._scores), self._known))
        parts = (text[first:end] for first, end in zip([0, *ends], ends, strict=False))
        return [part for part in parts if part is not None]


def _ends(pieces: list[str], known: frozenset[str]) -> Iterator[int]:
    """Where parts of the text end, in characters."""
    at = 0
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        at += len(piece)
        if following is None or piece in known or following in known:
            yield at


def join(text: str, scores: Mapping[str, float]) -> list[str]:
    """The pieces of a text: of all joins of neighbours that have a score the best, leftmost one, again and again.

    Source: sentencepiece's bpe::Model::Encode, llama.cpp's llm_tokenizer_spm.
    """
    pieces: list[str] = list(text)
    before, behind = list(range(-1, len(text) - 1)), list(range(1, len(text) + 1))
    queue: list[tuple[float, int, int, str]] = []

    def offer(first: int, second: int) -> None:
        if first >= 0 and second < len(pieces):
            joined = pieces[first] + pieces[second]
            if joined in scores:
                heapq.heappush(queue, (-scores[joined], first, second, joined))

    for place in range(len(text) - 1):
        offer(place, place + 1)
    while queue:
        _, first, second, joined = heapq.heappop(queue)
        if not pieces[first] or not pieces[second] or pieces[first] + pieces[second] != joined:
            continue  # one of them has been joined to another since
        pieces[first], pieces[second] = joined, ""
        behind[first] = behind[second]
        if behind[first] < len(pieces):
            before[behind[first]] = first
        offer(before[first], first)
        offer(first, behind[first])
    return [piece for piece in pieces if piece]
