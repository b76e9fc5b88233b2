"""A core with the fake engine: `python -m tests.serve.core.fake_core OPTIONS`, settings on stdin as for the real core.

``--broken SENTENCE``: the start fails permanently. ``--crash``: it raises an exception. ``--slow SECONDS``: its
duration, in ten steps. ``--mute``: it reports no progress. ``--once FILE``: faults, also of `Mischief`, apply to the
first process only, which creates the file. ``--folder FOLDER``: reported folder of tokenizer and template.
``--context``: maximum model length. ``--pages``: pages of the KV cache. ``--follow``: the core takes no requests.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

from jaxinfer.lora.store import LoRAStore
from jaxinfer.serve.core import process
from jaxinfer.serve.core.messages import StartupEvent
from jaxinfer.serve.core.service import Built, Report
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.settings import ServeConfig
from tests.lora.fakes import parts_of, read_number
from tests.serve import fake_engine as fake
from tests.serve.fake_weights import FakeWeights, read_fake

REPO = pathlib.Path(__file__).resolve().parents[3]


class BrokenError(Exception):
    """A permanent failure of the start."""


class FakeProfiler:
    def __init__(self, folder: str) -> None:
        self._folder, self._runs = folder, False

    def start(self) -> None:
        if self._runs:
            raise RuntimeError("a profile is being taken")
        self._runs = True

    def stop(self) -> str:
        if not self._runs:
            raise RuntimeError("no profile is being taken")
        self._runs = False
        return self._folder


def command(*options: str, log: pathlib.Path | None = None) -> list[str]:
    """Return the command for `Supervisor`; ``log``: file for its stderr."""
    run = ["env", f"PYTHONPATH={REPO}", sys.executable, "-m", "tests.serve.core.fake_core", *options]
    return run if log is None else ["sh", "-c", 'log=$0; exec "$@" 2>>"$log"', str(log), *run]


def make_config(**changes: object) -> ServeConfig:
    return ServeConfig(**{"model": "fake", **changes})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--broken")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--mute", action="store_true")
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--once", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=16384)
    parser.add_argument("--folder", default="nowhere")
    parser.add_argument("--fault-at", type=int)
    parser.add_argument("--hang-at", type=int)
    parser.add_argument("--follow", action="store_true")
    options = parser.parse_args()
    first = options.once is None or not options.once.exists()
    if options.once is not None:
        options.once.touch()

    def build(settings: CoreSettings, report: Report) -> Built:
        if options.broken and first:
            raise BrokenError(options.broken)
        if options.crash and first:
            raise ZeroDivisionError("in the start")
        for done in range(1, 11):
            if not options.mute:
                report(StartupEvent("loading_weights", bytes_done=done, bytes_total=10))
            time.sleep(options.slow / 10)
        mischief = fake.Mischief(
            seconds=options.seconds,
            fault_at=options.fault_at if first else None,
            hang_at=options.hang_at if first else None,
        )
        adapters = settings.engine
        engine = fake.FakeEngine(
            mischief,
            loras=LoRAStore(read_number, parts_of, adapters.host_loras) if adapters.enable_lora else None,
            enable_lora=adapters.enable_lora,
            max_loras=adapters.max_loras,
            max_waiting_requests=settings.engine.max_waiting_requests,
            max_model_len=options.context,
            max_num_seqs=options.slots,
            num_pages=options.pages,
        )
        profiler = None if settings.profile_dir is None else FakeProfiler(settings.profile_dir)
        card = fake.fake_card(engine.config, settings.served_model_name or "fake")
        journals = engine.journals() if settings.kv_events else ()
        if options.follow:
            return Built(None, card, options.folder, profiler, journals)
        return Built(engine, card, options.folder, profiler, journals, FakeWeights(engine), read_fake)

    process.run(build, (BrokenError,))


if __name__ == "__main__":
    main()
