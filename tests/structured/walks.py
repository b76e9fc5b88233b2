"""Random walks under the masks of a grammar, and checks whether a grammar accepts a text, over small vocabularies."""

import random
import re
import string
from collections.abc import Sequence

from jaxinfer.structured.matcher import Matcher, Matchers, Vocabulary

_ENDING = "\"'})]"
END = "</s>"


def vocabulary(*special: str) -> Vocabulary:
    """Return a vocabulary of bytes, the end token, and special tokens of these names."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(each.encode() for each in (END, *special))]
    return Vocabulary(tokens, frozenset(range(256, len(tokens))), (256,), len(tokens))


def encoded(words: Vocabulary, text: str) -> list[int]:
    """Return the tokens of a text, with special tokens by name."""
    names = words.names
    pattern = "|".join(map(re.escape, names)) or "(?!)"
    parts = [part for part in re.split(f"({pattern})", text) if part]
    return [token for part in parts for token in ([names[part]] if part in names else part.encode())]


def allowed(matcher: Matcher) -> list[int]:
    mask = int.from_bytes(matcher.mask(), "little")
    return [token for token in range(mask.bit_length()) if mask >> token & 1]


def takes(words: Vocabulary, kind: str, grammar: str, text: str) -> bool:
    """Return whether the grammar accepts a text: each of its tokens is allowed, and the end after them."""
    matcher = Matchers(words).new(kind, grammar)
    for token in encoded(words, text):
        if token not in allowed(matcher):
            return False
        matcher.consume([token])
    return 256 in allowed(matcher)


def walk(words: Vocabulary, grammar: str, seed: int, closers: Sequence[str] = (), steps: int = 300) -> str:
    """Return a text of a structural tag from random allowed tokens. At random, and always after ``steps`` tokens, it
    tries a whole closer, because free text would seldom end."""
    matcher, draw, said = Matchers(words).new("structural_tag", grammar), random.Random(seed), list[int]()
    spelt = [encoded(words, closer) for closer in (*closers, *_ENDING)]
    while (may := allowed(matcher)) and not matcher.stopped:
        assert len(said) < 40 * steps
        late = len(said) > steps
        if late and 256 in may:
            break
        if (late or draw.random() < 0.1) and (taken := _consumed(matcher, draw.choice(spelt))):
            said += taken
            continue
        token = draw.choice([each for each in may if each > 127 or chr(each) in string.printable])
        if token == 256:
            break
        said += _consumed(matcher, [token])
    return b"".join(words.tokens[token] for token in said).decode()


def _consumed(matcher: Matcher, tokens: Sequence[int]) -> Sequence[int]:
    """Consume and return these tokens if they are allowed in sequence, else none."""
    for count, token in enumerate(tokens):
        if token not in allowed(matcher):
            matcher.rollback(count)
            return ()
        matcher.consume([token])
    return tokens
