"""SentencePiece BPE with tied scores: of merges with equal scores the leftmost is applied first.

The tokenizers library gives each merge a unique rank, so that of two it applies one everywhere before the other. Where
different pieces have equal scores, this module splits the text, and the library looks up the pieces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from tokenizers import NormalizedString, PreTokenizedString
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer


def is_needed(model: BPE, scores: Mapping[str, float]) -> bool:
    """Return whether longer pieces have equal scores, so that ``model``, which ranks them, may merge differently.

    Published vocabularies have one score for all runs of spaces, whose order mostly has no effect: that is tested.
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
    """Return a pre-tokenizer that splits a text into pieces; the library cannot serialise it.

    Args:
        scores: scores of the pieces that merges may produce.
        known: all pieces. Adjacent unknown pieces stay together.
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
    """Yield the ends of the segments of the text, in characters."""
    at = 0
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        at += len(piece)
        if following is None or piece in known or following in known:
            yield at


def join(text: str, scores: Mapping[str, float]) -> list[str]:
    """Return the pieces of a text: the best, leftmost scored merge of neighbours is applied repeatedly.

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
            continue  # one of them has been merged with another since
        pieces[first], pieces[second] = joined, ""
        behind[first] = behind[second]
        if behind[first] < len(pieces):
            before[behind[first]] = first
        offer(before[first], first)
        offer(first, behind[first])
    return [piece for piece in pieces if piece]
