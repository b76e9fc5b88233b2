"""Operands for launches, random and valid, small enough to fit next to a model: by op, from the shapes of a program.

Pools, and stacks of experts, have the size that a launch needs, not that of the engine: a kernel finds pages, states
and experts by their index.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.launches import Launch
from pallas_kernels.operands import Case, Draw
from pallas_kernels.specs import specs_of


def case_of(launch: Launch, seed: Any) -> Case:
    """Make the operands of a launch; traceable, so that a program makes them on the device."""
    case: Case = specs_of(launch.op).trial_case(Draw(seed), *launch.operands, **launch.options)
    return case
