"""Engine core without a device: `python -m benchmarks.routed.core`, its settings on stdin as usual. No jax.

Scheduler, page allocator and journal are the real ones; every token is the same id, without delay.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.serving.paced import InstantRunner
from benchmarks.traces.fake import resolved
from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.core import process
from jaxinfer.serve.core.service import Built, Report
from jaxinfer.serve.core.settings import CoreSettings

NAME, CONTEXT, EOS, TOKEN = "bytes", 8192, 0, 9
REPO = pathlib.Path(__file__).resolve().parents[2]


def command() -> list[str]:
    """Return the command line of the core, for `jaxinfer.serve.server.Server`."""
    return ["env", f"PYTHONPATH={REPO}", sys.executable, "-m", "benchmarks.routed.core"]


def write_tokenizer(folder: pathlib.Path) -> None:
    """Write a byte tokenizer: each letter of a text is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({"</s>": EOS} | {letter: 1 + rank for rank, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_bos_token": false}')


def build(settings: CoreSettings, report: Report) -> Built:
    """Build the engine of the settings, without its device; ``model``: the tokenizer's folder."""
    del report  # no start-up phase takes long
    config = resolved(settings.engine, CONTEXT)
    engine = EngineLoop(config, new_kv(config), InstantRunner(TOKEN), vocab_size=257)
    card = ModelCard(
        name=NAME,
        architecture="none",
        dtype="none",
        max_model_len=config.max_model_len,
        vocab_size=257,
        eos_token_ids=[EOS],
        defaults={},
        engine=dataclasses.asdict(config),
        created=int(time.time()),
    )
    return Built(engine, card, settings.model, journals=engine.journals() if settings.kv_events else ())


if __name__ == "__main__":
    process.run(build, (Exception,))  # no failed start would succeed on a retry
