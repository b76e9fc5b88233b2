"""Trace of an engine's steps in a file (``trace_steps``): lines of JSON for plans and their results. No jax."""

from __future__ import annotations

import collections
import itertools
import json
import time
from typing import Any

from jaxinfer.config import EngineConfigError
from jaxinfer.engine.scheduling.plan import PlanRunner, PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.scheduling.sequence import Sequence

_ENGINES = itertools.count()


class StepTrace:
    """A `PlanRunner` that appends the steps of another one to a file.

    Every line has ``engine`` (data-parallel replicas of a process have one file), ``step`` and ``seconds`` (monotonic).
    A plan names sequences as ``[request id, sample]``; tokens in it are those that the host feeds, below 0 where the
    device has them. The results are the sampled tokens by decode row; with async scheduling they follow the next plan.

    Raises:
        EngineConfigError: the file cannot be opened.
    """

    def __init__(self, path: str, runner: PlanRunner) -> None:
        try:
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  as long as the engine
        except OSError as error:
            raise EngineConfigError(f"trace_steps={path!r} cannot be written: {error.strerror}") from error
        self._runner, self._engine, self._count = runner, next(_ENGINES), itertools.count()
        self._launched = collections.deque[int]()  # steps that are not read yet

    def launch(self, plan: StepPlan) -> Any:
        launched = self._runner.launch(plan)
        if launched is not None:
            self._launched.append(next(self._count))
            self._write_plan(self._launched[-1], plan)
        return launched

    def read(self, launched: Any) -> StepResult | None:
        result = self._runner.read(launched)
        if result is not None:
            self._write(self._launched.popleft(), tokens=result.tokens)
        return result

    def _write_plan(self, step: int, plan: StepPlan) -> None:
        self._write(
            step,
            microbatch=plan.microbatch,
            runs=plan.steps,
            admitted=[[*_name(each), each.slot] for each in plan.admitted],
            preempted=[[*_name(each), slot] for each, slot in plan.preempted],
            prefills=_chunks(plan.prefills),
            decodes=[[*_name(each), *row] for each, *row in plan.decodes],
            drafts=[[*_name(each.sequence), each.start, each.paths] for each in (*(plan.drafts or ()), *plan.forced)],
            draft_prefills=_chunks(plan.draft_prefills),
            masked=sorted(plan.masks),
            encoded=[each.image.digest for each in plan.encodes],
            lora_slots=sorted({slot for slot, _, _ in plan.loads}),
            exports=plan.exports,
            copies=plan.copies,
            imports=plan.imports,
        )

    def _write(self, step: int, **fields: Any) -> None:
        line = {"engine": self._engine, "step": step, "seconds": round(time.monotonic(), 6)}
        self._file.write(json.dumps(line | {name: each for name, each in fields.items() if each}) + "\n")


def _name(sequence: Sequence) -> tuple[str, int]:
    return sequence.request.request_id, sequence.index


def _chunks(chunks: list[PrefillPlan]) -> list[list[Any]]:
    """Return sequence, start, length and program size of each chunk."""
    return [[*_name(plan.sequence), *plan.chunk] for plan in chunks]
