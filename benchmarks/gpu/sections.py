"""All sections of `jaxinfer check-gpu` in a checkout, in execution order: the checks of the package, and benchmarks."""

from __future__ import annotations

from jaxinfer.gpu_check.sections import CHECKS, TIMES, Section

_HERE = "benchmarks.gpu"
_ENGINE = ("output_tokens_s", "all_tokens_s", "step_ms", "share_of_copy", "seconds_to_first_token", "seconds_to_start")
_STEP = (
    *("best_ms", "tokens_s", "share_of_copy", "share_of_gemm"),
    *("kernels_of_mosaic", "pool_copies", "page_out_ms", "page_in_ms"),
)
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_SERVER = ("ok", "output_tokens_s", "of_engine", *_LATENCIES, "seconds_to_ready", "seconds_to_start")
_CHECK = {section.name: section for section in CHECKS}
# The default sections together take less than ten minutes.
SECTIONS = (
    _CHECK["device"],
    Section("copy", f"{_HERE}.bandwidth", 15, columns=("gb_s", "best_ms")),
    Section("gemm", f"{_HERE}.gemm", 25, columns=("tflop_s", "best_ms", "relative_error")),
    _CHECK["parity"],
    _CHECK["kernels"],
    Section("step", f"{_HERE}.step", 110, patience=40, columns=_STEP),
    Section("engine", f"{_HERE}.throughput", 100, patience=90, columns=_ENGINE),
    Section("relaxed", f"{_HERE}.throughput:run_relaxed", 90, patience=80, columns=_ENGINE),
    _CHECK["demo"],
    Section("peers", f"{_HERE}.peers", 40, patience=20, memory=0.05, columns=TIMES),
    _CHECK["parity-all"],
    _CHECK["identity"],
    Section("formats", f"{_HERE}.formats", 400, patience=120, asked=False, columns=_ENGINE),
    Section("rows", f"{_HERE}.rows", 90, patience=30, asked=False, columns=("classes", "row_depends_on_slot_at")),
    _CHECK["agree"],
    Section("server", f"{_HERE}.server", 400, patience=200, asked=False, columns=_SERVER),
)
