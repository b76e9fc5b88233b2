"""Engine core process: `python -m benchmarks.serving.core JSON`, its settings on stdin as usual. No jax."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jaxinfer
from benchmarks.serving.paced import Pace, PacedEngine, Stamps
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.core import process
from jaxinfer.serve.core.service import Built, Report
from jaxinfer.serve.core.settings import CoreSettings

FOLDER = pathlib.Path(jaxinfer.__file__).parent / "demo" / "target"
"""Folder of a real tokenizer and template; the weights are not read."""
CONTEXT, VOCAB, EOS = 8192, 2048, 1
TOKEN, TEXT = 271, " the"
"""Token and text that every output consists of."""
REPO = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Table:
    """Path and size of the table of stamps."""

    path: str
    rows: int
    tokens: int


def command(table: Table, pace: Pace) -> list[str]:
    """Return the command line of the core, for `jaxinfer.serve.server.Server`."""
    settings = json.dumps({"table": dataclasses.asdict(table), "pace": dataclasses.asdict(pace)})
    return ["env", f"PYTHONPATH={REPO}", sys.executable, "-m", "benchmarks.serving.core", settings]


def main() -> None:
    settings_json: dict[str, Any] = json.loads(sys.argv[1])
    table, pace = Table(**settings_json["table"]), Pace(**settings_json["pace"])

    def build(settings: CoreSettings, report: Report) -> Built:
        del report  # no start-up phase takes long
        stamps = Stamps(pathlib.Path(table.path), table.rows, table.tokens)
        engine = PacedEngine(settings.engine, CONTEXT, pace, stamps)
        card = ModelCard(
            name="paced",
            architecture="none",
            dtype="none",
            max_model_len=engine.config.max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            defaults={},
            engine=dataclasses.asdict(engine.config),
            created=int(time.time()),
        )
        return Built(engine, card, str(FOLDER))

    process.run(build, (Exception,))  # no failed start would succeed on a retry


if __name__ == "__main__":
    main()
