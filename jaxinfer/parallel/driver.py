"""Figures of the NVIDIA driver (NVML) for the GPUs of this process. Absent without the package nvidia-ml-py, or without
a driver: never an error. No jax."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

try:
    import pynvml
except ImportError:  # the extra nvml is not installed
    pynvml = None

_SIZE = 32  # bytes of a PCI address as text, and more


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverFigures:
    """Figures of the NVIDIA driver for a whole GPU, with other programs on it; None: it does not have them.

    Attributes:
        utilization: share of the driver's last sample period in which a kernel ran, 0 to 1.
        memory_used, memory_total: bytes.
        watts: power.
        celsius: temperature.
    """

    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    watts: float | None = None
    celsius: float | None = None


def driver_figures(device: Any) -> DriverFigures | None:
    """Return the driver's figures of a JAX device; None: there are none. Figures that this GPU lacks are None."""
    handle = None if device.platform != "gpu" else _handle(device.local_hardware_id)
    if handle is None:
        return None
    memory, rates = _asked("nvmlDeviceGetMemoryInfo", handle), _asked("nvmlDeviceGetUtilizationRates", handle)
    milliwatts = _asked("nvmlDeviceGetPowerUsage", handle)
    celsius = _asked("nvmlDeviceGetTemperature", handle, getattr(pynvml, "NVML_TEMPERATURE_GPU", 0))
    return DriverFigures(
        utilization=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else int(memory.used),
        memory_total=None if memory is None else int(memory.total),
        watts=None if milliwatts is None else milliwatts / 1000,
        celsius=None if celsius is None else float(celsius),
    )


def _asked(name: str, *arguments: Any) -> Any:
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError:  # not supported: utilization under MIG, power of a virtual GPU
        return None


@functools.cache
def _handle(ordinal: int) -> Any:
    """Return NVML's handle of a GPU by its number in CUDA; None: there is no package, or no driver.

    The PCI address connects the two: NVML knows nothing of CUDA_VISIBLE_DEVICES and numbers GPUs in another order.
    """
    address = _bus_id(ordinal) if pynvml is not None else None
    if address is None:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(address)
    except pynvml.NVMLError:
        return None


def _bus_id(ordinal: int, load: Callable[[str], Any] = ctypes.CDLL) -> bytes | None:
    """Return the PCI address of a GPU by its number in CUDA; None: this process has no CUDA."""
    with contextlib.suppress(OSError, AttributeError):
        cuda, device = load("libcuda.so.1"), ctypes.c_int()
        address = ctypes.create_string_buffer(_SIZE)
        if not (cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetPCIBusId(address, _SIZE, device)):
            return address.value
    return None
