"""Sections of the GPU check: what each runs, its limits, and the columns of its table.

An installed package has the sections that tell whether a GPU computes correctly. A checkout adds the benchmarks
(`benchmarks.gpu.sections`).
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARKS = "benchmarks/gpu"  # folder of a checkout


class Section(NamedTuple):
    """A section of the check.

    Attributes:
        module: module or module:function; without a function, `run` of the module.
        seconds: time limit of the whole section.
        patience: seconds without output after which a step counts as hung; compilation is included.
        memory: fraction of GPU memory that JAX preallocates; peers need memory for their own libraries.
        asked: False: the section runs only if ``--only`` names it.
        columns: columns of its table besides the key. A record without any of them gets its own line.
    """

    name: str
    module: str
    seconds: float
    patience: float = 60
    memory: float = 0.92
    asked: bool = True
    columns: Sequence[str] = ()


_PARITY = ("ok", "worst_vector", "bound", "same_bits_twice", "same_bits_reversed", "same_bits_alone")
TIMES = ("best_ms", "gb_s", "share_of_copy", "tflop_s", "share_of_gemm")
_IDENTITY = ("ok", "requests", "recompute", "swap")
_AGREE = ("ok", "same_bits_decoded", "same_bits_as_drafts", "promised", "tokens", "largest", "kl")
_HERE = "jaxinfer.gpu_check"
# Engine startup may wait a minute for a kernel on trial that hangs, so a section that starts an engine has a longer
# patience.
CHECKS = (
    Section("device", f"{_HERE}.device", 10),
    Section("parity", f"{_HERE}.parity", 75, patience=20, columns=_PARITY),
    Section("kernels", f"{_HERE}.kernels", 80, patience=20, columns=TIMES),
    Section("demo", f"{_HERE}.demo", 45, columns=("seconds", "tokens", "equal_tokens")),
    Section("parity-all", f"{_HERE}.parity:run_all", 300, patience=30, asked=False, columns=_PARITY),
    Section("identity", f"{_HERE}.identity", 200, patience=120, asked=False, columns=_IDENTITY),
    Section("agree", f"{_HERE}.agree", 300, patience=120, asked=False, columns=_AGREE),
)


def all_sections(root: pathlib.Path = ROOT) -> tuple[Section, ...]:
    """Return the sections in execution order, with those of the benchmarks if ``root`` is a checkout."""
    if not (root / BENCHMARKS).is_dir():
        return CHECKS
    if str(root) not in sys.path:  # an editable installation finds the packages of the wheel alone
        sys.path.append(str(root))
    found: tuple[Section, ...] = importlib.import_module(f"{BENCHMARKS.replace('/', '.')}.sections").SECTIONS
    return found
