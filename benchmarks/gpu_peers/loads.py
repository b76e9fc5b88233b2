"""Loads that every engine runs: number of requests, lengths and arrival times. Runs without numpy or JAX."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

_LOAD = re.compile(r"(\d+)x(\d+)\+(\d+)(?:@(0?\.\d+|1(?:\.0*)?))?")


@dataclasses.dataclass(frozen=True)
class Load:
    """A load of ``requests`` prompts of ``prompt`` tokens that decode ``output`` tokens each.

    Attributes:
        share: None if all requests arrive at once; else the rate of their Poisson arrivals, as a share of the saturated
            rate of the slowest engine.
    """

    requests: int
    prompt: int
    output: int
    share: float | None = None

    def __str__(self) -> str:
        arrivals = "" if self.share is None else f"@{self.share:g}"
        return f"{self.requests}x{self.prompt}+{self.output}{arrivals}"

    def prompts(self, seed: str, vocab: int) -> list[list[int]]:
        """Return random token ids that differ by seed, so that no engine gains from its prefix cache."""
        draw = random.Random(f"{self} {seed}")
        return [[draw.randrange(3, vocab) for _ in range(self.prompt)] for _ in range(self.requests)]

    def due(self, seed: str, rate: float | None) -> list[float]:
        """Return the arrivals in seconds after the start: ``rate`` a second on average, or all at once."""
        if rate is None:
            return [0.0] * self.requests
        draw = random.Random(f"{self} {seed} arrivals")
        return list(itertools.accumulate(draw.expovariate(rate) for _ in range(self.requests)))


def parse_loads(text: str) -> tuple[Load, ...]:
    """Parse loads as the command line gives them: ``8x512+256,200x1024+256@0.7``.

    Raises:
        ValueError: a load is not REQUESTSxPROMPT+OUTPUT with an optional @SHARE, or a number is 0.
    """
    return tuple(_parse(word) for word in text.split(",") if word)


def _parse(word: str) -> Load:
    found = _LOAD.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is not REQUESTSxPROMPT+OUTPUT or REQUESTSxPROMPT+OUTPUT@SHARE")
    requests, prompt, output = (int(found.group(at)) for at in (1, 2, 3))
    share = None if found.group(4) is None else float(found.group(4))
    if 0 in (requests, prompt, output, share):
        raise ValueError(f"{word!r}: no number may be 0")
    return Load(requests, prompt, output, share)


LOADS = parse_loads("1x512+256,8x512+256,64x512+256,256x1024+256,512x1024+256,300x1024+256@0.7")
QUICK = parse_loads("1x16+8,4x16+8,8x24+8,8x24+8@0.7")
