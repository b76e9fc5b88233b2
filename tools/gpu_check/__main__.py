"""``python -m tools.gpu_check [--only NAME,...] [--out DIR] [--quick]``: what this machine's GPU does with jaxinfer.

Each section runs in a process of its own under its own time limit, so that a crash or a hang loses one section; the
results file is rewritten after each. Needs JAX, Flax and numpy. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tools.gpu_check import standins
from tools.gpu_check.report import Report, read_records

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Section, module, seconds it may take. All of them together stay under eight minutes.
SECTIONS = (
    ("device", "device", 30),
    ("copy", "bandwidth", 30),
    ("gemm", "gemm", 50),
    ("paged", "paged", 80),
    ("step", "step", 130),
    ("rows", "rows", 90),
    ("demo", "demo", 60),
)
NAMES = tuple(name for name, *_ in SECTIONS)
# Memory bandwidth by NVIDIA's datasheets, for a part of JAX's name of the device.
DATASHEET_GB_S = {"H100 80GB HBM3": 3350.0, "H200": 4800.0, "A100-SXM4-80GB": 2039.0}
QUICK_PATIENCE = 4  # times the limits: a quick run may meet a slow machine, and there the limits guard nothing
CPU_NOTE = "This device is a CPU: the figures show that the checks run, and say nothing about any GPU."


class Results:
    """The results file: one per device and day; sections that are run again replace their earlier selves."""

    def __init__(self, folder: pathlib.Path, device: dict[str, Any], quick: bool) -> None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        slug = re.sub(r"[^a-z0-9]+", "-", device["kind"].lower()).strip("-")
        self.path = folder / f"{slug}-{date}{'-quick' if quick else ''}.json"
        self.content: dict[str, Any] = {"date": date, "quick": quick, "device": device, "git": git_state()}
        if device["platform"] == "cpu":
            self.content["note"] = CPU_NOTE
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
            self.content["sections"] = earlier["sections"]
        self.content.setdefault("sections", {})

    def put(self, name: str, section: dict[str, Any]) -> None:
        self.content["sections"][name] = {**section, "git": self.content["git"]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.path)

    def bandwidths(self) -> dict[str, float]:
        """GB/s of this device's memory: as the copy section measured it, and by its datasheet, where known."""
        records = self.content["sections"].get("copy", {}).get("records", [])
        kind = self.content["device"]["kind"]
        measured = [("copy", record["gb_s"]) for record in records if record["key"] == "best"]
        return dict(measured + [("datasheet", rate) for name, rate in DATASHEET_GB_S.items() if name in kind])


def git_state() -> dict[str, Any]:
    """The commit, and whether the tree differs from it; a reason where there is no repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError) as error:
        return {"commit": None, "reason": str(error)[:200]}


def run_section(name: str, quick: bool, bandwidths: dict[str, float]) -> dict[str, Any]:
    """Run one section in a process of its own; whatever it wrote comes back, with how it ended."""
    limit = _limit(name, quick)
    with tempfile.TemporaryDirectory() as folder:
        records, log = pathlib.Path(folder, "records"), pathlib.Path(folder, "log")
        command = [sys.executable, "-m", "tools.gpu_check", "--section", name, "--records", str(records)]
        command += ["--bandwidths", json.dumps(bandwidths)] + ["--quick"] * quick
        # The 8B step needs nearly all of an 80 GB device, which JAX would not take by default.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
        start = time.monotonic()
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr, start_new_session=True)
            status = _wait(process, limit)
        section = {"status": status, "seconds": round(time.monotonic() - start, 1), "limit_seconds": limit}
        if status != "ok":
            section["stderr"] = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        return {**section, "records": read_records(records)}


def _limit(name: str, quick: bool) -> float:
    return next(seconds for section, _, seconds in SECTIONS if section == name) * (QUICK_PATIENCE if quick else 1)


def _wait(process: subprocess.Popen[bytes], limit: float) -> str:
    """ "ok", "failed (exit N)" or "stopped after N s"; at the limit the section's whole process group is killed."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "ok" if code == 0 else f"failed (exit {code})"


def section_main(arguments: argparse.Namespace) -> None:
    """The child's side: run one section here."""
    standins.provide()
    module = next(module for name, module, _ in SECTIONS if name == arguments.section)
    report = Report(
        pathlib.Path(arguments.records),
        seconds=_limit(arguments.section, arguments.quick) - 5,
        quick=arguments.quick,
        limits=json.loads(arguments.bandwidths),
    )
    importlib.import_module(f"tools.gpu_check.{module}").run(report)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.section:
        section_main(arguments)
        return 0
    first = run_section("device", arguments.quick, {})
    device = next((record for record in first["records"] if record["key"] == "device"), None)
    if device is None:
        print(f"gpu_check: JAX found no device: {first.get('stderr', '')}", file=sys.stderr)
        return 2
    if device["platform"] == "cpu" and not arguments.quick:
        print("gpu_check: no GPU, JAX sees the CPU only; --quick runs the checks there at tiny sizes", file=sys.stderr)
        return 2
    results = Results(pathlib.Path(arguments.out), device, arguments.quick)
    results.put("device", first)
    for name in arguments.only:
        if name != "device":
            print(f"== {name}", flush=True)
            results.put(name, run_section(name, arguments.quick, results.bandwidths()))
    return summary(results, arguments.only)


def summary(results: Results, names: Sequence[str]) -> int:
    """Print how each section ended; 1 if one did not end well."""
    sections = {name: results.content["sections"][name] for name in names}
    for name, section in sections.items():
        print(f"{name:8} {section['status']:24} {section['seconds']:6.1f} s")
    print(results.content.get("note", ""), results.path, sep="\n")
    return int(any(section["status"] != "ok" for section in sections.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--only", type=_names, default=NAMES, metavar="NAME,...", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also without a GPU: does the code run?")
    for hidden in ("--section", "--records", "--bandwidths"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown section {', '.join(unknown)}; known: {', '.join(NAMES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
