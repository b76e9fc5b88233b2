"""Programs traced with the path choices of a GPU and run on this machine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import jax

from jaxinfer.layers import top_k
from jaxinfer.quant import storage
from jaxinfer.sampling import reductions, search
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.grouped_matmul import groups

_CHOOSERS: tuple[ModuleType, ...] = (
    top_k,
    search,
    reductions,
    groups,
    storage,
)  # modules whose every path XLA can compile


def as_for_gpu(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Jit ``function`` (not jitted yet), traced as for a GPU. ``options`` are those of `jax.jit`."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        with contextlib.ExitStack() as patches:
            for module in _CHOOSERS:
                patches.enter_context(mock.patch.object(module, "lowering_target", return_value=Target("gpu", HOPPER)))
            return function(*arguments)

    return jax.jit(traced, **options)
