"""Decoding with quantised weights on this machine: storage formats in turns, and llama.cpp for comparison.

    python benchmarks/quantised.py --oracle-python .venv-oracle/bin/python

`jaxinfer convert --quantize` and llama.cpp convert a random Llama of 125M parameters. Each row is
a process of its own that computes only during a request, in turns with the others. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.peers import machine
from benchmarks.peers.environment import random_folder
from benchmarks.peers.measure import decode_rate, ratios
from benchmarks.peers.session import random_prompts
from benchmarks.peers.worker import REPO, PeerDied, Worker

RESULTS = REPO / "benchmarks" / "results"
VOCAB = 32000


@dataclasses.dataclass(frozen=True)
class Row:
    """A storage format of the weights.

    Attributes:
        quantize: arguments of `jaxinfer.convert`; none: the folder unconverted.
        dtype: dtype of the activations.
        activations: see `EngineConfig.activation_dtype`.
        llamacpp: file type of a GGUF that llama.cpp runs instead.
    """

    name: str
    quantize: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    activations: str = "auto"
    llamacpp: str = ""


INT4 = ("--quantize", "int4", "--group-size", "128")
ROWS = (
    Row("bfloat16"),
    Row("float32", dtype="float32"),
    Row("int8, activations int8", ("--quantize", "int8"), activations="int8"),
    Row("int8, activations int8, float32", ("--quantize", "int8"), "float32", "int8"),
    Row("int8 weights", ("--quantize", "int8"), "float32"),
    Row("int4 weights, groups of 128", INT4, "float32"),
    Row("nf4 weights", ("--quantize", "nf4"), "float32"),
    Row("llama.cpp bfloat16", llamacpp="BF16"),
    Row("llama.cpp Q8_0", llamacpp="Q8_0"),
    Row("llama.cpp Q4_K_M", llamacpp="Q4_K_M"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 2 with a message when it cannot measure."""
    options = parse(arguments)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if options.only in row.name and (options.oracle_python or not row.llamacpp)]
    try:
        found = [each for batch in options.batches for each in measure(rows, batch, options)]
    except (PeerDied, subprocess.CalledProcessError) as cause:
        print(f"quantised: {cause}", file=sys.stderr)
        return 2
    record = {"machine": machine.describe(len(machine.usable_cores())), "rounds": options.rounds, "rows": found}
    out = options.out or RESULTS / f"quantised-{machine.slug(machine.cpu_name())}-{datetime.date.today()}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--oracle-python", type=pathlib.Path, help="with llama_cpp and gguf (default: llama.cpp is left out)")
    add("--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 32])
    add("--rounds", type=int, default=5)
    add("--new-tokens", type=int, default=48)
    add("--prompt-len", type=int, default=32)
    add("--only", default="", help="rows whose name holds this")
    add("--work-dir", type=pathlib.Path, default=REPO / "build" / "quantised")
    add("--out", type=pathlib.Path)
    return parser.parse_args(arguments)


def measure(rows: Sequence[Row], batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens a second of each row with ``batch`` sequences at once, and the ratio to the first row's."""
    workers = {}
    try:
        for row in rows:
            workers[row.name] = start(row, batch, options)
        rates: dict[str, list[float]] = {row.name: [] for row in rows}
        for round_number in range(options.rounds + 1):
            prompts = random_prompts(f"{batch} {round_number}", batch, options.prompt_len, VOCAB)
            for name, worker in workers.items():
                rate = decode_rate(worker.ask("generate", prompts=prompts, new_tokens=options.new_tokens))
                if round_number:  # the first round warms up
                    rates[name].append(rate)
    finally:
        for worker in workers.values():
            worker.close()
    found = []
    for name, runs in rates.items():
        ratio = ratios(runs, rates[rows[0].name])
        print(f"batch {batch:3d}  {name:34s} {statistics.median(runs):8.1f} tokens/s  x{ratio.median:.2f}", flush=True)
        found.append({"batch": batch, "row": name, "tokens_per_second": runs, "ratio": dataclasses.asdict(ratio)})
    return found


def start(row: Row, batch: int, options: argparse.Namespace) -> Worker:
    log = options.work_dir / f"{machine.slug(row.name)}.log"
    peer = "llamacpp_peer" if row.llamacpp else "jaxinfer_peer"
    python = str(options.oracle_python.absolute()) if row.llamacpp else sys.executable
    worker = Worker(row.name, (python, "-m", f"benchmarks.peers.{peer}"), log)
    extra = {} if row.llamacpp else {"activation_dtype": row.activations}
    worker.ask(
        "load",
        folder=str(folder_of(row, options)),
        gguf=str(gguf_of(row, options)) if row.llamacpp else "",
        dtype=row.dtype,
        batch=batch,
        max_len=options.prompt_len + options.new_tokens,
        threads=len(machine.usable_cores()),
        **extra,
    )
    return worker


def folder_of(row: Row, options: argparse.Namespace) -> pathlib.Path:
    """Return the converted folder; convert it on first use."""
    source = random_folder(options.work_dir)
    if not row.quantize:
        return source
    target: pathlib.Path = options.work_dir / "-".join(row.quantize).replace("--", "")
    if not target.exists():
        command = (sys.executable, "-m", "jaxinfer.convert", str(source), str(target), *row.quantize)
        subprocess.run(command, cwd=REPO, check=True)
    return target


def gguf_of(row: Row, options: argparse.Namespace) -> pathlib.Path:
    """Return llama.cpp's file; write it on first use."""
    python, folder = str(options.oracle_python.absolute()), random_folder(options.work_dir)
    plain: pathlib.Path = options.work_dir / "plain.gguf"
    if not plain.exists():
        subprocess.run((python, "-m", "benchmarks.peers.gguf_llama", folder, plain, "bfloat16"), cwd=REPO, check=True)
    target: pathlib.Path = options.work_dir / f"{row.llamacpp}.gguf"
    if row.llamacpp == "BF16":
        return plain
    if not target.exists():
        command = (python, "-m", "benchmarks.peers.gguf_quantise", plain, target, row.llamacpp)
        subprocess.run(command, cwd=REPO, check=True)
    return target


if __name__ == "__main__":
    sys.exit(main())
