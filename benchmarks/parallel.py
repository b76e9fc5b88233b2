"""Costs of several devices: idle pipeline stages, bytes between devices, experts compared with a dense layer.

    python benchmarks/parallel.py               # all; on a CPU with devices that share its cores
    python benchmarks/parallel.py bubble --stages 2
    python benchmarks/parallel.py bytes
    python benchmarks/parallel.py experts

See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.peers import machine
from benchmarks.peers.worker import REPO

_DEVICES = 8
# Each CPU device computes on one core: stages that share the thread pool would be slower together than alone.
_CPU_FLAGS = (f"--xla_force_host_platform_device_count={_DEVICES}", "--xla_cpu_multi_thread_eigen=false")
PARTS = ("bubble", "bytes", "experts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0."""
    options = parse(arguments)
    _start_with_devices()
    from benchmarks.mesh import bubble, experts, traffic

    measures: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "bubble": bubble.measure,
        "bytes": traffic.measure,
        "experts": experts.measure,
    }
    found = {name: measures[name](options) for name in (options.parts or PARTS)}
    record = {"machine": machine.describe(len(machine.usable_cores())), "device": _device(), **found}
    out = options.out or default_file()
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", choices=[[], *PARTS], metavar="|".join(PARTS), help="what to measure (default: all)")
    add("--stages", type=int, default=2, help="pipeline stages, not more than cores (default 2)")
    add("--seconds", type=float, default=1.0, help="of each timed turn (default 1)")
    add("--rounds", type=int, default=5, help="turns of each (default 5)")
    add("--out", type=pathlib.Path, help="JSON file (default: benchmarks/results/parallel-<cpu>-<date>.json)")
    return parser.parse_args(arguments)


def default_file() -> pathlib.Path:
    name = f"parallel-{machine.slug(machine.cpu_name())[:8].strip('-')}-{datetime.date.today().isoformat()}.json"
    return REPO / "benchmarks" / "results" / name


def _start_with_devices() -> None:
    """Re-execute the process with the flags, which XLA reads only once."""
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in _CPU_FLAGS if flag not in flags]
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def _device() -> str:
    import jax

    return str(jax.devices()[0].device_kind)


if __name__ == "__main__":
    sys.exit(main())
