"""Defaults of settings that a user left open, by platform: one table, with reasons. No jax."""

from __future__ import annotations

import functools
import pathlib
from typing import Literal, NamedTuple

_GIB = 1 << 30
_Layout = Literal["in first", "in last"]  # see `pallas_kernels.matmul.Layout`
_CPUINFO = pathlib.Path("/proc/cpuinfo")


class Defaults(NamedTuple):
    """What a platform runs well.

    Attributes:
        max_num_seqs, prefill_sizes, max_prefill_rows: see `jaxinfer.config.SchedulerConfig`.
        max_num_batched_tokens: the same, as far as rows and the largest chunk leave it.
        min_rows: fewest rows of a decode program that the platform runs well.
        decode_sizes: rows of smaller decode programs than that for all sequences.
        memory: bytes of a device; 0: nobody knows.
    """

    max_num_seqs: int
    prefill_sizes: tuple[int, ...]
    max_prefill_rows: int
    max_num_batched_tokens: int
    min_rows: int = 1
    memory: int = 0
    decode_sizes: tuple[int, ...] = ()

    def sequences(self, state_bytes: int) -> int:
        """``max_num_seqs``, where one takes ``state_bytes`` however short it is: a power of two that leaves three
        quarters of the memory for all else."""
        if not state_bytes or not self.memory:
            return self.max_num_seqs
        fitting = max(1, self.memory // 4 // state_bytes)
        return min(self.max_num_seqs, 1 << (fitting.bit_length() - 1))

    def sizes(self, length: int, page_size: int, devices: int, most: int | None) -> tuple[int, ...]:
        """``prefill_sizes`` without those that no prompt of ``length`` tokens needs, that ``devices`` do not divide or
        that are beyond ``most`` tokens; the last holds whole pages."""
        found = [size for size in self.prefill_sizes if size % devices == 0 and (most is None or size <= most)]
        found = [size for at, size in enumerate(found) if at == 0 or found[at - 1] < length]
        while found and found[-1] % page_size:
            found.pop()
        return tuple(found) or (max(page_size, devices),)


# A CPU pays for each row of the one decode program. Its products reach their rate at 256 rows, and in a step of 2,048
# tokens decode rows cost a long prefill a few percent only, while the pause between two tokens stays bearable.
CPU = Defaults(max_num_seqs=8, prefill_sizes=(32, 128, 256), max_prefill_rows=512, max_num_batched_tokens=2048)
# A GPU reads all weights for one token as for two hundred, but pays for the other rows of a step: their products read x
# and write results, and the sampler reads a row of logits each (some 8.6 ms for a step of 256 rows of an 8B model where
# 6.1 suffice for one, by a model of an H100). So there are decode programs of several sizes. A chunk below 128 saves
# nothing. Products reach their rate at some 2,000 rows (an H100: 23 us a token of an 8B model in chunks of
# 2,048, 35 in chunks of 256); short prompts have that in wide programs. What limits it is memory: activations of 4,096
# rows of an 8B model take 0.6 GB, which a device of 24 GB wants for pages. Memory is what JAX may take, three quarters
# of all if nothing else is said. XLA norms a single row in two kernels, several in one.
_ROWS = (2, 8, 16, 32, 64, 128, 256)
_GPU = (
    (36 * _GIB, Defaults(256, (128, 256, 512, 1024, 2048), 4096, 4096, min_rows=2, decode_sizes=_ROWS)),
    (15 * _GIB, Defaults(128, (128, 256, 512, 1024), 2048, 2048, min_rows=2, decode_sizes=_ROWS)),
    (0, Defaults(64, (128, 256, 512), 1024, 2048, min_rows=2, decode_sizes=_ROWS)),
)


def of_platform(platform: str, memory: int = 0) -> Defaults:
    """Defaults for "cpu" or "gpu", of a device with ``memory`` bytes; 0: nobody knows, and it is taken for enough."""
    if platform == "cpu":
        return CPU
    found = next(defaults for least, defaults in _GPU if not memory or memory >= least)
    return found._replace(memory=memory)


def layout_for_cpu(rows: int, itemsize: int, cpuinfo: pathlib.Path = _CPUINFO) -> _Layout | None:
    """How a CPU likes matrices of ``itemsize`` bytes a number to lie, for decode steps of so many rows; None: as the
    family has them. Measurements are in docs/benchmarks.md.

    One row of 16-bit numbers: [in, out], which `pallas_kernels.one_row` reads fastest. With matrix registers (Intel's
    AMX) [out, in]: products of a 125M model's decode step take a sixth less in bfloat16, up to an eighth in float32;
    without (an AMD EPYC) steps of 8 and more rows take longer so.
    """
    if rows == 1 and itemsize == 2:
        return "in first"
    return "in last" if _has_amx(cpuinfo) else None


@functools.cache
def _has_amx(cpuinfo: pathlib.Path) -> bool:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return False
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))
