"""Section server: `jaxinfer.serve` as users start it, at the 8B shape, under the load generator of `jaxinfer.bench`.

The section starts the server twice, with an empty compilation cache and with the cache that the first start filled; the
first server gets the loads, over gRPC. Both are separate processes, and this process leaves the GPU to them. Where
their packages are not installed, the engine alone is started twice.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.throughput import QUICK_LOADS, title
from benchmarks.gpu_peers.loads import Load, parse_loads
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY
from jaxinfer.gpu_check.report import Report

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Section engine has the same loads.
LOADS = parse_loads("64x512+256,1x512+256,256x512+256,8x512+256")
# Packages that server and load generator import in addition to those of gpu_check.
NEEDED = (
    *("grpcio", "protobuf", "grpcio-health-checking", "grpcio-reflection", "googleapis-common-protos"),
    *("fastapi", "fastapi-swagger", "starlette", "uvicorn", "httptools", "pydantic", "pyyaml"),
    *("tokenizers", "sentencepiece", "jinja2", "llguidance", "huggingface_hub", "orbax-checkpoint", "tensorstore"),
    *("prometheus_client", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc", "rich"),
    *("jaxtyping", "flatbuffers", "ml_dtypes", "msgspec", "pillow"),
)
STARTS = ("cold", "warm")
_WARMUP = 2  # requests before the measured ones
_OF_GENERATOR = 3  # exit status of the load generator if it was the bottleneck
_RESERVE_S, _POLL_S, _END_S = 20.0, 0.01, 20.0
_TIMED = re.compile(r"jaxinfer\.start: (.+): ([\d.]+) s$", re.MULTILINE)


def run(report: Report) -> None:
    missing = missing_packages()
    with tempfile.TemporaryDirectory() as folder:
        if missing:
            report.put("server", skipped=f"not run: {', '.join(missing)} not installed; the engine alone is started")
            _start_engines(report, pathlib.Path(folder))
        else:
            jax.config.update("jax_platforms", "cpu")  # the GPU memory is left to the server
            _serve(report, pathlib.Path(folder))


def missing_packages() -> list[str]:
    """Return the packages of `NEEDED` that are not installed."""
    return [name for name in NEEDED if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---- the server


def _serve(report: Report, folder: pathlib.Path) -> None:
    model, loads = folder / "model", QUICK_LOADS if report.quick else LOADS
    model.mkdir()
    begun = time.perf_counter()
    written = write_checkpoint(model, TINY if report.quick else LLAMA_8B)
    report.put("checkpoint", bytes=written, seconds_to_write=round(time.perf_counter() - begun, 1))
    for start in STARTS:
        if report.time_for(f"start, {start}", _RESERVE_S):
            with report.attempt(f"start, {start}"), _started(report, start, folder, loads) as port:
                for load in loads if start == STARTS[0] else ():
                    _measure(report, port, load, folder / "figures")


@contextlib.contextmanager
def _started(report: Report, start: str, folder: pathlib.Path, loads: Sequence[Load]) -> Iterator[int]:
    """Start a server, wait until it is READY and yield its gRPC port; record the startup times."""
    log, begun = folder / f"{start}.log", time.perf_counter()
    with log.open("wb") as stderr:
        process = subprocess.Popen(_command(folder, loads), cwd=ROOT, stdin=subprocess.DEVNULL, stderr=stderr)
    try:
        port = _until_ready(process, log, report)
        seconds = round(time.perf_counter() - begun, 2)
        parts = {what: float(took) for what, took in _TIMED.findall(log.read_text(encoding="utf-8"))}
        report.put(f"start, {start}", seconds_to_ready=seconds, parts=parts)
        yield port
    finally:
        _end(process)


def _command(folder: pathlib.Path, loads: Sequence[Load]) -> list[str]:
    """Return the command with the settings of section engine; all other settings are the server's defaults."""
    longest = max(load.prompt + load.output for load in loads)
    given = {
        "model": folder / "model",
        "compilation-cache-dir": folder / "cache",
        "grpc-port": 0,
        "http-port": "off",
        "log-level": "debug",
        "max-model-len": -(-longest // 64) * 64,
        "max-num-seqs": max(load.requests for load in loads),
        "swap-space-gib": 0,
    }
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "jaxinfer.serve", *flags, "--no-enable-prefix-caching"]


def _until_ready(process: subprocess.Popen[bytes], log: pathlib.Path, report: Report) -> int:
    """Wait until the server reports ready; return its gRPC port.

    Raises:
        RuntimeError: the server exited, or was not ready within the section's time.
    """
    while process.poll() is None and report.left() > _END_S:
        said = log.read_text(encoding="utf-8", errors="replace")
        port = re.search(r"gRPC listens on port (\d+)", said)
        if port is not None and "jaxinfer.serve: ready: " in said:
            return int(port[1])
        time.sleep(_POLL_S)
    raise RuntimeError(f"the server was not ready: {log.read_text(encoding='utf-8', errors='replace')[-600:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- the load


def _measure(report: Report, port: int, load: Load, out: pathlib.Path) -> None:
    key = title(load)
    if not report.time_for(key, _RESERVE_S):
        return
    with report.attempt(key):
        figures = _figures(_generate(port, load, out, report.left()))
        engine = report.limits.get("output_tokens_s", {}).get(key)
        share = {} if engine is None else {"of_engine": round(figures["output_tokens_s"] / engine, 4)}
        report.put(key, **figures, **share)


def _generate(port: int, load: Load, out: pathlib.Path, seconds: float) -> dict[str, Any]:
    """Run the load generator with all requests at once, as in section engine; return its figures.

    Raises:
        RuntimeError: it failed, or did not finish within ``seconds``.
    """
    counts = {"concurrency": load.requests, "num-requests": load.requests, "warmup": _WARMUP}
    lengths = {"input-len": load.prompt, "output-len": load.output}
    flags = [word for name, value in (counts | lengths).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "jaxinfer.bench", "serve", "--target", f"grpc://127.0.0.1:{port}", *flags]
    try:
        done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no figures within {seconds:.0f} s") from None
    if done.returncode not in (0, _OF_GENERATOR):
        raise RuntimeError(f"the load generator ended with {done.returncode}: {done.stderr[-600:]}")
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    found: dict[str, Any] = next(line for line in lines if line["kind"] == "figures")
    return found


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the figures of the load generator to a record."""
    whole = found["completed"] == found["requests"] and not found["other_length"]
    names = ("ttft", "tpot", "itl")
    latencies = {
        f"{name}_{which}_ms": round(1e3 * found["latency"][name][which], 3)
        for name in names
        for which in ("p50", "p99")
        if found["latency"][name] is not None
    }
    return {
        "ok": whole,
        "output_tokens_s": round(found["output_tokens_per_second"], 1),
        "all_tokens_s": round(found["tokens_per_second"], 1),
        "seconds": round(found["seconds"], 3),
        **latencies,
        **({"error": str(found["error_examples"])} if found["errors"] else {}),
        **({"doubts": found["generator"]["doubts"]} if found["generator"]["doubts"] else {}),
    }


# ---- the engine alone


def _start_engines(report: Report, folder: pathlib.Path) -> None:
    for start in STARTS:
        if report.time_for(f"engine, {start}", _RESERVE_S):
            with report.attempt(f"engine, {start}"):
                report.put(f"engine, {start}", **_start_engine(folder / "cache", report))


def _start_engine(cache: pathlib.Path, report: Report) -> dict[str, Any]:
    """Run `benchmarks.gpu.start` in a separate process and return its output."""
    module = ["jaxinfer.gpu_check.standins", "benchmarks.gpu.start"]
    command = [sys.executable, "-m", *module, str(cache), *(["--quick"] if report.quick else [])]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=report.left())
    except subprocess.TimeoutExpired:
        raise RuntimeError("the engine did not start within the section's time") from None
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
