"""A coverage-guided fuzzer for all APIs of a server: it keeps requests with new effects and mutates them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import pathlib
import random
import time
from collections.abc import Callable, Iterable, Iterator

from tests.serve import fuzz
from tests.serve.attack import answers
from tests.serve.attack.corpus import Corpus, to_line
from tests.serve.attack.lines import Lines
from tests.serve.doors import Doors, doors
from tests.serve.processes import ServerProcess, fake_server, with_adapters
from tests.serve.test_bad_inputs import check_normal

AT_ONCE = 16
# Limits on the tokens of one request: most requests should be rejected rather than executed.
_LIMITS = {"n": 8, "message_bytes": 1 << 20}
_CONTEXT = "128"
_ROUND = 5_000  # requests between two checks of the server's resources
# For the API server process, after the warm-up of the first round. Python and gRPC keep some memory for reuse.
MAX_GROWTH_MIB = 32


class Fuzzer:
    """Sends requests to one server.

    Args:
        lines: counter of executed lines.
        failed: file for requests in flight when a response is not allowed.

    Attributes:
        answers: number of responses by kind.
    """

    def __init__(self, client: Doors, corpus: Corpus, lines: Lines, failed: pathlib.Path) -> None:
        self._client, self._corpus, self._lines, self._failed = client, corpus, lines, failed
        self._said: set[tuple[str, answers.Answer]] = set()
        self._lines_before = 0
        self._under_way: dict[int, fuzz.Request] = {}  # request in flight of each worker
        self.answers: collections.Counter[str] = collections.Counter()

    async def send(self, requests: Iterable[fuzz.Request]) -> None:
        """Send all requests, `AT_ONCE` at a time.

        Raises:
            ExceptionGroup: of AssertionError, TimeoutError: a response is not allowed or missing.
        """
        left = iter(requests)

        async def worker(number: int) -> None:
            for request in left:
                self._under_way[number] = request
                await self._one(request)
            self._under_way.pop(number, None)

        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(worker(number))

    async def _one(self, request: fuzz.Request) -> None:
        try:
            answer = await answers.check(self._client, request)
        except Exception as error:
            self._failed.write_text("".join(to_line(each) + "\n" for each in self._under_way.values()))
            error.add_note(f"python -m tests.serve.attack fuzz --replay {self._failed}; it was {request!r:.2000}")
            raise
        self.answers[answer.kind] += 1
        said, lines = (request.path, answer), self._lines.count
        # Another request in flight may have run the new lines, but mostly it is the one that has just been answered.
        if said not in self._said or lines > self._lines_before:
            self._said.add(said)
            self._lines_before = lines
            self._corpus.add(request)


@contextlib.contextmanager
def fuzzed_server(folder: pathlib.Path) -> Iterator[tuple[ServerProcess, Lines]]:
    """Yield a server that counts its executed lines; check that its log has no errors."""
    lines = Lines(folder / "lines")
    run = ("-m", "tests.serve.attack.lines", str(folder / "lines"))
    settings = {"header_seconds": 1.0, "limits": _LIMITS, **with_adapters(folder / "adapters")}
    with fake_server(folder, "--context", _CONTEXT, run=run, **settings) as server:
        yield server, lines
        assert server.process.poll() is None
        for word in ("internal error", "Traceback"):
            _, found, after = server.log().partition(word)
            assert not found, found + after[:12000]


async def run(
    server: ServerProcess,
    lines: Lines,
    corpus: Corpus,
    cases: int,
    seed: int,
    failed: pathlib.Path,
    tell: Callable[[str], None] = print,
) -> collections.Counter[str]:
    """Send the whole corpus, then new requests; return the number of responses by kind.

    Raises:
        AssertionError: a response is not allowed, or the server leaks resources. Also in an ExceptionGroup.
    """
    async with doors(server) as client:
        fuzzer, start = Fuzzer(client, corpus, lines, failed), time.monotonic()
        await fuzzer.send(list(corpus))
        drawn = (corpus.draw(random.Random(f"{seed}/{number}")) for number in range(cases))
        files, resident = 0, 0.0
        for first in range(0, cases, _ROUND):
            await fuzzer.send(itertools.islice(drawn, _ROUND))
            gc.collect()
            await check_normal(client)
            if first == 0:
                files, resident = server.open_files(), server.resident_mib()
            grown = server.resident_mib() - resident
            sent, took = fuzzer.answers.total(), time.monotonic() - start
            tell(
                f"{sent} sent, {sent / took:.0f} a second; corpus {len(corpus)}, lines {lines.count}, {grown:+.0f} MiB"
            )
            assert grown < MAX_GROWTH_MIB, f"{grown} MiB more than after the first {_ROUND}"
            assert server.open_files() <= files + AT_ONCE
        return fuzzer.answers
