"""Section agree: is attention of a position bitwise identical in decode, in a prefill chunk and with draft tokens? Are
log-probabilities of a trainer those of the engine (`on_policy`)?

The kernels accumulate the same sums in the same order (docs/kernels.md, "Which programs of a GPU agree in their bits"),
provided that an element of a product depends neither on the order of the operands nor on the number of columns. Cases
that the kernels do not promise are reported, too: 8-bit pools, and wide heads on Hopper.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check import on_policy
from jaxinfer.gpu_check.attention import EVERY
from jaxinfer.gpu_check.report import Report
from pallas_kernels import paged_attention
from pallas_kernels.check.cases import Case, attention_case
from pallas_kernels.choice import HOPPER, lowering_target

_DRAFTS = 4  # draft tokens that are verified at once
# Name, arguments of the case, and whether bitwise identity is promised if a kernel runs both.
CASES: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("heads of 128, bfloat16", {"page": 64, "head_dim": 128}, True),
    ("heads of 64, bfloat16, every option", {"page": 32, **EVERY}, True),
    ("heads of 128, float16", {"page": 64, "head_dim": 128, "dtype": jnp.float16}, False),
    ("heads of 256, bfloat16", {"page": 64, "head_dim": 256}, False),
    ("int8 per head", {"page": 64, "head_dim": 128, "pool_dtype": jnp.int8, "scales": "head"}, False),
)


def run(report: Report) -> None:
    lengths: dict[str, Any] = {"lengths": (2000,), "counts": (1000,)}
    if report.quick:
        lengths = {"lengths": (70,), "counts": (20,)}
    for name, options, promised in CASES:
        if report.wanted(name):
            with report.attempt(name):
                report.put(name, **_compared(attention_case(**lengths, **options), promised))
    on_policy.run(report)


def _compared(case: Case, promised: bool) -> dict[str, Any]:
    chunk, start = case.q.shape[1], int(case.starts[0]) if case.starts is not None else 0
    places = np.unique(np.linspace(0, chunk - _DRAFTS, 64, dtype=np.int32))
    q, pool, tables = (jnp.asarray(each) for each in (case.q[0], case.pool, case.tables))
    table, at = jnp.repeat(tables, len(places), 0), jnp.asarray(start + places, jnp.int32)
    whole = np.asarray(jax.jit(paged_attention.prefill)(*case.arrays, case.options))[0]
    alone = jax.jit(paged_attention.decode)(q[places], pool, table, at + 1, case.options)
    several = q[places[:, None] + np.arange(_DRAFTS)]
    drafts = jax.jit(paged_attention.prefill)(several, pool, table, at, at + _DRAFTS, case.options)
    same = {
        "same_bits_decoded": np.asarray(alone).tobytes() == whole[places].tobytes(),
        "same_bits_as_drafts": np.asarray(drafts).tobytes() == whole[places[:, None] + np.arange(_DRAFTS)].tobytes(),
    }
    capability = lowering_target().capability
    holds = capability is not None and (promised or (capability < HOPPER and case.pool.dtype == case.q.dtype))
    kernels = paged_attention.explain_decode(q[places], pool, table, at + 1, case.options).path == "mosaic"
    expected = bool(holds and kernels)
    return {**same, "promised": expected, "ok": all(same.values()) or not expected}
