"""Bytes that devices tell each other in a decode step, read from the compiled program."""

from __future__ import annotations

import argparse
import collections
import math
import re
from typing import Any

from benchmarks.mesh.models import EXPERTS, model
from jaxinfer.engine.replicas import Replicas
from jaxinfer.llm import LLM

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_RESULT = re.compile(rf"= \(?(\w+)\[([\d,]*)\]\S* ({_KINDS})(?:-start)?\(")
_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}
_ROWS, _LAYERS = 16, 4
_SETTINGS: dict[str, Any] = {"max_num_seqs": _ROWS, "max_model_len": 256, "page_size": 64, "prefill_sizes": (64,)}
_SIZES: tuple[dict[str, int], ...] = (
    {"tensor": 2},
    {"tensor": 4},
    {"expert": 4},
    {"expert": 4, "tensor": 2},
    {"pipeline": 2, "tensor": 2},
)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each mesh, the bytes of the arrays that a step's collectives make on a device, and what stages hand over.

    A token's hidden state is ``hand_over`` bytes. All-to-all: none, as tokens are on every device of a replica; what it
    would carry instead of the sums over experts is each token's state to every device that has one of its experts, and
    back: ``all_to_all_instead``, for as many devices as it reaches on average.
    """
    del options
    return [_row(sizes) for sizes in _SIZES]


def _row(sizes: dict[str, int]) -> dict[str, Any]:
    changes = EXPERTS if "expert" in sizes else {}
    own = model(num_hidden_layers=_LAYERS, **changes)
    settings: dict[str, Any] = {f"{name}_parallel_size": size for name, size in sizes.items()}
    engine = LLM(own, compilation_cache_dir="", **_SETTINGS, **settings).engine
    assert not isinstance(engine, Replicas)
    found: collections.Counter[str] = collections.Counter()
    for part in engine._executor.parts:
        program: Any = part.run.decode
        for dtype, shape, kind in _RESULT.findall(program.as_text()):
            found[kind] += _BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size)
    rows, state = engine.config.rows // engine.config.turns, own.config.hidden_size * own.dtype.itemsize
    row: dict[str, Any] = {"mesh": sizes, "rows": rows, "layers": _LAYERS, "bytes": dict(found)}
    row["hand_over"] = rows * state * (len(engine._executor.parts) - 1)
    if "expert" in sizes:
        reached = sizes["expert"] * (1 - (1 - 1 / sizes["expert"]) ** EXPERTS["num_experts_per_tok"])
        row["all_to_all_instead"] = round(2 * rows * state * reached / sizes["expert"] * _LAYERS)
    print(
        f"{sizes}: {row['bytes']}, handed over {row['hand_over']}, {row.get('all_to_all_instead', '-')} by all-to-all"
    )
    return row
