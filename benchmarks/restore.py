"""Time to load weights from disk to the device: a converted folder against the safetensors it was made of.

    python benchmarks/restore.py                     a layer of Llama-3.1-8B and a small vocabulary: some 570 MB
    python benchmarks/restore.py --layers 4 --out benchmarks/results/restore.json

Four ways take turns, to run under the same load: ``safetensors`` and ``converted`` are `load_params`; ``orbax``
is Orbax's own restore of the converted folder; ``read`` reads its files into one buffer and makes no array: a lower
bound for the other ways with one thread. Warm: the files are in the page cache. Cold: they were dropped from it.
Processor time, of all threads, does not depend on the load of other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.traces import record
from jaxinfer.models.registry import family_for
from jaxinfer.types import ParamTree
from jaxinfer.weights import init_params, load_params, save_params
from jaxinfer.weights.native import writer
from jaxinfer.weights.native.manifest import PARAMS, read_manifest
from jaxinfer.weights.native.reader import ConvertedCheckpoint

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs" / "models"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        quiet = record.Quiet()
        specs = make(options, pathlib.Path(place))
        runs = measure(options.rounds, ways(pathlib.Path(place), specs), pathlib.Path(place))
        result = record.base(options, os.cpu_count() or 1, quiet.others(os.cpu_count() or 1))
        size = read_manifest(pathlib.Path(place, "converted")).nbytes
    result |= {"bytes": size, "seconds": runs}
    print(table(size, runs))
    print(f"others used {result['machine']['used_by_others']:.0%} of the machine meanwhile")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.1-8B", help="of configs/models (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--folder", type=pathlib.Path, help="on whose disk it is measured (default: the temporary one)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def make(options: argparse.Namespace, place: pathlib.Path) -> ParamTree:
    """Write both folders, of random weights; return their specs."""
    config_json = json.loads((CONFIGS / f"{options.model}.json").read_text(encoding="utf-8"))
    config_json |= {"num_hidden_layers": options.layers, "vocab_size": options.vocab}
    family = family_for(config_json)
    specs = family.param_specs(family.config(config_json))
    params = init_params(specs, 0, "bfloat16")
    save_params(place / "safetensors", params, specs, config_json)
    writer.save_params(place / "converted", params, specs, config_json)
    return specs


def ways(place: pathlib.Path, specs: ParamTree) -> dict[str, Callable[[], Any]]:
    """Return the functions to measure, by name."""
    converted, buffer = place / "converted", bytearray(1 << 24)

    def restore() -> Any:
        return load_params(ConvertedCheckpoint(converted, read_manifest(converted)), specs, "auto")

    def plain() -> Any:
        checkpointer = ocp.PyTreeCheckpointer()
        on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        as_jax = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=on_device)
        return {
            part.name: checkpointer.restore(
                part, restore_args=jax.tree.map(lambda _: as_jax, checkpointer.metadata(part).item_metadata.tree)
            )
            for part in (converted / PARAMS).iterdir()
        }

    def read() -> None:
        for path in files_of(converted):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return {
        "safetensors": lambda: load_params(place / "safetensors", specs, "auto"),
        "converted": restore,
        "orbax": plain,
        "read": read,
    }


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def measure(rounds: int, named: dict[str, Callable[[], Any]], place: pathlib.Path) -> dict[str, Any]:
    """Measure wall-clock and processor seconds of each way and state; the first round is not kept."""
    found: dict[str, Any] = {
        f"{way}, {state}": {"clock": [], "processor": []} for state in ("warm", "cold") for way in named
    }
    for number in range(rounds + 1):
        for state in ("warm", "cold"):
            for way, run in named.items():
                for path in files_of(place):
                    (forget if state == "cold" else remember)(path)
                start, spent = time.perf_counter(), time.process_time()
                jax.block_until_ready(run())
                if number:
                    found[f"{way}, {state}"]["clock"].append(time.perf_counter() - start)
                    found[f"{way}, {state}"]["processor"].append(time.process_time() - spent)
    return found


def forget(path: pathlib.Path) -> None:
    """Drop the file from the page cache, as far as the operating system complies."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(path: pathlib.Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def table(size: int, runs: dict[str, Any]) -> str:
    """Format a table in Markdown; ratios are to safetensors in the same state, of the medians."""
    head = "| way | clock: best, median | times as fast | processor: best, median | times as little |"
    lines = [f"{size / 1e6:.0f} MB", "", head, "|---|---|---|---|---|"]
    for name, taken in runs.items():
        cells = [name]
        for kind in ("clock", "processor"):
            seconds, other = taken[kind], runs[f"safetensors, {name.rpartition(', ')[2]}"][kind]
            median = statistics.median(seconds)
            cells += [f"{min(seconds):.2f} s, {median:.2f} s", f"{statistics.median(other) / median:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
