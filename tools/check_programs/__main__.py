"""``python -m tools.check_programs``: compile the engine's steps for an H100, without one, and check what XLA made.

Exit status: 0, all holds; 1, a rule is broken or a compilation failed; 3, JAX's CUDA plugin is missing.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from pallas_kernels.check.plugins import ROOT, PluginsMissing, default_folder, environment, require_plugins
from tools.check_programs.programs import MODELS, PAGES, PATHS
from tools.check_programs.rules import Finding

QUICK_LAYERS = 4


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    plugins = arguments.plugins or default_folder()
    try:
        require_plugins(plugins)
    except PluginsMissing as error:
        print(f"check_programs: {error}", file=sys.stderr)
        return 3
    layers = QUICK_LAYERS if arguments.quick else None
    shape, tensor = (arguments.model, layers, arguments.pages), arguments.tensor_parallel_size
    return max([_check(*shape, path, plugins, tensor) for path in arguments.attention])


def _check(model: str, layers: int | None, pages: int, path: str, plugins: pathlib.Path | None, tensor: int) -> int:
    found = run(model, layers, pages, path, plugins, tensor)
    of_layers, of_devices = f", {layers} layers" if layers else "", f", {tensor} devices" if tensor > 1 else ""
    print(f"\n{model}, attention {path}{of_layers}{of_devices}")
    for name, some in found.items():
        for one in some:
            verdict = "BROKEN" if one.broken else "ok" if one.holds else "not asked: attention is XLA's"
            print(f"  {name:17} {one.rule:40} {one.found:>24} of {one.limit:<12} {verdict}")
    return int(any(one.broken for some in found.values() for one in some))


def run(
    model: str, layers: int | None, pages: int, path: str, plugins: pathlib.Path | None, tensor: int = 1
) -> dict[str, list[Finding]]:
    """The findings of each program, compiled in a process of its own.

    Raises:
        subprocess.CalledProcessError: it died; what it said is on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        dumps, results = pathlib.Path(folder, "dumps"), pathlib.Path(folder, "results")
        command = [
            sys.executable,
            "-m",
            "tools.check_programs.programs",
            "--model",
            model,
            "--attention",
            path,
            "--pages",
            str(pages),
            "--tensor",
            str(tensor),
        ]
        command += ["--dumps", str(dumps), "--results", str(results)] + ["--layers", str(layers)] * bool(layers)
        variables = environment(plugins)
        variables["XLA_FLAGS"] += f" --xla_dump_to={dumps} --xla_dump_hlo_as_text"
        subprocess.run(command, env=variables, cwd=ROOT, check=True)
        read = json.loads(results.read_text(encoding="utf-8"))
    return {name: [Finding(**one) for one in some] for name, some in read.items()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.check_programs", description=__doc__)
    known = ", ".join(MODELS)
    parser.add_argument("--model", default="llama-3.1-8b", help=f"one of {known}, or a folder with a config.json")
    parser.add_argument("--attention", nargs="+", choices=PATHS, default=["auto"], help="which path attention takes")
    parser.add_argument("--pages", type=int, default=PAGES, help=f"of the pool, of 64 tokens each (default: {PAGES})")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="H100s that work together (default: 1)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers instead of all")
    parser.add_argument("--plugins", type=pathlib.Path, metavar="DIR", help="where JAX's CUDA plugin is installed")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
