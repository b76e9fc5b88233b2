"""A peer with scripted times, so that every figure is known: ``fake_peer.py RATE [dies|spins|differs]``.

It decodes RATE tokens a second and prefills ten times as fast. ``dies``: fails on load for two sequences. ``spins``: a
thread of it never rests. ``differs``: its tokens are other ones.
"""

from __future__ import annotations

import sys
import threading

from benchmarks.peers.protocol import Prompts, Reply, serve


class Fake:
    def __init__(self, rate: float, trait: str) -> None:
        self._rate, self._trait = rate, trait
        if trait == "spins":
            threading.Thread(target=_spin, daemon=True).start()

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def load(
        self, folder: str, gguf: str, dtype: str, batch: int, max_len: int, threads: int, default: bool = False
    ) -> Reply:
        if self._trait == "dies" and batch == 2:
            raise MemoryError("no room for two")
        return {}

    def generate(self, prompts: Prompts, new_tokens: int) -> Reply:
        first = len(prompts) * len(prompts[0]) / (10 * self._rate)
        times = [first + step * len(prompts) / self._rate for step in range(new_tokens)]
        shift = 1 if self._trait == "differs" else 0
        tokens = [[prompt[0] + shift + step for step in range(new_tokens)] for prompt in prompts]
        return {"seconds": times[-1], "tokens": tokens, "times": [times] * len(prompts)}

    def limits(self, dtype: str, megabytes: int, side: int) -> Reply:
        return {"bandwidth": 1e6 * self._rate, "gemm": 1e9}


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    serve(Fake(float(sys.argv[1]), "".join(sys.argv[2:])))
