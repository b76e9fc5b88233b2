"""Programs before compilation: XLA options, and cached StableHLO of earlier starts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported, deserialize, export
from jax.sharding import Mesh

from jaxinfer.compilations.files import folder_of, write
from jaxinfer.compilations.fingerprints import Fingerprints

# Recomputing a GEMM to save memory costs a tenth of a decode step, and memory is not short: the pool is sized last.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
# The host reads the end of a loop (of steps, over a weight) unless it is in a command buffer. By default no loop is:
# this list replaces the default, with WHILE added (and without collectives, which programs with loops must not have).
_GPU_LOOP_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
# By default two copies from the host may be in flight: a layer would wait for the first ones of the next layer.
_GPU_COPY_OPTIONS = {"xla_gpu_experimental_parallel_async_compute_limit": "256"}


def compiler_options(mesh: Mesh, loops: bool = False, copies: bool = False) -> dict[str, str] | None:
    """Return the XLA options for a program of these devices.

    Args:
        loops: it may contain loops, and no collectives.
        copies: it copies weights from host memory.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return None
    found = _GPU_OPTIONS | _GPU_LOOP_OPTIONS if loops else _GPU_OPTIONS
    return found | _GPU_COPY_OPTIONS if copies else found


_KEPT_OF = ("gpu",)  # programs of a CPU lack the kernels that take longest to lower
_KERNELS = tuple(map(DisabledSafetyCheck.custom_call, ("mosaic_gpu", "mosaic_gpu_v2")))


def lower(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donate: int | None,
    results: Any,
    fingerprints: Fingerprints,
) -> jax.stages.Lowered:
    """Return ``function`` in StableHLO. A function that an earlier start lowered is not traced again.

    Cached are programs of one GPU, if JAX's compilation cache has a folder, with code of jaxinfer only: see
    `Fingerprints`. Call it within `traced_for`.

    Args:
        arguments: abstract arrays; ``donate``: index of the donated one.
        results: shardings. Named tuples among the results must be registered with `jax.export`.
    """
    device = mesh.devices.flat[0]
    folder = folder_of("lowered") if mesh.size == 1 and device.platform in _KEPT_OF else None
    key = folder and fingerprints.of(device, function, arguments, donate, results)
    if folder is None or key is None:
        return jax.jit(function, donate_argnums=donate, out_shardings=results).lower(*arguments)
    kept = _kept(folder / key, functools.partial(_exported, function, arguments, device.platform))

    @functools.wraps(function)
    def restored(*operands: Any) -> Any:
        return kept.call(*jax.tree.leaves(operands))

    return jax.jit(restored, donate_argnums=donate, out_shardings=results).lower(*arguments)


def _exported(function: Callable[..., Any], arguments: tuple[Any, ...], platform: str) -> bytes:
    leaves, tree = jax.tree.flatten(arguments)  # the tree may have nodes that `jax.export` does not know

    def flat(*operands: Any) -> Any:
        return function(*jax.tree.unflatten(tree, operands))

    # jax.export names a GPU platform by its vendor.
    name = {"gpu": "cuda"}.get(platform, platform)
    return bytes(export(jax.jit(flat), platforms=[name], disabled_checks=_KERNELS)(*leaves).serialize())


def _kept(path: pathlib.Path, make: Callable[[], bytes]) -> Exported:
    """Return the program in ``path``, or make and store it after its digest, because JAX does not verify serialised
    programs. A truncated file, or one of another version, is replaced."""
    with contextlib.suppress(OSError):
        digest, content = _apart(path.read_bytes())
        if digest == hashlib.sha256(content).digest():
            return deserialize(bytearray(content))
    content = make()
    write(path, hashlib.sha256(content).digest() + content)
    return deserialize(bytearray(content))


def _apart(kept: bytes) -> tuple[bytes, bytes]:
    return kept[:32], kept[32:]
