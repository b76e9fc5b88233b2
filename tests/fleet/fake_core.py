"""The fake core with a journal of its steps: `python -m tests.fleet.fake_core OPTIONS`, settings on stdin as usual.

``--journal`` gets a line per step: its launch time (`time.monotonic`, one clock for all processes), and the ids of the
requests in it. A step with a request of seed `SLOW` takes ``--slow`` seconds, other steps ``--seconds``.
"""

from __future__ import annotations

import argparse
import pathlib
import time

from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.serve.core import process
from jaxinfer.serve.core.service import Built, Report
from jaxinfer.serve.core.settings import CoreSettings
from tests.serve import fake_engine as fake

SLOW = 987_654
"""Seed of requests whose steps are slow enough to be counted."""


class JournalRunner(fake.FakeRunner):
    """A `FakeRunner` that records the steps it launches."""

    def __init__(self, journal: pathlib.Path, seconds: float, slow: float) -> None:
        super().__init__(fake.Mischief())
        self._journal, self._seconds, self._slow = journal.open("a", buffering=1), seconds, slow

    def launch(self, plan: StepPlan) -> StepPlan | None:
        if plan:
            print(time.monotonic(), *(sequence.request.request_id for sequence in _sequences(plan)), file=self._journal)
        return super().launch(plan)

    def read(self, launched: StepPlan | None) -> StepResult | None:
        if launched is not None:
            slow = any(sequence.params.seed == SLOW for sequence in _sequences(launched))
            time.sleep(self._slow if slow else self._seconds)
        return super().read(launched)


def _sequences(plan: StepPlan) -> list[Sequence]:
    return [prefill.sequence for prefill in plan.prefills] + [row.sequence for row in plan.decodes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--journal", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--slow", type=float, default=0.0)
    options = parser.parse_args()

    def build(settings: CoreSettings, report: Report) -> Built:
        runner = JournalRunner(options.journal, options.seconds, options.slow)
        engine = fake.FakeEngine(runner=runner, num_pages=16384)
        return Built(engine, fake.fake_card(engine.config), options.folder)

    process.run(build, ())


if __name__ == "__main__":
    main()
