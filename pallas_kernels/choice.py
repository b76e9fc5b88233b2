"""Choice of the path of an op in a program, with its reason; every ``<op>/api.py`` uses it.

The choice is made while a program is traced, from its lowering target: the device of the abstract mesh if one is set,
else JAX's default device. Mosaic GPU looks up the machine code to emit in the same order, so the two cannot disagree.
To compile for a GPU on a machine without one, trace under ``jax.sharding.use_abstract_mesh`` with an abstract device of
platform "gpu" and a ``compute_capability``, or name the `Target`, or force a path. A program that is lowered for
another platform without any of these takes the XLA path, which runs everywhere.

``jax.lax.platform_dependent`` would decide later, while lowering. It is not used: both branches would be traced in
every layer on every platform, and it knows a platform's name, not which GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from pallas_kernels.launches import excluded

Wish = Literal["auto", "mosaic", "xla"]
Capability = tuple[int, int]

AMPERE: Capability = (8, 0)
ADA: Capability = (8, 9)
HOPPER: Capability = (9, 0)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The path taken, and a sentence with the reason."""

    path: Literal["mosaic", "xla"]
    why: str


@dataclasses.dataclass(frozen=True)
class Target:
    """The target that a program is lowered for.

    Attributes:
        capability: compute capability of an NVIDIA GPU, (9, 0) for Hopper; None: not known, or none.
        device_kind: "NVIDIA H100 80GB HBM3" for example; None: not known.
    """

    platform: str
    capability: Capability | None = None
    device_kind: str | None = None


def lowering_target() -> Target:
    """Return the target of the program that is being traced, see the module."""
    abstract, device = jax.sharding.get_abstract_mesh().abstract_device, _default_device()
    if abstract is None or (device is not None and abstract.device_kind == device.device_kind):
        abstract = device
    if abstract is None:  # the default device is only a platform's name
        return Target(jax.default_backend())
    capability = _capability(getattr(abstract, "compute_capability", ""))
    return Target(abstract.platform, capability, abstract.device_kind)


def _default_device() -> jax.Device | None:
    chosen = jax.config.jax_default_device
    return jax.local_devices()[0] if chosen is None else chosen if isinstance(chosen, jax.Device) else None


def _capability(text: str) -> Capability | None:
    """Parse "9.0" as (9, 0); other vendors' names are not capabilities."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def choose(
    op: str,
    wish: Wish,
    refusal: str | None,
    *,
    least: Capability = HOPPER,
    most: Capability = HOPPER,
    target: Target | None = None,
) -> Choice:
    """Choose the path for a kernel that rejects an op's operands for the reason ``refusal`` (None: it supports them).

    Args:
        op: name of the op in launches, see `pallas_kernels.launches`.
        wish: "mosaic" and "xla" force a path on every platform.
        least: the lowest compute capability that the kernel was written for.
        most: the highest one.
        target: lowering target of the program; None: `lowering_target`.

    Raises:
        ValueError: "mosaic" is requested, and the kernel rejects the operands or failed its trial on this GPU.
    """
    refusal = refusal or excluded(op)
    if wish == "xla":
        return Choice("xla", "The XLA path was asked for.")
    if wish == "mosaic":
        if refusal is not None:
            raise ValueError(refusal)
        return Choice("mosaic", "The Mosaic kernel was asked for.")
    target = target or lowering_target()
    if target.platform not in ("gpu", "cuda"):
        return Choice("xla", f"The program is lowered for platform {target.platform}; Mosaic kernels are for GPUs.")
    if target.capability is None or not least <= target.capability <= most:
        supported = f"{_dotted(least)} to {_dotted(most)}" if least != most else _dotted(least)
        found = "unknown" if target.capability is None else _dotted(target.capability)
        return Choice("xla", f"The GPU's compute capability is {found}; the Mosaic kernel is for {supported}.")
    if refusal is not None:
        return Choice("xla", refusal)
    return Choice(
        "mosaic", f"The Mosaic kernel does these operands on compute capability {_dotted(target.capability)}."
    )


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
