"""Programs before they are compiled: options of XLA, and StableHLO that an earlier start made."""

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


_KEPT_OF = ("gpu",)  # a CPU's programs have no kernels, which take longest
_KERNELS = tuple(map(DisabledSafetyCheck.custom_call, ("mosaic_gpu", "mosaic_gpu_v2")))


def lower(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donate: int | None,
    results: Any,
    fingerprints: Fingerprints,
) -> jax.stages.Lowered:
    """``function`` in StableHLO. What an earlier start made of the same function is not traced again.

    Kept are programs of one GPU, where JAX's compilation cache has a folder, and code of jaxinfer alone: see
    `Fingerprints`. Call it within `traced_for`.

    Args:
        arguments: abstract arrays; ``donate``: which of them is donated.
        results: shardings. Named tuples among the results themselves must be known to `jax.export`.
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

    # JAX's name of a platform to export for is that of a GPU's maker.
    name = {"gpu": "cuda"}.get(platform, platform)
    return bytes(export(jax.jit(flat), platforms=[name], disabled_checks=_KERNELS)(*leaves).serialize())


def _kept(path: pathlib.Path, make: Callable[[], bytes]) -> Exported:
    """What ``path`` holds, or is to hold: behind its digest, as JAX does not look at what it is given. A file that was
    cut off, or that another version wrote, is made anew."""
    with contextlib.suppress(OSError):
        digest, content = _apart(path.read_bytes())
        if digest == hashlib.sha256(content).digest():
            return deserialize(bytearray(content))
    content = make()
    write(path, hashlib.sha256(content).digest() + content)
    return deserialize(bytearray(content))


def _apart(kept: bytes) -> tuple[bytes, bytes]:
    return kept[:32], kept[32:]
