"""`jaxinfer compile`: compile every program that an engine needs ahead of its first start."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

from jaxinfer.cli.app import run as run_command
from jaxinfer.cli.compile import FOLDER, THIS
from jaxinfer.compilations import DEFAULT_FOLDER, CacheUse, count_cache_use, use_compilation_cache
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution.compiled import CompileProgress, compile_stages
from jaxinfer.engine.execution.placement import abstract_arrays
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.stages import cut, draft_stages
from jaxinfer.loading import StartProgress, abstract_draft, abstract_model, start_engine, with_draft
from jaxinfer.opening import LOADING_ERRORS
from jaxinfer.parallel.mesh import mesh_for, stages
from pallas_kernels.check.plugins import PluginsMissing, default_folder, environment, require_plugins
from pallas_kernels.check.target import DEVICES

_UNTUNED = "--xla_gpu_autotune_level=0"  # as set by `environment`


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compilation job.

    Attributes:
        model: see `jaxinfer.loading.load_model`.
        config: settings of the engines that will start.
        cache: folder of the compiled programs.
    """

    model: str
    config: EngineConfig
    dtype: str
    cache: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a compilation: cache use, pages of the pool (they shape the programs), and seconds taken."""

    use: CacheUse
    pages: int
    seconds: float

    def lines(self, job: Compilation) -> list[str]:
        use = self.use
        size = sum(path.stat().st_size for path in job.cache.rglob("*") if path.is_file())
        said = [
            f"{use.wanted} programs: {use.compiled} compiled, {use.found} found in the cache, in {self.seconds:.1f} s",
            f"{job.cache} holds {size / 1e6:.1f} MB; the pool has {self.pages} pages",
        ]
        if lost := use.compiled - use.kept:
            said.append(f"{lost} could not be kept: JAX has no form for them on a disk")
        return said


def compile_here(job: Compilation, progress: CompileProgress | None = None) -> Report:
    """Start and stop an engine on this machine's devices, weights included, as a server does.

    The cache then has everything that a start compiles: the engine programs and the small ones that create arrays.

    Raises:
        CheckpointError, ConfigError, TokenizerError, TemplateError, EngineConfigError: see `start_engine`.
    """
    begin = time.perf_counter()
    with count_cache_use() as use:
        _, engine = start_engine(
            job.model,
            job.config,
            job.dtype,
            compilation_cache_dir=str(job.cache),
            progress=StartProgress(compiled=progress),
        )
    return Report(use, engine.config.num_pages, time.perf_counter() - begin)


def compile_for(target: str, job: Compilation, progress: CompileProgress | None = None) -> Report:
    """Compile the engine's programs for GPUs that need not be present. No weights are read and no program runs.

    The process must have been started with `pallas_kernels.check.plugins.environment`.

    Raises:
        CheckpointError, ConfigError, EngineConfigError: one sentence with the reason.
    """
    begin, config = time.perf_counter(), dataclasses.replace(job.config, data_parallel_size=1)
    use_compilation_cache(str(job.cache))
    device = DEVICES[target]
    mesh = mesh_for(config, device.devices(config.devices * config.dp_ranks * config.pipeline_parallel_size))
    read = functools.partial(abstract_model, dtype=job.dtype)
    drafted = with_draft(read(job.model), config, abstract_draft(config, job.dtype))
    with device.current():
        model, engine, limits = prepare(drafted, config, "gpu", mesh)
    places = stages(mesh)
    parts, places = [*cut(model, len(places)), *draft_stages(model)], [*places, *places[-1:]]
    arrays = [abstract_arrays(part, engine, limits, place) for part, place in zip(parts, places, strict=False)]
    with device.current(), count_cache_use() as use, warnings.catch_warnings():
        # Entries that an earlier run cached load on the GPU only; they are compiled again here.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
        compile_stages(parts, arrays, engine, progress)
    return Report(use, engine.num_pages, time.perf_counter() - begin)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `run`."""
    return run_command("compile", argv)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0; 2 with one sentence on stderr for an error; 3 if JAX's CUDA plugin is missing."""
    job = Compilation(args.model, EngineConfig(**args.settings), args.dtype, _cache(args))
    try:
        if args.target != THIS and not args.prepared:
            return _in_prepared_process(args)
        with _counter() as progress:
            report = compile_here(job, progress) if args.target == THIS else compile_for(args.target, job, progress)
    except (*LOADING_ERRORS, EngineConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PluginsMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print("\n".join([*report.lines(job), *_advice(args, job)]))
    return 0


def _advice(args: argparse.Namespace, job: Compilation) -> list[str]:
    if args.target != THIS:
        return [
            "not kept: the small programs by which a start makes its arrays, and how fast variants of a product are, "
            "which only the GPU can tell",
            f"XLA's flags are part of the cache's keys: a start that is to find these needs XLA_FLAGS={_UNTUNED}; "
            "that one does was not tried on a GPU",
        ]
    elsewhere = job.cache != DEFAULT_FOLDER.expanduser()
    return [f"start with the same flags and --compilation-cache-dir {job.cache}"] if elsewhere else []


def _cache(args: argparse.Namespace) -> pathlib.Path:
    """Return the cache folder: the requested one, else one in the model folder if there is one, else the user's."""
    if args.compilation_cache_dir is not None:
        return pathlib.Path(args.compilation_cache_dir)
    folder = pathlib.Path(args.model)
    return folder / FOLDER if folder.is_dir() else DEFAULT_FOLDER.expanduser()


def _in_prepared_process(args: argparse.Namespace) -> int:
    """Run in a new process: XLA flags must be set before JAX starts, and only that process may find the plugin."""
    folder = args.plugins or default_folder()
    require_plugins(folder)
    command = [sys.executable, "-m", "jaxinfer.compile", *args.argv, "--prepared"]
    return subprocess.run(command, env=environment(folder), check=False).returncode


@contextlib.contextmanager
def _counter() -> Iterator[CompileProgress | None]:
    """Show the number of compiled programs on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: int, total: int) -> None:
        print(f"\rcompiling {done}/{total}", end="", file=sys.stderr, flush=True)

    yield show
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
