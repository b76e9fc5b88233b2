"""Compilations: what is kept of them between starts, and counts of them; after READY there must be none.

JAX's own cache keeps executables. To find one, JAX needs the program in StableHLO, and to make that of a GPU's kernels
takes longer than all else of a restart: so that is kept, too, by what the program was traced to, and what was found out
about executables by what they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.export import DisabledSafetyCheck, Exported, deserialize, export
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh

import pallas_kernels

_log = logging.getLogger("jaxinfer.start")

DEFAULT_FOLDER = pathlib.Path("~/.cache/jaxinfer/compiled")

# JAX reports this event around every compilation by the backend, a hit in the persistent cache included.
_EVENT = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"
_KEPT = "/jax/compilation_cache/cache_misses"  # where the cache has taken what was compiled


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in ``folder`` (None: the user's cache folder; "": nowhere): the second start compiles
    nothing that the first one did.

    JAX has one cache per process: the last call decides.
    """
    path = None if folder == "" else str(pathlib.Path(folder or DEFAULT_FOLDER).expanduser())
    jax.config.update("jax_compilation_cache_dir", path)
    # Every program of the engine counts, however small: startup is their sum.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Tell, for debugging, how long a part of a start takes."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        _log.debug("%s: %.2f s", what, time.perf_counter() - begun)


@dataclasses.dataclass
class Compilations:
    """Number of programs that this process has compiled, and the seconds that took."""

    count: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts every compilation in this process, whoever causes it, until the block ends."""
    seen = Compilations()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            seen.count += 1
            seen.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclasses.dataclass
class CacheUse:
    """The persistent cache in this process: compilations ``wanted`` by the backend or in their place; of them those
    ``found`` in the cache, and those that were compiled and ``kept`` there."""

    wanted: int = 0
    found: int = 0
    kept: int = 0

    @property
    def compiled(self) -> int:
        return self.wanted - self.found


@contextlib.contextmanager
def count_cache_use() -> Iterator[CacheUse]:
    """Counts what the persistent cache does for this process, until the block ends."""
    use = CacheUse()

    def listen(event: str, **_: str | int) -> None:
        use.found += event == _FOUND
        use.kept += event == _KEPT

    jax.monitoring.register_event_listener(listen)
    try:
        with count_compilations() as seen:
            yield use
    finally:
        jax.monitoring.unregister_event_listener(listen)
        use.wanted = seen.count


# ---- programs before they are compiled

# Recomputing a GEMM to save memory costs a tenth of a decode step, and the memory is there: the pool is sized last.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
# The host reads the end of a loop (of steps, over a weight) unless a command buffer holds it. By default none does: the
# list replaces the default and is the same, WHILE aside (and without collectives' kernels, which one device has not).
_GPU_LOOP_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}


def compiler_options(mesh: Mesh, loops: bool = False) -> dict[str, str] | None:
    """Options of XLA for a program of these devices. ``loops``: it may have some."""
    if mesh.devices.flat[0].platform != "gpu":
        return None
    return _GPU_OPTIONS | _GPU_LOOP_OPTIONS if loops and mesh.size == 1 else _GPU_OPTIONS


_FORM = "1"  # of what is kept
_METADATA = re.compile(r", metadata={[^}]*}")
_LOWERED = "lowered"
_KEPT_OF = ("gpu",)  # a CPU's programs have no kernels: they are lowered as fast as they are read
_KERNELS = tuple(map(DisabledSafetyCheck.custom_call, ("mosaic_gpu", "mosaic_gpu_v2")))
# What a setting is called that says where things are, or how much is told of them.
_ELSEWHERE = ("_dir", "_path", "log", "dump", "compilation_cache", "persistent_cache", "traceback")


def lower(
    mesh: Mesh, function: Callable[..., Any], arguments: tuple[Any, ...], donate: int | None, results: Any
) -> jax.stages.Lowered:
    """``function`` in StableHLO, of an earlier start where one had the same to do: traced it is each time.

    Kept are programs of one GPU, where JAX's compilation cache has a folder. Call it within `traced_for`.

    Args:
        arguments: arrays, which may be abstract; ``donate``: which of them is donated.
        results: shardings.
    """
    folder, device = jax.config.jax_compilation_cache_dir, mesh.devices.flat[0]
    if folder is None or mesh.size > 1 or device.platform not in _KEPT_OF:
        return jax.jit(function, donate_argnums=donate, out_shardings=results).lower(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    given: list[Any] = []

    def flat(*operands: Any) -> list[Any]:
        found, form = jax.tree.flatten(function(*jax.tree.unflatten(tree, operands)))
        given[:] = [form]
        return found

    traced = jax.jit(flat)
    key = _key(traced.trace(*leaves).jaxpr, device, (leaves, tree, donate, results))
    kept = _kept(pathlib.Path(folder) / _LOWERED / key, functools.partial(_exported, traced, leaves, device.platform))

    @functools.wraps(function)
    def restored(*operands: Any) -> Any:
        return jax.tree.unflatten(given[0], kept.call(*jax.tree.leaves(operands)))

    return jax.jit(restored, donate_argnums=donate, out_shardings=results).lower(*arguments)


def _exported(traced: Any, leaves: list[Any], platform: str) -> bytes:
    # JAX's name of a platform to export for is that of a GPU's maker.
    name = {"gpu": "cuda"}.get(platform, platform)
    return bytes(export(traced, platforms=[name], disabled_checks=_KERNELS)(*leaves).serialize())


def _kept(path: pathlib.Path, make: Callable[[], bytes]) -> Exported:
    """What ``path`` holds, or is to hold: behind its digest, as JAX does not look at what it is given. A file that was
    cut off, or that another version wrote, is made anew."""
    with contextlib.suppress(OSError):
        digest, content = _apart(path.read_bytes())
        if digest == hashlib.sha256(content).digest():
            return deserialize(bytearray(content))
    content = make()
    _write(path, hashlib.sha256(content).digest() + content)
    return deserialize(bytearray(content))


def _apart(kept: bytes) -> tuple[bytes, bytes]:
    return kept[:32], kept[32:]


def _write(path: pathlib.Path, content: bytes) -> None:
    """Replace a file at once: another process may read it. A folder that cannot be written keeps nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        part.write_bytes(content)
        part.replace(path)


def _key(program: Any, device: jax.Device, form: Any) -> str:
    """A digest of all that a program's StableHLO is made from."""
    settings = {
        name: value for name, value in jax.config.values.items() if not any(part in name for part in _ELSEWHERE)
    }
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_FLAGS", "MOSAIC_"))}
    versions = [jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version]
    parts = [_FORM, *versions, _sources(), device.device_kind]
    digest = hashlib.sha256("\0".join([*parts, repr(settings), repr(flags), repr(form), str(program)]).encode())
    for constant in _constants(program):
        digest.update(f"{constant.dtype} {constant.shape}".encode())
        digest.update(constant.tobytes())
    return digest.hexdigest()


def _constants(program: Any) -> Iterator[np.ndarray]:
    """Arrays that a program has within it, which its text does not show."""
    seen, waiting = set[int](), [program]
    while waiting:
        one: Any = waiting.pop()
        if isinstance(one, (tuple, list)):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
        elif (isinstance(one, Jaxpr) or hasattr(one, "jaxpr")) and id(one) not in seen:
            seen.add(id(one))
            # Up to JAX 0.11, what is closed over its constants is a thing of its own.
            yield from (np.asarray(x) for x in getattr(one, "consts", ()) if not isinstance(x, jax.core.Tracer))
            for equation in getattr(one, "jaxpr", one).eqns:
                yield from (np.asarray(x.val) for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
                waiting += equation.params.values()


@functools.cache
def _sources() -> str:
    """A digest of the code that makes programs: text of a program does not show all that a kernel is made from."""
    digest = hashlib.sha256()
    for folder in (pathlib.Path(__file__).parents[2], pathlib.Path(pallas_kernels.__path__[0])):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ---- what was found out about executables


def digest_of(stages: Iterable[Any]) -> str:
    """A digest of the executables of compiled stages: of what XLA made of them, with the library calls and tiles that
    it chose by measuring, which differ from compilation to compilation."""
    digest = hashlib.sha256(jax.devices()[0].client.platform_version.encode())
    for stage in stages:
        for executable in _executables(stage):
            digest.update("\n".join(_instructions(executable.as_text())).encode())
    return digest.hexdigest()


def _instructions(text: str) -> Iterator[str]:
    """What a program does, without where in the source it stands, which the cache tells otherwise."""
    for line in text.splitlines():
        if " = " in line:
            yield _METADATA.sub("", line)


def _executables(stage: Any) -> Iterator[Any]:
    for field in dataclasses.fields(stage):
        one = getattr(stage, field.name)
        if dataclasses.is_dataclass(one):
            yield from _executables(one)
        elif isinstance(one, Mapping):
            yield from one.values()
        elif one is not None:
            yield one


def found_out(
    digest: str | None, settings: str, find_out: Callable[[], dict[str, Any]], known: Callable[[Any], bool]
) -> dict[str, Any]:
    """What an earlier start found out about the same executables with the same ``settings``, or else what this one
    does, as JSON has it.

    Args:
        digest: of the executables (`digest_of`); None: nobody knows which they are.
        known: whether what a file holds is such a finding.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or digest is None:
        return find_out()
    name = hashlib.sha256("\0".join([_FORM, _sources(), digest, settings]).encode()).hexdigest()
    path = pathlib.Path(folder) / "calibrated" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if known(earlier):
            return earlier
    found = find_out()
    _write(path, json.dumps(found).encode())
    return found
