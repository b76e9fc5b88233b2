"""Size of the KV pool of an engine, from the bytes that it needs and the memory of its devices. Arithmetic only."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxinfer.config import EngineConfigError

_MOST_PERCENT = 95  # of a device's memory: the rest is for uncounted allocations


@dataclasses.dataclass(frozen=True)
class Budget:
    """The share of a device's memory that an engine may take, in bytes; ``used``: memory in use by other programs."""

    total: int
    utilization: float
    used: int = 0

    @property
    def bytes(self) -> int:
        return int(self.total * self.utilization) - self.used

    def __str__(self) -> str:
        others = f" - {size_text(self.used)} in use" if self.used else ""
        return f"{self.utilization:g} x {size_text(self.total)}{others} (memory_utilization)"


@dataclasses.dataclass(frozen=True)
class HostWeights:
    """Weights of a device that are kept in host memory: the bytes of each layer that has some, in order."""

    layers: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that each program copies to the device."""
        return sum(self.layers)

    @property
    def buffers(self) -> int:
        """Bytes on the device: of the layer that computes, and of the next one, which is copied."""
        return max(map(sum, zip((0, *self.layers), (*self.layers, 0), strict=True)))

    def seconds(self, bandwidth: float) -> float:
        """Return the time of the copies, below which no program falls; ``bandwidth``: bytes per second."""
        return self.bytes / bandwidth

    def text(self, bandwidth: float | None = None) -> str:
        """Describe what the copies cost; ``bandwidth``: bytes per second of the link (None: not known)."""
        found = (
            f"{size_text(self.bytes)} of each device's weights ({len(self.layers)} layers) are in host memory, with "
            f"{size_text(self.buffers)} of buffers on the device; each step copies them"
        )
        if bandwidth is None:
            return found
        rate = f"{bandwidth / 1e9:.1f} GB/s from the host, measured"
        return f"{found}: at {rate}, it takes at least {1e3 * self.seconds(bandwidth):.1f} ms"


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that an engine needs: weights on the device, sampler state, one page of the KV pool over all layers,
    temporaries of running programs (None: not known yet), banks of adapters, states, and encoded images; ``host``:
    weights in host memory, whose buffers are among the temporaries."""

    weights: int
    sampler: int
    page: int
    temporaries: int | None = None
    adapters: int = 0
    states: int = 0
    images: int = 0
    host: HostWeights = HostWeights()

    @property
    def running(self) -> int:
        """Bytes that the programs use while they run, as far as is known."""
        return max(self.temporaries or 0, self.host.buffers)

    @property
    def fixed(self) -> int:
        return self.weights + self.sampler + self.running + self.adapters + self.states + self.images


@dataclasses.dataclass(frozen=True)
class Ways:
    """Other settings under which an engine that does not fit may fit.

    Attributes:
        page_size: tokens of a page.
        small_page: bytes of a page with 8-bit elements; None where they have 8 bits already.
        devices: numbers of devices over which the model could be sharded.
        layers: weights on the device that could be in host memory.
    """

    page_size: int
    small_page: int | None = None
    devices: tuple[int, ...] = ()
    layers: HostWeights = HostWeights()

    def out(self, needs: Needs, budget: Budget, width: int, asked: int | None) -> str:
        """Describe the settings that do fit, as far as is known."""
        found = list(self._fitting(needs, budget, width, asked))
        if not found:
            return "no setting makes it fit: take a smaller model, or quantise it (jaxinfer convert --quantize int8)"
        return "it fits with " + " or ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)

    def _fitting(self, needs: Needs, budget: Budget, width: int, asked: int | None) -> Iterator[str]:
        pages, room = width if asked is None else asked, (budget.bytes - needs.fixed) // needs.page
        if asked is None and room > 0:
            yield f"max_model_len = {room * self.page_size}"
        if asked is not None and room >= width:
            yield "num_pages left open"
        if self.small_page is not None and needs.fixed + pages * self.small_page <= budget.bytes:
            yield "kv_cache_dtype = int8"
        total, spread = needs.fixed + pages * needs.page, needs.weights + pages * needs.page
        enough = (count for count in self.devices if total - spread + spread // count <= budget.bytes)
        yield from (f"tensor_parallel_size = {count}" for count in itertools.islice(enough, 1))
        moved = total - budget.bytes + self.layers.buffers
        if moved <= self.layers.bytes:
            yield f"weight_offload_gib = {math.ceil(10 * moved / 2**30) / 10:g}"
        share = math.ceil(100 * (total + budget.used) / budget.total)
        if share <= _MOST_PERCENT:
            yield f"memory_utilization = {share / 100:g}"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Decision of `plan_memory`: ``pages`` in the pool, of which a sequence may need ``width``."""

    needs: Needs
    budget: Budget
    pages: int
    width: int
    ways: Ways

    @property
    def unused(self) -> int:
        """Bytes of the budget that the plan leaves."""
        return self.budget.bytes - self.needs.fixed - self.pages * self.needs.page

    def require(self, temporaries: Callable[[], int]) -> None:
        """Raise EngineConfigError, with the sum, if the plan's pool does not fit with the temporaries of the compiled
        programs: unless the plan includes them, ``temporaries`` returns them."""
        if self.needs.temporaries is None:
            needs = dataclasses.replace(self.needs, temporaries=temporaries())
            out = functools.partial(self.ways.out, needs, self.budget, self.width, self.pages)
            _require_fit(needs, self.budget, self.pages, f"a pool of {self.pages} pages", out)


def plan_memory(
    needs: Needs, budget: Budget, *, length: int, width: int, asked: int | None, most: int, ways: Ways
) -> MemoryPlan:
    """Compute the size of the pool. Arithmetic only.

    Args:
        length, width: tokens of the longest sequence and its pages: the minimum that a pool must hold.
        asked: pages that the user wants; None: as many as fit, but not more than ``most``.
        ways: alternatives for the error message.

    Raises:
        EngineConfigError: it does not fit; the message has the sum, and what to change.
    """
    purpose = f"1 sequence of {length} tokens ({width} pages)" if asked is None else f"num_pages = {asked}"
    out = functools.partial(ways.out, needs, budget, width, asked)
    _require_fit(needs, budget, width if asked is None else asked, purpose, out)
    room = (budget.bytes - needs.fixed) // needs.page
    return MemoryPlan(needs, budget, asked or max(width, min(room, most)), width, ways)


def _require_fit(needs: Needs, budget: Budget, pages: int, purpose: str, out: Callable[[], str]) -> None:
    total = needs.fixed + pages * needs.page
    if total <= budget.bytes:
        return
    parts = {"weights": needs.weights, "adapters": needs.adapters, "temporaries": needs.running}
    parts |= {"states": needs.states, "encoder cache": needs.images}
    parts["sampler state"] = needs.sampler
    terms = [f"{name} {size_text(size)}" for name, size in parts.items() if size]
    raise EngineConfigError(
        f"{' + '.join([*terms, f'{purpose} {size_text(pages * needs.page)}'])} = {size_text(total)} > {budget}: {out()}"
    )


def size_text(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 20 else f"{count / 2**20:.1f} MiB"


def device_budget(device: Any, utilization: float, held: int, devices: int = 1) -> Budget:
    """Return the budget of a device. ``held``: bytes in use that are the engine's weights, which `Needs` counts.

    A GPU's limit is what JAX may allocate on it; a CPU's is the memory that the machine has available now, shared
    equally by its ``devices``.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return Budget(stats["bytes_limit"], utilization, max(0, stats["bytes_in_use"] - held))
    return Budget(available_memory() // devices + held, utilization)


def available_memory(proc: pathlib.Path = pathlib.Path("/proc"), groups: pathlib.Path = pathlib.Path("/sys")) -> int:
    """Return the bytes of main memory available without swapping; in a container not more than its limit."""
    limit = groups / "fs/cgroup/memory.max"
    bounds = [int(text) for text in [_read(limit).strip()] if text.isdigit()]
    fields = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    if "MemAvailable" in fields:
        return min([int(fields["MemAvailable"].split()[0]) * 1024, *bounds])
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *bounds])


def _read(path: pathlib.Path) -> str:
    """Return the text of a system file; empty if it does not exist."""
    return path.read_text() if path.is_file() else ""
