"""Trial of every kernel that an engine's programs launch, on the local GPU, before any program runs.

Some properties that a kernel relies on cannot be checked by a compiler or an interpreter: the registers assigned to a
block, copies that overlap with products. So each launch runs once next to its XLA path, in a separate process with a
watchdog (`pallas_kernels.trial`). The result is stored with the executables: a later start of the same programs tries
no kernels, and traces no programs to look it up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.compilations import Fingerprints, found_out, timed
from jaxinfer.config import EngineConfigError, ResolvedEngine
from jaxinfer.parallel.mesh import traced_for
from jaxinfer.parallel.processes import own_devices
from pallas_kernels.launches import exclude, recording
from pallas_kernels.trial.run import faults_of

_log = logging.getLogger("jaxinfer.start")
_OF_ATTENTION = ("paged_attention", "mla_attention", "kv_write", "kv_copy")  # ops that `attention_backend` is about

# A function and its arguments, traced for a mesh.
Program = tuple[Mesh, Callable[..., Any], tuple[Any, ...]]


def try_kernels(programs: Sequence[Program], engine: ResolvedEngine) -> bool:
    """Exclude the ops with failing kernels on this process's GPU; False: there is no GPU, or all kernels pass.

    Raises:
        EngineConfigError: a kernel fails and ``kernel_trial`` is "error", or ``attention_backend`` requires it.
    """
    device = next(iter(own_devices(programs[0][0])), None) if programs else None
    if device is None or engine.kernel_trial == "off" or device.platform not in ("gpu", "cuda"):
        return False
    if device not in jax.local_devices():  # a topology description only: programs are compiled for a device elsewhere
        return False
    faults = _faults(programs, device)
    for op, why in faults.items():
        named = engine.attention_backend == "mosaic" and op.startswith(_OF_ATTENTION)
        if named or engine.kernel_trial == "error":
            raise EngineConfigError(
                f"kernel_trial = {engine.kernel_trial}, attention_backend = {engine.attention_backend}: the kernel of "
                f"{op} was tried on this GPU and fails: {why}"
            )
        _log.warning("the kernel of %s was tried on this GPU and fails, XLA runs in its place: %s", op, why)
        exclude(op, why)
    return bool(faults)


def _faults(programs: Sequence[Program], device: Any) -> Mapping[str, str]:
    """Return the faults of these programs' kernels, by op; cached between starts."""
    fingerprints, keys = Fingerprints(), list[str | None]()
    for mesh, function, arguments in programs:
        with traced_for(mesh):
            keys.append(fingerprints.of(device, function, arguments))
    digest = None if None in keys else device.client.platform_version
    with timed("kernels tried, or what is known of them read"):
        settings = f"kernels {device.device_kind} {sorted(map(str, set(keys)))}"
        found = found_out(digest, settings, lambda: {"faults": _tried(programs)}, _is_known)
    faults: Mapping[str, str] = found["faults"]
    return faults


def _tried(programs: Sequence[Program]) -> dict[str, str]:
    with recording() as launches:
        for mesh, function, arguments in programs:
            with traced_for(mesh):
                jax.eval_shape(function, *arguments)
    _log.info("%d kernel launches are tried on this GPU", len(launches))
    return faults_of(launches)


def _is_known(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("faults"), dict)
