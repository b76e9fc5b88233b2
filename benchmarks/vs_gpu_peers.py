"""jaxinfer compared with vLLM and PyTorch on one GPU: the same model, loads and limits, engines in turn.

    python benchmarks/vs_gpu_peers.py                    on a GPU: the shape of Llama-3.1-8B, all installed engines
    python benchmarks/vs_gpu_peers.py --seconds 540      as much of it as fits
    python benchmarks/vs_gpu_peers.py --quick            tiny shapes, also on a CPU: does it run?
    python benchmarks/vs_gpu_peers.py --show FILE.json   the table and the picture of a record

See docs/benchmarks.md for what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.gpu_peers import device, report
from benchmarks.gpu_peers.loads import LOADS, QUICK, Load, parse_loads
from benchmarks.gpu_peers.session import Peer, Session, Task
from benchmarks.peers import machine
from benchmarks.peers.checkpoint import read_config
from benchmarks.peers.worker import REPO
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY

RESULTS = REPO / "benchmarks" / "results"
ENGINES = ("jaxinfer", "jaxinfer-relaxed", "vllm", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0; 1 if a ratio is below its floor; 2 with a message if jaxinfer does not run."""
    options = parse(arguments)
    if options.show is not None:
        return _show(json.loads(options.show.read_text(encoding="utf-8")), options.show)
    found = device.describe()
    if not (found["gpu"] or options.quick):
        print("vs_gpu_peers: there is no GPU here: --quick sees whether it runs", file=sys.stderr)
        return 2
    path = options.out or RESULTS / f"vs-gpu-peers-{machine.slug(found['name'])}-{_today()[:10]}.json"
    header = _header(options, found)
    session = Session(_task(options), time.monotonic() + options.seconds, lambda record: _keep(header | record, path))
    record = header | session.run(_peers(options), options.rounds)
    _keep(record, path)
    if "jaxinfer" in record["absent"]:
        print(f"vs_gpu_peers: jaxinfer: {record['absent']['jaxinfer']}", file=sys.stderr)
        return 2
    return _show(record, path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options. ``--quick`` changes defaults only; explicit options stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--loads", type=_loads, default=LOADS, help="REQUESTSxPROMPT+OUTPUT[@SHARE],... (default: those of the goals)")
    add("--engines", type=_engines, default=ENGINES, help="jaxinfer,jaxinfer-relaxed,vllm,torch")
    add("--rounds", type=int, default=3, help="starts of each engine (default 3): the first is cold")
    add("--model", default="", help="folder of a Llama in safetensors (default: random weights of the 8B shape)")
    add("--dtype", default="bfloat16", help="of weights, keys and values (default: bfloat16)")
    add("--max-num-seqs", type=int, default=256, help="of every engine")
    add("--max-model-len", type=int, default=2048, help="of every engine")
    add("--memory", type=float, default=0.9, help="share of the device's memory that each may use")
    add("--seconds", type=float, default=3600.0, help="nothing is begun after that (default: an hour)")
    add("--vllm-python", default=sys.executable, help="Python that has vLLM (default: this one)")
    add("--torch-python", default=sys.executable, help="Python that has torch (default: this one)")
    add(
        "--work-dir", type=pathlib.Path, default=REPO / "build" / "vs_gpu_peers", help="logs and caches of compilations"
    )
    add("--out", type=pathlib.Path, help="JSON file (default: benchmarks/results/vs-gpu-peers-<device>-<date>.json)")
    add("--quick", action="store_true", help="tiny shapes, two rounds, jaxinfer alone; a file in --work-dir")
    add("--show", type=pathlib.Path, help="draw and print this record; measure nothing")
    if (given := parser.parse_args(arguments)).quick:
        quick = {"loads": QUICK, "engines": ("jaxinfer",), "rounds": 2, "max_num_seqs": 8, "max_model_len": 64}
        parser.set_defaults(**quick, out=given.work_dir / "quick.json")
    options = parser.parse_args(arguments)
    longest = max(options.loads, key=lambda load: load.prompt + load.output)
    if longest.prompt + longest.output > options.max_model_len:
        parser.error(f"--loads {longest} is longer than --max-model-len {options.max_model_len}")
    return options


def _loads(text: str) -> tuple[Load, ...]:
    try:
        loads = parse_loads(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(str(cause)) from cause
    if all(load.share is not None for load in loads):
        raise argparse.ArgumentTypeError("one load must come all at once: it tells the rate of those that do not")
    return loads


def _engines(text: str) -> tuple[str, ...]:
    words = text.split(",")
    if unknown := [word for word in words if word not in ENGINES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(ENGINES)}")
    return tuple(name for name in ENGINES if name in {"jaxinfer", *words})


def _peers(options: argparse.Namespace) -> list[Peer]:
    def run(python: str, module: str) -> tuple[str, ...]:
        return (python, "-m", f"benchmarks.gpu_peers.{module}")

    ours = (sys.executable, "-m", "jaxinfer.gpu_check.standins", "benchmarks.gpu_peers.jaxinfer_peer")
    peers = (
        Peer("jaxinfer", ours, keeps_cache=True),
        Peer("jaxinfer-relaxed", ours, {"exactness": "relaxed"}, keeps_cache=True),
        Peer("vllm", run(options.vllm_python, "vllm_peer")),
        Peer("torch", run(options.torch_python, "torch_peer")),
    )
    return [peer for peer in peers if peer.name in options.engines]


def _task(options: argparse.Namespace) -> Task:
    options.work_dir.mkdir(parents=True, exist_ok=True)
    random = TINY if options.quick else LLAMA_8B
    config = read_config(pathlib.Path(options.model)) if options.model else random
    settings = {
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.memory,
    }
    return Task(config, settings, options.loads, options.model, options.work_dir)


def _header(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if not isinstance(value, pathlib.Path)}
    given["loads"] = [str(load) for load in options.loads]
    return {"date": _today(), "device": found, "options": given, "method": report.METHOD}


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _keep(record: dict[str, Any], path: pathlib.Path) -> None:
    """Write a record to a temporary file, then rename it: a run may be interrupted at any point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(record | {"summary": report.summary(record)}, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def _show(record: dict[str, Any], path: pathlib.Path) -> int:
    print(report.table(record))
    try:
        report.draw(record, path.with_suffix(".png"))
    except ImportError:
        print(f"no picture: matplotlib is not installed here; --show {path} draws it where it is")
    below = report.below_floor(record)
    for line in below:
        print(f"BELOW FLOOR: {line}")
    return 1 if below else 0


if __name__ == "__main__":
    raise SystemExit(main())
