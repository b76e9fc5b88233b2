"""Tests of hostile grammars in real helpers: each is rejected or served within a limit of CPU time, memory does not
grow, and other requests continue."""

from __future__ import annotations

import os
import pathlib
import random
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxinfer.helper_process import Helper
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.workers.codec import encode
from jaxinfer.serve.workers.pool import Pool
from jaxinfer.serve.workers.tasks import TASKS
from jaxinfer.structured import masks as masking
from jaxinfer.structured.masks import Held, Masks
from tests.structured.hostile import HOSTILE, distinct
from tests.structured.test_grammar import BYTES
from tests.structured.test_masks import PATIENCE, allowed, ready

CPU_SECONDS = TASKS["check_grammar"].cpu_seconds or 0.0
TEARDOWN = 1.0
"""Seconds of CPU time beyond the limit for the end of a process, in which its memory is freed."""
STEPS = 24
FEW, MANY = 600, 10_000


def grammar_of(constraint: dict[str, Any]) -> tuple[str, str]:
    found = SamplingParams(structured_outputs=constraint).grammar
    assert found is not None
    return found


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def spent(helper: Helper, ask: Callable[[], object]) -> float:
    """Return the CPU seconds that a helper used for a request, even if it died."""
    process: Any = helper._process
    before, children = cpu_seconds(process.pid), of_children()
    if ask() is not None:
        return cpu_seconds(process.pid) - before
    process.wait(PATIENCE)
    return of_children() - children - before


@pytest.fixture(scope="module")
def checker() -> Iterator[Helper]:
    """Yield a worker with the settings of the API server."""
    helper = Pool(TASKS["check_grammar"])._helpers[0]
    yield helper
    helper.kill()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_is_checked_or_its_helper_stopped_in_time(checker: Helper, name: str) -> None:
    question = encode(grammar_of(HOSTILE[name]()))
    checker.start()
    assert spent(checker, lambda: checker.ask(question)) < CPU_SECONDS + TEARDOWN


def test_what_takes_too_long_is_ended_by_the_kernel(checker: Helper) -> None:
    checker.start()
    process: Any = checker._process
    assert checker.ask(encode(grammar_of(HOSTILE["a rule of 50,000 texts"]()))) is None
    assert process.wait(PATIENCE) == -signal.SIGPROF


@pytest.fixture(scope="module")
def masks() -> Masks:
    return Masks(lambda: BYTES, 1)


@pytest.fixture(scope="module")
def neighbour(masks: Masks) -> Held:
    held = masks.open("regex", "(ab)*")
    ready(masks, held)
    return held


def asked(masks: Masks, held: Held) -> float:
    """Return the CPU seconds of the pending requests of a sequence, which must be the only one of its helper."""
    worker: Any = held.owner
    assert worker._start()
    helper: Any = worker._helper

    def answer() -> object:
        ready(masks, held)
        return None if helper._process.poll() is not None or helper._killed else held

    return spent(helper, answer)


@pytest.mark.parametrize("name", HOSTILE)
def test_masks_come_in_time_or_not_at_all(masks: Masks, neighbour: Held, name: str) -> None:
    """Masks of a random walk over allowed tokens take bounded CPU time; another sequence continues."""
    held, chance = masks.open(*grammar_of(HOSTILE[name]())), random.Random(name)
    try:
        for _ in range(STEPS):
            assert asked(masks, held) < masking.CPU_SECONDS + TEARDOWN
            if held.error is not None or held.stopped:
                break
            token = chance.choice(allowed(held))
            if token == 256:
                break
            masks.advance(held, [token])
    finally:
        masks.close(held)
    masks.advance(neighbour, b"ab")
    ready(masks, neighbour)
    assert allowed(neighbour) == [ord("a"), 256]


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_many_grammars_leave_nothing_behind(checker: Helper, count: int) -> None:
    """Memory of the API server's and the engine's helpers at the end equals that after half of the grammars."""
    masks, held = Masks(lambda: BYTES, 1), list[Held]()
    sizes: list[tuple[float, float]] = []
    checker.start()
    for number in range(count):
        kind, text = grammar_of(distinct(number))
        assert checker.ask(encode((kind, text))) is not None
        held = [masks.open(kind, text)]
        ready(masks, *held)
        assert held[0].mask is not None
        masks.close(held[0])
        if number in (count // 2, count - 1):
            worker: Any = masks._workers[-2]
            processes: Any = checker._process, worker._helper._process
            sizes.append((resident_mib(processes[0].pid), resident_mib(processes[1].pid)))
    grown = [then - before for before, then in zip(*sizes, strict=True)]
    assert max(grown) < 8, sizes
