"""Compilation in subprocesses: each compiles several configurations, until it ends or dies.

A process takes one to two seconds to start and a kernel about as long, so a process compiles many. One that dies costs
its configuration the result, with its last stderr lines as the reason; the next process continues after it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from pallas_kernels.check.report import Outcome
from pallas_kernels.specs import Spec

_LAST_WORDS = 12  # lines of a dead process' standard error


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher of the compiling processes.

    Attributes:
        command: reads ``[[op, name], ...]`` as JSON from standard input, takes ``--target`` and ``--results``.
        environment: environment variables of the processes.
        jobs: processes that run at a time.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    jobs: int = 2

    def run(self, work: Sequence[tuple[Spec, str]]) -> list[Outcome]:
        """Return the outcomes of all pairs of configuration and target, in their order."""
        done: dict[tuple[str, str, str], Outcome] = {}
        with concurrent.futures.ThreadPoolExecutor(max_workers=self.jobs) as threads:
            for outcomes in threads.map(lambda share: list(self._share(*share)), self._shares(work)):
                done |= {(one.op, one.name, one.target): one for one in outcomes}
        return [done[one.op, one.name, target] for one, target in work]

    def _shares(self, work: Sequence[tuple[Spec, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Split each target's configurations among ``jobs`` processes."""
        for target in dict.fromkeys(target for _, target in work):
            names = [(one.op, one.name) for one, its in work if its == target]
            yield from ((target, share) for job in range(self.jobs) if (share := names[job :: self.jobs]))

    def _share(self, target: str, names: list[tuple[str, str]]) -> Iterator[Outcome]:
        while names:
            outcomes, death = self._process(target, names)
            yield from outcomes
            names = names[len(outcomes) :]
            if names and death:
                yield Outcome(*names.pop(0), target, failure=death)

    def _process(self, target: str, names: list[tuple[str, str]]) -> tuple[list[Outcome], str]:
        """Run one process; return its outcomes and, if it failed, how it died. It may exit before all are done."""
        with tempfile.TemporaryDirectory() as folder:
            results = pathlib.Path(folder, "results")
            command = [*self.command, "--target", target, "--results", str(results)]
            environment, wanted = dict(self.environment), json.dumps(names)
            ended = subprocess.run(command, env=environment, input=wanted, text=True, capture_output=True, check=False)
            lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        if ended.returncode == 0 and lines:
            return [Outcome.from_json(json.loads(line)) for line in lines], ""
        return [Outcome.from_json(json.loads(line)) for line in lines], _death(ended.returncode, ended.stderr)


def _death(code: int, said: str) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    lines = [line for line in said.splitlines() if line.strip()]
    return "\n".join([f"the compiling process ended with {how}", *lines[-_LAST_WORDS:]])


def compiling(
    environment: Mapping[str, str], disassembler: pathlib.Path | None, jobs: int, keep: pathlib.Path | None = None
) -> Launcher:
    """Return a launcher of `pallas_kernels.check.compile`. ``keep``: a folder for PTX and machine code."""
    command = [sys.executable, "-m", "pallas_kernels.check.compile"]
    if disassembler is not None:
        command += ["--cuda-root", str(disassembler.parents[1])]
    if keep is not None:
        command += ["--keep", str(keep.resolve())]
    return Launcher(tuple(command), environment, jobs)
