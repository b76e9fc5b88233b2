"""Runs of launch programs in subprocesses: a program that hangs or dies is named, and the others still run."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.launches import Launch
from pallas_kernels.trial.program import exported

_log = logging.getLogger("jaxinfer.start")
_JOBS = 8  # threads that compile ahead of the running program
_ROOT = pathlib.Path(__file__).parents[2]
_NO_MEMORY = "RESOURCE_EXHAUSTED"
# The parent process has already taken most of the GPU's memory.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


class Patience(NamedTuple):
    """Seconds that a process may take to start, and a program to be compiled and to run."""

    start: float = 180.0
    compile: float = 300.0
    run: float = 60.0

    def of(self, state: str) -> float:
        return {"": self.start, "compiling": self.compile}.get(state, self.run)


class Verdict(NamedTuple):
    """The outcome of a program. ``fault``: the kernel's fault in one sentence, None: none. ``untried``: the reason why
    it could not be run, if the kernel is not to blame."""

    fault: str | None = None
    untried: str | None = None


_KNOWN: dict[str, Verdict] = {}  # verdicts of launches that this process has tried, by their keys


def verdicts_of(launches: Mapping[str, Launch], patience: Patience | None = None) -> dict[str, Verdict]:
    """Try launches on JAX's default device; a launch is tried once in the life of a process."""
    programs, backend = dict[str, bytes](), jax.default_backend()
    names = {key: f"{number}" for number, key in enumerate(key for key in launches if key not in _KNOWN)}
    for key, name in names.items():
        try:
            programs[name] = exported(launches[key], {"gpu": "cuda"}.get(backend, backend))
        except (ValueError, NotImplementedError) as error:
            _KNOWN[key] = Verdict(fault=f"does not compile: {(str(error).splitlines() or [''])[0]}")
    found = run(programs, backend, patience) if programs else {}
    _KNOWN.update({key: found[name] for key, name in names.items() if name in found})
    return {key: _KNOWN[key] for key in launches}


def faults_of(launches: Mapping[str, Launch], patience: Patience | None = None) -> dict[str, str]:
    """Return the kernels' faults in these launches on JAX's default device, by op, the first fault of each."""
    faults = dict[str, str]()
    for key, verdict in verdicts_of(launches, patience).items():
        if verdict.fault is not None:
            faults.setdefault(launches[key].op, f"{launches[key]}: it {verdict.fault}")
        elif verdict.untried is not None:
            _log.warning("kernel %s was not tried on this GPU: %s", launches[key], verdict.untried)
    return faults


class _End(NamedTuple):
    """The last state that a process reported before it exited or was killed."""

    state: str
    name: str
    why: str


def run(programs: Mapping[str, bytes], platform: str, patience: Patience | None = None) -> dict[str, Verdict]:
    """Run all programs of `program.exported`, by name, on a platform as named by `jax.default_backend`; return their
    verdicts.

    A process that hangs or dies costs the current program: the next process begins after it. If one dies while several
    threads compile, the next one compiles one program at a time, so that the right one is named. If no process can
    start, nothing is tried.
    """
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs.items():
            pathlib.Path(folder, name).write_bytes(program)
        jobs = _JOBS
        while waiting := [name for name in programs if name not in verdicts]:
            end = _process([platform, folder, str(jobs), *waiting], patience or Patience(), verdicts)
            if end is None:
                break
            if end.state == "":
                return verdicts | dict.fromkeys(waiting, Verdict(untried=end.why))
            if end.state == "compiling" and jobs > 1:
                jobs = 1
            elif end.name not in verdicts:
                verdicts[end.name] = Verdict(fault=end.why)
    return verdicts


def _process(arguments: Sequence[str], patience: Patience, verdicts: dict[str, Verdict]) -> _End | None:
    """Run one process and store its results in ``verdicts``. Return None if it completed, else how it ended."""
    command = [sys.executable, "-m", "pallas_kernels.trial", *arguments]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        try:
            return _followed(process, patience, verdicts, said)
        finally:
            process.kill()
            process.wait()


def _followed(process: Any, patience: Patience, verdicts: dict[str, Verdict], said: Any) -> _End | None:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), name="kernel-trial", daemon=True).start()
    state, name = "", ""
    while True:
        try:
            line = lines.get(timeout=patience.of(state))
        except queue.Empty:
            return _End(state, name, f"did not come back within {patience.of(state):.0f} s")
        if line is None:
            code = process.wait()
            if code == 0 and state in ("done", "refused", "started"):
                return None
            said.seek(0)
            last = " ".join(said.read().strip().splitlines()[-3:])[-500:]
            return _End(state, name, f"ended its process with exit code {code}: {last}")
        given = json.loads(line)
        state, name = given["state"], given["name"]
        if (verdict := _verdict(given)) is not None:
            verdicts[name] = verdict


def _read(stream: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        if line.startswith('{"state"'):  # libraries write to standard output, too
            lines.put(line)
    lines.put(None)


def _verdict(given: Mapping[str, Any]) -> Verdict | None:
    why = (str(given.get("why", "")).strip().splitlines() or [""])[0]
    match given["state"]:
        case "done":
            error = given["error"]
            return Verdict() if error <= 1 else Verdict(fault=f"is wrong: {error:.3g} times the error that is allowed")
        case "refused" | "failed" if _NO_MEMORY in why:
            return Verdict(untried=why)
        case "refused":
            return Verdict(fault=f"does not compile: {why}")
        case "failed":
            return Verdict(fault=f"failed on the device: {why}")
    return None
