"""``jaxinfer check-gpu [--only NAME,...] [--out DIR] [--quick]``: checks and benchmarks of jaxinfer on the local GPU.

Each section runs in its own process with its own time limit. If a step hangs or crashes, the results name it and a new
process continues after that step. A section writes its records to a file next to the results file as it runs; the
results file and its table in Markdown are rewritten after each section.
Needs JAX, Flax and numpy. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
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
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.cli.app import run as run_command
from jaxinfer.cli.parser import Parser
from jaxinfer.gpu_check import standins
from jaxinfer.gpu_check.goals import has_times, verdicts
from jaxinfer.gpu_check.report import Report, read_records
from jaxinfer.gpu_check.sections import BENCHMARKS, ROOT, all_sections
from jaxinfer.gpu_check.table import NOT_A_GPU, markdown, no_times
from pallas_kernels.supervise import Ended, Journal, supervise

COMMAND = (sys.executable, "-m", "jaxinfer.gpu_check")  # of the process of a section
SECTIONS = all_sections()
_ABOUT = """Check this machine's GPU: every kernel against float64 and timed, the text of the demo model. In a source
checkout, benchmark it too: bandwidth, matmuls, the step of an 8B model, the engine. Takes less than ten minutes."""
BY_NAME = {section.name: section for section in SECTIONS}
NAMES = tuple(BY_NAME)
COLUMNS = {section.name: section.columns for section in SECTIONS}
UNASKED = tuple(section.name for section in SECTIONS if section.asked)
# From NVIDIA's datasheets, keyed by a substring of JAX's device kind: memory bandwidth, and dense bfloat16 throughput.
DATASHEET = {
    "H100 80GB HBM3": {"gb_s": 3350.0, "tflop_s": 989.0},
    "H200": {"gb_s": 4800.0, "tflop_s": 989.0},
    "A100-SXM4-80GB": {"gb_s": 2039.0, "tflop_s": 312.0},
}
QUICK_PATIENCE = 4  # factor on the limits: a quick run may be on a slow machine, where the limits protect nothing
_ELSEWHERE = f"the benchmark sections are in {BENCHMARKS} of a source checkout: run the command there"
CPU_NOTE = f"{NOT_A_GPU[0].upper()}{NOT_A_GPU[1:]}."


class Results:
    """The results file: one per device and day. A section that runs again replaces its earlier results."""

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
        self._adopt()

    def _adopt(self) -> None:
        """Import the records that an interrupted run wrote for its last section."""
        for path in sorted(self.path.parent.glob(f"{self.path.stem}.*.part")):
            name = path.suffixes[-2][1:]
            if name in NAMES and (records := read_records(path)):
                self.put(name, {"status": "cut off", "seconds": 0.0, "records": records})
            path.unlink()

    def part(self, name: str) -> pathlib.Path:
        """Return the file that a section writes while it runs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path.with_name(f"{self.path.stem}.{name}.part")

    def autotuned(self, name: str) -> pathlib.Path | None:
        """Return the file for the XLA autotuning results of a section; None on CPU, where XLA does not autotune."""
        if self.content["device"]["platform"] == "cpu":
            return None
        folder = self.path.with_name(f"{self.path.stem}-autotune")
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.txt"

    def put(self, name: str, section: Mapping[str, Any]) -> None:
        self.content["sections"][name] = {**section, "git": self.content["git"]}
        self.content["sections"] = {
            each: self.content["sections"][each]
            for each in dict.fromkeys((*NAMES, *self.content["sections"]))
            if each in self.content["sections"]
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _rewrite(self.path, json.dumps(self.content, indent=1) + "\n")
        _rewrite(self.path.with_suffix(".md"), markdown(self.content, COLUMNS))

    def limits(self) -> dict[str, dict[str, float]]:
        """Return the limits of this device (measured, datasheet) and the rates of the engine, see `Report.limits`."""
        sections, kind = self.content["sections"], self.content["device"]["kind"]
        known: dict[str, dict[str, float]] = {"gb_s": {}, "tflop_s": {}, "output_tokens_s": {}}
        for section, unit in (("copy", "gb_s"), ("gemm", "tflop_s")):
            for record in sections.get(section, {}).get("records", []):
                if record["key"] == "best" and record.get(unit):
                    known[unit][section] = record[unit]
        for record in sections.get("engine", {}).get("records", []):
            if "output_tokens_s" in record:
                known["output_tokens_s"][record["key"]] = record["output_tokens_s"]
        for name, rates in DATASHEET.items():
            if f" {name}" in kind:  # the leading space keeps a GH200 from matching H200
                for unit, rate in rates.items():
                    known[unit]["datasheet"] = rate
        return known


def _rewrite(path: pathlib.Path, text: str) -> None:
    """Replace a file atomically, so that readers never see a partial write."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def git_state() -> dict[str, Any]:
    """Return the commit and whether the tree differs from it, or a reason where there is no repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError) as error:
        return {"commit": None, "reason": str(error)[:200]}


def run_section(
    name: str,
    quick: bool,
    limits: Mapping[str, Any],
    part: pathlib.Path,
    autotuned: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Run one section in its own processes; return the records from ``part`` and the status of the last process."""
    limit, patience, start = _limit(name, quick), _limit(name, quick, "patience"), time.monotonic()
    part.unlink(missing_ok=True)
    journal = Journal(part)
    with tempfile.TemporaryDirectory() as folder:
        log, environment = pathlib.Path(folder, "log"), _environment(name, folder, autotuned)
        command = [*COMMAND, "--section", name, "--records", str(part), "--limits", json.dumps(limits)]

        def child(left: float, alone: bool) -> subprocess.Popen[bytes]:
            more = ["--left", str(left), *["--quick"] * quick, *["--alone"] * alone]
            with log.open("ab") as stderr:
                return subprocess.Popen(
                    command + more, cwd=ROOT, env=environment, stderr=stderr, start_new_session=True
                )

        condemn = functools.partial(_condemn, journal)
        ended = supervise(child, journal, seconds=limit, patience=patience, condemn=condemn)
        section = {"status": _status(ended), "seconds": round(time.monotonic() - start, 1), "limit_seconds": limit}
        if ended.why:
            section["stderr"] = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    for step in journal.progress().running:
        _fail(journal, step, error="it ran when the section was stopped")
    return {**section, "records": read_records(part)}


def _status(ended: Ended) -> str:
    """Return "ok", "stopped after N s" or "failed (...)"."""
    return ended.why if ended.why.startswith("stopped") else f"failed ({ended.why})" if ended.why else "ok"


def _condemn(journal: Journal, step: str, ended: Ended) -> None:
    hung = {"hung": True} if ended.code is None else {}
    _fail(journal, step, ok=False, **hung, error=ended.fault)


def _fail(journal: Journal, step: str, **fields: Any) -> None:
    """Write a record of a failed step. Fields that the step wrote before it failed are kept."""
    found = next((each for each in read_records(journal.path) if each["key"] == step), {"key": step})
    if "error" not in found:
        journal.put(**{**found, **fields})


def _environment(name: str, folder: str, autotuned: pathlib.Path | None) -> dict[str, str]:
    """Return the environment of a section's process: nearly all GPU memory for the 8B step, where JAX would preallocate
    less. ``folder`` becomes TMPDIR, so that temporary files of a killed process are deleted with it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if autotuned is not None:
        flags += f" --xla_gpu_dump_autotune_results_to={autotuned}"
    memory = str(BY_NAME[name].memory)
    return {
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": memory,
        "XLA_FLAGS": flags.strip(),
        "TMPDIR": folder,
    }


def _limit(name: str, quick: bool, of: str = "seconds") -> float:
    return float(getattr(BY_NAME[name], of)) * (QUICK_PATIENCE if quick else 1)


def section_main(arguments: argparse.Namespace) -> None:
    """Run one section in this (child) process."""
    standins.provide()
    module, _, function = BY_NAME[arguments.section].module.partition(":")
    report = Report(
        pathlib.Path(arguments.records),
        seconds=arguments.left - 5,
        quick=arguments.quick,
        limits=json.loads(arguments.limits),
        alone=arguments.alone,
        answers=importlib.import_module("jaxinfer.gpu_check.device").answers,
    )
    getattr(importlib.import_module(module), function or "run")(report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("check-gpu", argv)


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 0; 1: a section failed or has a wrong result; 2: there is no GPU to measure."""
    if arguments.section:
        section_main(arguments)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a running section is ended, too
    with tempfile.TemporaryDirectory() as folder:
        first = run_section("device", arguments.quick, {}, pathlib.Path(folder, "device"))
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
            part = results.part(name)
            results.put(name, run_section(name, arguments.quick, results.limits(), part, results.autotuned(name)))
            part.unlink(missing_ok=True)
    return summary(results, arguments.only)


def summary(results: Results, names: Sequence[str]) -> int:
    """Print the status of each section, and the figures with their goals; return 1 if a section failed, a result is
    wrong or a figure is below its floor."""
    sections = {name: results.content["sections"][name] for name in names}
    for name, section in sections.items():
        print(f"{name:8} {section['status']:24} {section['seconds']:6.1f} s")
    wrong = [
        record["key"] for section in sections.values() for record in section["records"] if record.get("ok") is False
    ]
    for key in wrong:
        print(f"WRONG: {key}")
    kind = results.content["device"]["kind"]
    found = [] if results.content["quick"] else verdicts(sections, kind)
    for verdict in found:
        print(verdict)
    if not results.content["quick"] and not has_times(kind):
        print(no_times(kind))
    below = [verdict for verdict in found if verdict.word == "below floor"]
    print(results.content.get("note", ""), results.path, results.path.with_suffix(".md"), sep="\n")
    return int(bool(wrong or below) or any(section["status"] != "ok" for section in sections.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("jaxinfer check-gpu", _ABOUT, ("jaxinfer check-gpu --only parity,demo",), ("only", "out", "quick"))
    group = parser.add_argument_group("sections and output")
    sections = f"sections to run, of {', '.join(NAMES)} (default: {', '.join(UNASKED)})"
    group.add_argument("--only", type=_names, default=UNASKED, metavar="NAME,...", help=sections)
    group.add_argument("--out", default=str(_results()), metavar="DIR", help="folder of the results")
    group.add_argument("--quick", action="store_true", help="smoke test with tiny sizes, also without a GPU")
    for hidden in ("--section", "--records", "--limits"):
        group.add_argument(hidden, help=argparse.SUPPRESS)
    group.add_argument("--left", type=float, help=argparse.SUPPRESS)
    group.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments: argparse.Namespace = parser.parse_args(argv)
    return arguments


def _results() -> pathlib.Path:
    """Return the results folder: ``benchmarks/results`` of a checkout, else ``gpu_check`` in the current directory."""
    kept = ROOT / "benchmarks" / "results"
    return kept if kept.is_dir() else pathlib.Path("gpu_check")


def _names(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        said = f"unknown section {', '.join(unknown)}; known: {', '.join(NAMES)}"
        raise argparse.ArgumentTypeError(said + ("" if (ROOT / BENCHMARKS).is_dir() else f"; {_ELSEWHERE}"))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
