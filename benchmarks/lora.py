"""LoRA adapters on this machine: their cost per step, and the cost of loading adapters during steps.

    python benchmarks/lora.py cost    tokens a second of 32 sequences of a random Llama of 125M parameters, in turns: 8
                                      adapters of rank 16 mixed, one for all, and none on an engine with LoRA,
                                      each over an engine without LoRA
    python benchmarks/lora.py load    time to read an adapter, and the longest steps of 32 sequences while others are
                                      read and written to the device, over the median of those steps

Adapters are random and cover all linear modules of all layers. See docs/lora.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from safetensors.numpy import save_file

from benchmarks.kv_dtypes import random_llama
from benchmarks.peers import machine
from benchmarks.peers.random_model import LLAMA_125M
from benchmarks.speculation import error_of_median
from benchmarks.traces import record
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import LoRARef, Request

_ADAPTERS = 8
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status."""
    options, quiet = parse(arguments), record.Quiet()
    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        found = WAYS[options.way](options, pathlib.Path(folder))
    cores = len(machine.usable_cores())
    result = record.base(options, cores, quiet.others(cores)) | {"rows": found}
    print("\n".join([*map(json.dumps, found), *record.doubts(result)]))
    if options.out is not None:
        record.keep(result, options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("way", choices=WAYS)
    add("--sequences", type=int, default=32, help="at once (default 32)")
    add("--rank", type=int, default=16, help="of adapters (default 16)")
    add("--max-tokens", type=int, default=64, help="of an answer (default 64)")
    add("--rounds", type=int, default=8, help="turns (default 8)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model (default float32)")
    add("--out", type=pathlib.Path, help="JSON file (default: none)")
    return parser.parse_args(arguments)


def cost(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Measure tokens a second of each way, in turns."""
    model = random_llama(options.dtype)
    base, lora = engine(model, options, enable_lora=False), engine(model, options, enable_lora=True)
    assert lora.engine.loras is not None
    loras = [lora.engine.loras.load(f"a{each}", written(folder, each, options.rank)) for each in range(_ADAPTERS)]
    ways: dict[str, tuple[LLM, Sequence[LoRARef | None]]] = {
        "base": (base, [None]),
        "unused": (lora, [None]),
        "one": (lora, loras[:1]),
        "mixed": (lora, loras),
    }
    speeds = list[dict[str, float]]()
    for turn in range(options.rounds + 1):
        order = list(ways) if turn % 2 else list(reversed(ways))
        speeds.append({name: speed(*ways[name], options) for name in order})
    medians = {name: statistics.median(each[name] for each in speeds[1:]) for name in ways}
    found: dict[str, Any] = {"sequences": options.sequences, "rank": options.rank, "tokens_per_second": medians}
    for name in ("unused", "one", "mixed"):
        ratios = [each[name] / each["base"] for each in speeds[1:]]
        found[name] = {"ratio": statistics.median(ratios), "error": error_of_median(ratios)}
    return [found]


def engine(model: Model, options: argparse.Namespace, *, enable_lora: bool) -> LLM:
    given: dict[str, Any] = {"max_num_seqs": options.sequences, "max_model_len": 512, "show_progress": False}
    if enable_lora:
        given |= {"enable_lora": True, "max_loras": _ADAPTERS, "max_lora_rank": options.rank, "max_cpu_loras": 64}
    return LLM(model, **given)


def speed(llm: LLM, loras: Sequence[LoRARef | None], options: argparse.Namespace) -> float:
    """Return tokens a second of sequences that decode together, from the step in which the last one has started."""
    steps = list(decoding(llm, loras, options.sequences, options.max_tokens))
    return options.sequences / statistics.mean(steps)


def decoding(llm: LLM, loras: Sequence[LoRARef | None], count: int, length: int) -> Iterator[float]:
    """Yield the seconds of each step in which all sequences decode."""
    core = llm.engine
    core.reset_prefix_cache()
    # Adapters are copied one layer per step: sequences with resident adapters decode until all have started.
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=length + 400, ignore_eos=True)
    for number, lora in zip(range(count), itertools.cycle(loras), strict=False):
        core.add(Request(f"{number}", tuple(range(10 + number, 26 + number)), params, lora=lora))
    begun, last, left = set[str](), 0.0, length
    while left:
        deltas = core.step()
        now = time.perf_counter()
        if len(begun) == count and len(deltas) == count:
            if last:
                yield now - last
                left -= 1
            last = now
        begun |= {delta.request_id for delta in deltas}
    for number in range(count):
        core.abort(f"{number}")
    while core.has_work:
        core.step()


def load(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Measure adapter reads, and steps while adapters are loaded and evicted: each request has a different one."""
    llm = engine(random_llama(options.dtype), options, enable_lora=True)
    store = llm.engine.loras
    assert store is not None
    paths = [written(folder, each, options.rank) for each in range(3 * _ADAPTERS)]
    reads, loras = list[float](), list[LoRARef]()
    for number, path in enumerate(paths):
        begin = time.perf_counter()
        loras.append(store.load(f"a{number}", path))
        reads.append(time.perf_counter() - begin)
    size = sum(file.stat().st_size for file in pathlib.Path(paths[0]).iterdir())
    quiet = list(decoding(llm, loras[:1], options.sequences, options.max_tokens))
    busy = list(_while_loading(llm, loras, options))
    steps = {"median": statistics.median(busy), "longest": max(busy), "without_loads": statistics.median(quiet)}
    return [
        {"bytes": size, "load_ms": 1e3 * statistics.median(reads), "longest_load_ms": 1e3 * max(reads)}
        | {f"step_ms_{name}": 1e3 * value for name, value in steps.items()}
        | {"longest_over_median": steps["longest"] / steps["median"], "steps": len(busy)}
    ]


def _while_loading(llm: LLM, loras: Sequence[LoRARef], options: argparse.Namespace) -> Iterator[float]:
    """Yield the seconds of steps of long sequences, while short requests each load an adapter that is not resident."""
    core, cycle, numbers = llm.engine, itertools.cycle(loras), itertools.count()
    core.reset_prefix_cache()
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=8 * options.max_tokens, ignore_eos=True)
    short = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    count = options.sequences - 1
    for number in range(count):
        core.add(Request(f"long{number}", (10 + number, 9), long))
    begun, beside, last, steps = set[str](), False, 0.0, 0
    while steps < 4 * options.max_tokens:
        if len(begun) == count and not beside:
            core.add(Request(f"short{next(numbers)}", (9,), short, lora=next(cycle)))
            beside = True
        deltas = core.step()
        now = time.perf_counter()
        beside = beside and not any(d.finish_reason and d.request_id.startswith("short") for d in deltas)
        if len(begun) == count:
            if last:
                yield now - last
            last, steps = now, steps + 1
        begun |= {delta.request_id for delta in deltas if delta.request_id.startswith("long")}
    for number in range(count):
        core.abort(f"long{number}")
    while core.has_work:
        core.step()


def written(folder: pathlib.Path, number: int, rank: int) -> str:
    """Write an adapter in PEFT's format; return its folder."""
    here, draw = folder / f"{number}", np.random.default_rng(number)
    here.mkdir()
    arrays = dict[str, np.ndarray]()
    for name, (inputs, outputs) in _shapes().items():
        arrays[f"base_model.model.{name}.lora_A.weight"] = draw.normal(0, 0.02, (rank, inputs)).astype(np.float32)
        arrays[f"base_model.model.{name}.lora_B.weight"] = draw.normal(0, 0.02, (outputs, rank)).astype(np.float32)
    save_file(arrays, here / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_TARGETS)}
    (here / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(here)


def _shapes() -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of each adapted module."""
    width, hidden = LLAMA_125M["hidden_size"], LLAMA_125M["intermediate_size"]
    head = width // LLAMA_125M["num_attention_heads"]
    keys = head * LLAMA_125M["num_key_value_heads"]
    sizes = [
        (width, width),
        (width, keys),
        (width, keys),
        (width, width),
        (width, hidden),
        (width, hidden),
        (hidden, width),
    ]
    rooms = [room for room, count in (("self_attn", 4), ("mlp", 3)) for _ in range(count)]
    layers = range(LLAMA_125M["num_hidden_layers"])
    named = list(zip(rooms, _TARGETS, sizes, strict=True))
    return {f"model.layers.{layer}.{room}.{name}": size for layer in layers for room, name, size in named}


WAYS: dict[str, Callable[[argparse.Namespace, pathlib.Path], list[dict[str, Any]]]] = {"cost": cost, "load": load}

if __name__ == "__main__":
    sys.exit(main())
