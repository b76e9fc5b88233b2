"""Section device: the hardware and software on which the other sections were measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

import flax
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check.report import Report

_QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"


def answers() -> bool:
    """Return whether JAX's device still computes: after some CUDA errors no computation succeeds in a process."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except jax.errors.JaxRuntimeError as error:
        return "RESOURCE_EXHAUSTED" in str(error)
    return True


def run(report: Report) -> None:
    device = jax.devices()[0]
    report.put(
        "device",
        platform=device.platform,
        kind=device.device_kind,
        count=jax.device_count(),
        compute_capability=str(getattr(device, "compute_capability", "")),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
    )
    report.put(
        "software",
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        flax=flax.__version__,
        numpy=np.__version__,
        backend=device.client.platform_version,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )
    report.put("host", machine=platform.machine(), system=platform.platform(), cpus=os.cpu_count())
    report.put("nvidia-smi", **_nvidia_smi())


def _nvidia_smi() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"{type(error).__name__}: {error}"[:200]}
    return dict(zip(_QUERY.split(","), done.stdout.splitlines()[0].split(", "), strict=True))
