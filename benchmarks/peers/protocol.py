"""Protocol of a peer's process: one JSON object a line, requests on stdin, replies on stdout. Runs on Python 3.11.

The first line of a peer gives its versions. Then each request has a reply: `load` prepares a model, `generate` runs
prompts, `limits` measures the limits of the machine. A peer that cannot go on exits; its last error is on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Prompts = list[list[int]]

# A reply to `generate`: {"seconds": of the whole call, "tokens": ids of each sequence, "times": arrival of each id}.
Reply = dict[str, Any]


class Peer(Protocol):
    """An engine. One model is loaded at a time; decoding is greedy and ignores EOS."""

    def versions(self) -> dict[str, str]: ...

    def load(self, folder: str, gguf: str, dtype: str, batch: int, max_len: int, threads: int) -> Reply:
        """Prepare for ``batch`` sequences of up to ``max_len`` tokens. ``gguf`` names the same weights as GGUF."""
        ...

    def generate(self, prompts: Prompts, new_tokens: int) -> Reply:
        """Generate exactly ``new_tokens`` tokens for each prompt."""
        ...

    def limits(self, dtype: str, megabytes: int, side: int) -> Reply:
        """Measure bytes/s of reading ``megabytes`` MiB and flop/s of a square GEMM; {} if unsupported."""
        ...


class Stopwatch:
    """Arrival times of tokens, in seconds since construction."""

    def __init__(self, sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.times: list[list[float]] = [[] for _ in range(sequences)]
        self._start = time.perf_counter()

    def add(self, sequence: int, tokens: list[int]) -> None:
        self.tokens[sequence].extend(tokens)
        self.times[sequence].extend([time.perf_counter() - self._start] * len(tokens))

    def add_step(self, tokens: list[int]) -> None:
        """Record one token for each sequence, all at this moment."""
        now = time.perf_counter() - self._start
        for sequence, token in enumerate(tokens):
            self.tokens[sequence].append(token)
            self.times[sequence].append(now)

    def reply(self) -> Reply:
        return {"seconds": time.perf_counter() - self._start, "tokens": self.tokens, "times": self.times}


def best_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest time of several runs of ``call``, after one warm-up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def serve(peer: Peer) -> None:
    """Answer requests to a peer until stdin ends."""
    answer(peer.versions(), {"load": peer.load, "generate": peer.generate, "limits": peer.limits})


def answer(versions: dict[str, str], operations: Mapping[str, Callable[..., Reply]]) -> None:
    """Answer requests until stdin ends. Prints of libraries go to stderr, so that stdout carries replies alone."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(versions), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = operations[request.pop("op")](**request)
        print(json.dumps(reply), file=replies, flush=True)
