"""Default settings by platform, with reasons. No jax."""

from __future__ import annotations

from typing import NamedTuple

_GIB = 1 << 30


class Defaults(NamedTuple):
    """Default settings of a platform.

    Attributes:
        max_num_seqs, prefill_sizes, max_prefill_rows: see `jaxinfer.config.SchedulerConfig`.
        max_num_batched_tokens: default, raised to the largest chunk plus all rows if that is more.
        min_rows: smallest efficient number of rows of a decode program.
        decode_sizes: rows of decode programs smaller than the one for all sequences.
        memory: bytes of a device; 0: unknown.
    """

    max_num_seqs: int
    prefill_sizes: tuple[int, ...]
    max_prefill_rows: int
    max_num_batched_tokens: int
    min_rows: int = 1
    memory: int = 0
    decode_sizes: tuple[int, ...] = ()

    def sequences(self, state_bytes: int) -> int:
        """Return ``max_num_seqs`` for a model whose sequences each take ``state_bytes`` regardless of their length: a
        power of two that leaves three quarters of the memory for everything else."""
        if not state_bytes or not self.memory:
            return self.max_num_seqs
        fitting = max(1, self.memory // 4 // state_bytes)
        return min(self.max_num_seqs, 1 << (fitting.bit_length() - 1))

    def sizes(self, length: int, page_size: int, devices: int, most: int | None) -> tuple[int, ...]:
        """Return ``prefill_sizes`` without sizes that no prompt of ``length`` tokens needs, that ``devices`` do not
        divide or that exceed ``most`` tokens; the last is a multiple of the page size."""
        found = [size for size in self.prefill_sizes if size % devices == 0 and (most is None or size <= most)]
        found = [size for at, size in enumerate(found) if at == 0 or found[at - 1] < length]
        while found and found[-1] % page_size:
            found.pop()
        return tuple(found) or (max(page_size, devices),)


# A CPU pays for every row of its one decode program. Matrix products reach full throughput at 256 rows. In a step of
# 2,048 tokens the decode rows slow a long prefill by a few percent only, and inter-token latency stays acceptable.
CPU = Defaults(max_num_seqs=8, prefill_sizes=(32, 128, 256), max_prefill_rows=512, max_num_batched_tokens=2048)
# A GPU reads all weights once per step, for one token or for two hundred, but it pays for idle rows of a step: their
# products read x and write results, and the sampler reads a row of logits each (by a model of an H100, some 8.6 ms for
# a step of 256 rows of an 8B model versus 6.1 ms for one row). So there are decode programs of several sizes. A chunk
# below 128 tokens saves nothing. Matrix products reach full throughput at some 2,000 rows (H100, 8B model: 23 us a
# token in chunks of 2,048, 35 us in chunks of 256); wide programs give short prompts that many. The limit is memory:
# activations of 4,096 rows of an 8B model take 0.6 GB, which a device of 24 GB needs for pages. ``memory`` is what JAX
# may allocate, three quarters of the total by default. XLA norms a single row in two kernels, several rows in one.
_ROWS = (2, 8, 16, 32, 64, 128, 256)
_GPU = (
    (36 * _GIB, Defaults(256, (128, 256, 512, 1024, 2048), 4096, 4096, min_rows=2, decode_sizes=_ROWS)),
    (15 * _GIB, Defaults(128, (128, 256, 512, 1024), 2048, 2048, min_rows=2, decode_sizes=_ROWS)),
    (0, Defaults(64, (128, 256, 512), 1024, 2048, min_rows=2, decode_sizes=_ROWS)),
)


def of_platform(platform: str, memory: int = 0) -> Defaults:
    """Return the defaults for "cpu" or "gpu" with ``memory`` bytes; 0: unknown, taken as enough."""
    if platform == "cpu":
        return CPU
    found = next(defaults for least, defaults in _GPU if not memory or memory >= least)
    return found._replace(memory=memory)
