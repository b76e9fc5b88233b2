"""The kernels and shapes to tune, one after the other, within a time; results are written after each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels.specs import Problem, Tunable
from pallas_kernels.supervise import Journal
from pallas_kernels.tiles import Entry, Measured
from pallas_kernels.tune.search import Bench, Sweep, candidates
from pallas_kernels.tune.store import Files


@dataclasses.dataclass(frozen=True)
class Task:
    """A kernel at one shape."""

    tunable: Tunable
    shape: Any

    def __str__(self) -> str:
        first = dataclasses.asdict(self.tunable.shapes[0])
        changed = [f"{name}={x}" for name, x in dataclasses.asdict(self.shape).items() if x != first[name]]
        return f"{self.tunable.kernel} {','.join(changed) or 'at its first shape'}"


@dataclasses.dataclass
class Tuner:
    """A sweep of tasks that writes their results.

    Attributes:
        device: its kind, as the tile look-up will see it.
        facts: facts of this run, written with each result.
        bench: makes the bench for the candidates of a task's problem.
        failures: exceptions of a bench, and of its maker, after which the next task runs.
        clock: seconds.
        say: prints a line.
        journal: each task is a step of it; "failed" lines name those without a result.
        failed: tasks without a result.
    """

    device: str
    multiprocessors: int
    facts: Mapping[str, Any]
    bench: Callable[[Task, Problem], Bench]
    failures: tuple[type[Exception], ...]
    files: Files
    clock: Callable[[], float]
    say: Callable[[str], None]
    journal: Journal
    failed: list[str] = dataclasses.field(default_factory=list)

    def run(self, tasks: Sequence[Task], seconds: float) -> bool:
        """Tune as many tasks as the time suffices for. Return False if Ctrl-C ended it.

        A task that needs less than its share of the time leaves the rest to later tasks.
        """
        end = self.clock() + seconds
        for index, task in enumerate(tasks):
            left, behind = end - self.clock(), len(tasks) - index
            if left <= 0:
                self.say(f"time is up: {behind} shapes were not tuned, the first of them {task}")
                return True
            with self.journal.step(str(task)):
                goes_on = self._tune(task, self.clock() + left / behind)
            if not goes_on:
                self.say(f"interrupted: what was found by then is kept; {behind - 1} shapes were not tuned")
                return False
        return True

    def _tune(self, task: Task, deadline: float) -> bool:
        """Tune one task; return False if it was interrupted."""
        problem = task.tunable.problem(task.shape, self.multiprocessors)
        work = candidates(problem, self.files.bits(self.device, task.tunable.kernel, problem.key.options))
        if not work:
            return self._fail(task, "its kernel takes none of the tiles")
        try:
            sweep = Sweep(work, self.bench(task, problem), self.clock, deadline)
            best = sweep.run()
        except self.failures as error:
            return self._fail(task, str(error))
        except KeyboardInterrupt:
            return False
        if best is not None:
            self._keep(task, problem, sweep, best)
        elif not sweep.interrupted:
            self._fail(task, sweep.refused.get(work[0], "there was no time for it"))
        return not sweep.interrupted

    def _fail(self, task: Task, why: str) -> bool:
        self.failed.append(str(task))
        self.journal.put(failed=str(task), why=why)
        self.say(f"{task}: failed: {why}")
        return True

    def _keep(self, task: Task, problem: Problem, sweep: Sweep, best: Any) -> None:
        fields = dataclasses.asdict(best)
        bits = {name: value for name, value in fields.items() if name in task.tunable.bits}
        rest = {name: value for name, value in fields.items() if name not in bits}
        measured = Measured(dict(problem.key.sizes), rest, {**_figures(problem, sweep, best), **self.facts})
        self.files.add(Entry(self.device, task.tunable.kernel, dict(problem.key.options), bits, (measured,)))
        first = sweep.candidates[0]
        gain = "where the search began" if best == first else f"{sweep.microseconds(first):.1f} us where it began"
        tried = f"{sweep.tried} of {len(sweep.candidates)} tried"
        self.say(f"{task}: {best}: {sweep.microseconds(best):.1f} us, {gain}; {tried}")
        for tiles, why in sweep.refused.items():
            self.say(f"  left out: {tiles}: {why}")


def _figures(problem: Problem, sweep: Sweep, best: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {"microseconds": round(sweep.microseconds(best), 2)}
    if problem.heuristic in sweep.samples:
        figures["heuristic_microseconds"] = round(sweep.microseconds(problem.heuristic), 2)
    return {**figures, "tried": sweep.tried, "candidates": len(sweep.candidates)}
