"""``python -m tools.check_programs``: compile the engine's steps for GPUs without one, and check the output of XLA.

Exit status: 0, all holds; 1, a rule is broken or a compilation failed; 3, JAX's CUDA plugin is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from types import ModuleType

from jaxinfer.config.speculative import HEADS
from jaxinfer.types import KV_CACHE_DTYPES
from pallas_kernels.check.plugins import ROOT, PluginsMissing, default_folder, environment, require_plugins
from tools.check_programs import shipped, topologies
from tools.check_programs.rules import of_assembler, of_partitioner
from tools.check_programs.stored import WEIGHTS
from tools.check_programs.topologies import TOPOLOGIES
from tools.check_programs.work import GPUS, MODELS, PATHS, Finding, Part, Work

QUICK_LAYERS, PAGES = 4, 4096


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    plugins = arguments.plugins or default_folder()
    try:
        require_plugins(plugins)
    except PluginsMissing as error:
        print(f"check_programs: {error}", file=sys.stderr)
        return 3
    if arguments.topologies is not None:
        works = [TOPOLOGIES[name] for name in arguments.topologies or TOPOLOGIES]
        return _check_all(works, topologies, plugins)
    if arguments.shipped is not None:
        return _check_all(shipped.shipped(arguments.shipped), shipped, plugins)
    layers = QUICK_LAYERS if arguments.quick else arguments.layers
    sizes = (arguments.tensor_parallel_size, arguments.expert_parallel_size, arguments.pipeline_parallel_size)
    work = Work(arguments.model, arguments.pages, *sizes, layers)
    work = dataclasses.replace(work, kv_cache_dtype=arguments.kv_cache_dtype, weights=arguments.weights)
    work = dataclasses.replace(work, norms=arguments.sequence_parallel_norms, gemm=arguments.gemm)
    layers = arguments.draft_layers if arguments.speculative == "draft_model" else 0
    work = dataclasses.replace(work, steps=arguments.multi_step, drafts=arguments.speculative is not None)
    work = dataclasses.replace(
        work, draft_layers=layers, head=arguments.speculative if arguments.speculative in HEADS else ""
    )
    work = dataclasses.replace(work, adapters=arguments.max_loras, target=arguments.target, training=arguments.training)
    work = dataclasses.replace(work, offload=arguments.weight_offload_gib)
    return max([_check(dataclasses.replace(work, attention=path), plugins) for path in arguments.attention])


def _check(work: Work, plugins: pathlib.Path | None) -> int:
    parts = run(work, plugins)
    for part in parts:
        print(f"\n{work}, attention {work.attention}{f', stage {part.number + 1}' if work.stages > 1 else ''}")
        _print("", part.findings)
        for name, program in part.programs.items():
            _print(name, program.findings)
    return int(any(part.broken for part in parts))


def _print(name: str, findings: Iterable[Finding]) -> None:
    for one in findings:
        verdict = "BROKEN" if one.broken else "ok" if one.holds else "not asked"
        print(f"  {name:17} {one.rule:40} {one.found:>24} of {one.limit:<12} {verdict}")


def _check_all(works: Iterable[Work], table: ModuleType, plugins: pathlib.Path | None) -> int:
    """Print a table with one or more lines for each deployment, then the broken rules; failed work counts as broken."""
    wrong: list[str] = []
    print(table.header(), flush=True)
    for work in works:
        try:
            parts = run(work, plugins)
        except subprocess.CalledProcessError as error:
            wrong.append(f"{work}: exit status {error.returncode}")
            continue
        print(table.lines(work, parts), flush=True)
        wrong += table.broken(work, parts)
    for line in wrong:
        print(f"BROKEN: {line}")
    return int(bool(wrong))


def run(work: Work, plugins: pathlib.Path | None) -> list[Part]:
    """Compile the pipeline stages of a deployment, each in a process of its own.

    Raises:
        subprocess.CalledProcessError: the process failed; its output is on standard error.
    """
    return [_compile(work, number, plugins) for number in range(work.stages)]


def _compile(work: Work, number: int, plugins: pathlib.Path | None) -> Part:
    with tempfile.TemporaryDirectory() as folder:
        dumps, result = pathlib.Path(folder, "dumps"), pathlib.Path(folder, "result")
        command = [
            sys.executable,
            "-m",
            "tools.check_programs.programs",
            "--work",
            json.dumps(dataclasses.asdict(work)),
        ]
        command += ["--stage", str(number), "--dumps", str(dumps), "--result", str(result)]
        variables = environment(plugins)
        variables["TF_CPP_MIN_LOG_LEVEL"] = "0"  # spills are a message of the level INFO
        variables["XLA_FLAGS"] += f" --xla_dump_to={dumps} --xla_dump_hlo_as_text"
        done = subprocess.run(command, env=variables, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, end="", file=sys.stderr)
        done.check_returncode()
        part = Part.read(json.loads(result.read_text(encoding="utf-8")))
    return dataclasses.replace(part, findings=(*part.findings, of_partitioner(done.stderr), of_assembler(done.stderr)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.check_programs", description=__doc__)
    parser.add_argument("--model", default="Llama-3.1-8B", help="of configs/models, or a folder with a config.json")
    parser.add_argument("--target", choices=GPUS, default=GPUS[0], help=f"the GPUs (default: {GPUS[0]})")
    parser.add_argument("--gemm", choices=PATHS, default="auto", help="which path products with plain weights take")
    parser.add_argument("--attention", nargs="+", choices=PATHS, default=["auto"], help="which path attention takes")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="as the server's flag")
    parser.add_argument("--weights", choices=WEIGHTS, default="", help="how the layers' weights are stored")
    parser.add_argument("--pages", type=int, default=PAGES, help=f"of the pool, of 64 tokens each (default: {PAGES})")
    for name in ("tensor", "expert", "pipeline"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1, metavar="N", help="as the server's flag")
    parser.add_argument("--sequence-parallel-norms", action="store_true", help="as the server's flag")
    parser.add_argument("--multi-step", type=int, default=1, metavar="N", help="as the server's flag")
    parser.add_argument("--speculative", choices=["ngram", "draft_model", *HEADS], help="as the server's flag")
    parser.add_argument("--draft-layers", type=int, default=2, metavar="N", help="of a draft model (default: 2)")
    parser.add_argument(
        "--max-loras", type=int, default=0, metavar="N", help="adapters beside the model (default: none)"
    )
    parser.add_argument(
        "--weight-offload-gib", type=float, default=0.0, metavar="X", help="as the server's flag; checks copies alone"
    )
    parser.add_argument("--training", action="store_true", help="a trainer's step with Model.logprobs, too")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--layers", type=int, metavar="N", help="so many instead of all")
    depth.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers instead of all")
    known = "; ".join(TOPOLOGIES)
    parser.add_argument(
        "--topologies", nargs="*", choices=TOPOLOGIES, metavar="NAME", help=f"these, or all deployments: {known}"
    )
    names = sorted(path.stem for path in MODELS.glob("*.json"))
    parser.add_argument(
        "--shipped", nargs="*", choices=names, metavar="NAME", help="these or all of configs/models, of few layers"
    )
    parser.add_argument("--plugins", type=pathlib.Path, metavar="DIR", help="where JAX's CUDA plugin is installed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
