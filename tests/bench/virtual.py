"""An event loop with virtual time, which jumps to the next timer when no task is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from jaxinfer.bench.target import Ending, Item, SendFailed, Served


class _Selector(selectors.SelectSelector):
    def __init__(self, advance: Callable[[float], None]) -> None:
        super().__init__()
        self._advance = advance

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is due: it would wait for ever"
        self._advance(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with an exact virtual clock that starts at 1000 s."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Selector(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def work(self, seconds: float) -> None:
        """Advance the clock as a blocking computation would."""
        self._now += seconds


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Scripted:
    """A `Target` with known latencies; at most ``slots`` requests are served concurrently, the others queue."""

    def __init__(self, ttft: float = 0.5, itl: float = 0.1, slots: int = 1000, per_delivery: int = 1) -> None:
        self.ttft, self.itl, self.per_delivery = ttft, itl, per_delivery
        self._slots = asyncio.Semaphore(slots)
        self.messages: list[bytes] = []
        self.failing: dict[int, SendFailed] = {}

    async def open(self) -> Served:
        return Served("scripted", vocab_size=100, max_model_len=4096)

    async def count_tokens(self, text: str) -> int:
        return 2 * len(text.split())

    def prepare(self, item: Item) -> bytes:
        return str(item.output_len).encode()

    async def stream(self, message: bytes, note: Callable[[int], None]) -> Ending:
        self.messages.append(message)
        if (failure := self.failing.get(len(self.messages) - 1)) is not None:
            raise failure
        count = int(message)
        async with self._slots:
            await asyncio.sleep(self.ttft)
            left = count
            while left:
                tokens = min(left, self.per_delivery)
                note(tokens)
                left -= tokens
                if left:
                    await asyncio.sleep(self.itl)
        return Ending("length", 7, count)

    async def close(self) -> None:
        pass
