"""Bytes exchanged between devices in a decode step, read from the compiled program."""

from __future__ import annotations

import argparse
import collections
import math
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.mesh.models import EXPERTS, model
from jaxinfer.engine.distributed.replicas import Replicas
from jaxinfer.llm import LLM

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_RESULT = re.compile(rf"= (\(.*?\) |\S+ )({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "u16": 2, "pred": 1, "s8": 1, "u8": 1}
_ROWS, _LAYERS = 16, 4
_SETTINGS: dict[str, Any] = {"max_model_len": 256, "page_size": 64, "prefill_sizes": (64,)}
_SIZES: tuple[dict[str, int], ...] = (
    {"tensor": 2},
    {"tensor": 4},
    {"expert": 4},
    {"expert": 4, "tensor": 2},
    {"dp_attn": 4},
    {"pipeline": 2, "tensor": 2},
)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Count the bytes of the collectives' results on a device and of stage transfers, by mesh.

    A token's hidden state is ``hand_over`` bytes. Ranks of data-parallel attention have as many rows together
    as the other meshes, each its own; one ``dp_attn``-th of what they exchange is a device's own data and
    is not transferred.
    """
    del options
    return [_row(sizes) for sizes in _SIZES]


def collective_bytes(program: str) -> collections.Counter[str]:
    """Count the bytes of each kind of collective's results on a device."""
    found: collections.Counter[str] = collections.Counter()
    for result, kind, starts in _RESULT.findall(program):
        arrays = list(_arrays(result))
        found[kind] += arrays[0] if starts else sum(arrays)  # the tuple of a *-start op includes its operands
    return found


def _arrays(result: str) -> Iterator[int]:
    for dtype, shape in _ARRAY.findall(result):
        yield _BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size)


def _row(sizes: dict[str, int]) -> dict[str, Any]:
    mixture = {"expert", "dp_attn"} & sizes.keys()
    cut = model(num_hidden_layers=_LAYERS, **(EXPERTS if mixture else {}))
    ranks = sizes.get("dp_attn", 1)
    settings: dict[str, Any] = {f"{name}_parallel_size": size for name, size in sizes.items() if name != "dp_attn"}
    if ranks > 1:
        settings |= {"expert_parallel_size": ranks, "enable_dp_attention": True}
    engine = LLM(cut, compilation_cache_dir="", max_num_seqs=_ROWS // ranks, **_SETTINGS, **settings).engine
    found: collections.Counter[str] = collections.Counter()
    for program in _decode_programs(engine):
        found.update(collective_bytes(program.as_text()))
    rows, state = engine.config.rows // engine.config.microbatches, cut.config.hidden_size * cut.dtype.itemsize
    row: dict[str, Any] = {"mesh": sizes, "rows": rows, "layers": _LAYERS, "bytes": dict(found)}
    row["hand_over"] = rows * state * (sizes.get("pipeline", 1) - 1)
    print(f"{sizes}: {row['bytes']}, handed over {row['hand_over']}")
    return row


def _decode_programs(engine: Any) -> list[Any]:
    if isinstance(engine, Replicas):
        assert engine.lockstep is not None
        return [engine.lockstep.programs.decode]
    return [part.run.widest_decode for part in engine._executor.runtimes]
