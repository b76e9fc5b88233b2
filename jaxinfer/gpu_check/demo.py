"""Section demo: greedy tokens of the embedded model on this device, compared with the tokens on CPU.

Each run is a separate process (`jaxinfer.gpu_check.greedy`), because JAX fixes its platform at first use.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from jaxinfer.gpu_check.greedy import DEMO, missing_for_llm
from jaxinfer.gpu_check.report import Report

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS, QUICK_TOKENS = 128, 8


def run(report: Report) -> None:
    if not (DEMO / "config.json").is_file():
        report.put("greedy", skipped=f"{DEMO.relative_to(ROOT)} holds no model")
        return
    if missing := missing_for_llm():
        report.put("text", skipped=f"not installed: {', '.join(missing)}; token ids only, through the engine")
    if report.wanted("float32"):
        with report.attempt("float32"):
            _beside_the_cpu(report)
    if report.wanted("bfloat16") and not report.quick:
        with report.attempt("bfloat16"):
            report.put("bfloat16", **_finish(_start("bfloat16", TOKENS), report.left()))


def _beside_the_cpu(report: Report) -> None:
    if report.quick:
        report.put("float32", **_finish(_start("float32", QUICK_TOKENS), report.left()))
    else:
        on_device, on_cpu = _start("float32", TOKENS), _start("float32", TOKENS, JAX_PLATFORMS="cpu")
        ours = _finish(on_device, report.left())
        report.put("float32", **ours)
        theirs = _finish(on_cpu, report.left())
        report.put("float32, CPU", **theirs)
        report.put("comparison", tokens=TOKENS, equal_tokens=_common(ours["token_ids"], theirs["token_ids"]))


def _start(dtype: str, tokens: int, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxinfer.gpu_check.greedy", dtype, str(tokens)]
    surroundings, pipe = {**os.environ, **environment}, subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=surroundings, text=True, stdout=pipe, stderr=pipe)


def _finish(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        process.kill()
        raise RuntimeError(f"no result within {seconds:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {err.strip()[-400:]}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def _common(a: list[int], b: list[int]) -> int:
    """Count the tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
