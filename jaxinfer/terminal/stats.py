"""Statistics of a `generate` run: latencies, throughput, and share of the memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.models.model import Model
from jaxinfer.outputs import Delta, RequestOutput
from jaxinfer.parallel.arrays import array_bytes

_SEEDS = 4


class Clock:
    """Arrival times of the tokens of each output, in seconds since the prompts were submitted."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._times: dict[tuple[int, int], list[float]] = {}
        self.seconds = 0.0

    def tick(self, delta: Delta) -> None:
        now = time.perf_counter() - self._start
        self._times.setdefault((delta.request, delta.index), []).extend([now] * len(delta.token_ids))

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self._start

    @property
    def first_token(self) -> float:
        """Median time to first token."""
        return statistics.median(times[0] for times in self._times.values())

    @property
    def per_token(self) -> float | None:
        """Median over outputs of the mean time per token after the first; None if no output has a second token."""
        means = [(t[-1] - t[0]) / (len(t) - 1) for t in self._times.values() if len(t) > 1]
        return statistics.median(means) if means else None


def measured_bandwidth(size: int = 1 << 28, repeats: int = 5) -> float:
    """Measure this device's memory read bandwidth in bytes/s: the best of ``repeats`` reads of ``size`` bytes."""
    block = jnp.ones((size // 4,), jnp.float32).reshape(-1, 1024)
    read = jax.jit(lambda x: x.sum(0)).lower(block).compile()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(read(block))
        times.append(time.perf_counter() - start)
    return size / min(times)


def bytes_per_step(model: Model, contexts: Sequence[int]) -> int:
    """Return the bytes that one decode step must read: all weights once (except an untied embedding table), and the
    keys and values of each sequence, of ``contexts`` tokens."""
    weights = _bytes(model.params)
    if not model.config.tied:
        weights -= _bytes(model.params["embed"]["table"])
    return weights + sum(contexts) * model.cache_spec.bytes_per_page(1, model.dtype.itemsize)


def _bytes(tree: Any) -> int:
    return sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def report(model: Model, clock: Clock, outputs: Sequence[RequestOutput], bandwidth: float, engine: EngineStats) -> str:
    """Return the text that ``--stats`` prints."""
    samples = [(len(o.prompt_token_ids), len(c.token_ids)) for o in outputs for c in o.outputs]
    total = sum(count for _, count in samples)
    lines = [
        f"prompt tokens      {sum(len(o.prompt_token_ids) for o in outputs)}",
        f"generated tokens   {total} in {clock.seconds:.3f} s: {total / clock.seconds:.1f} tokens/s",
        f"seeds              {_seeds([output.seed for output in outputs])}",
        f"TTFT (median)      {clock.first_token * 1e3:.1f} ms",
    ]
    if clock.per_token is not None:
        needed = bytes_per_step(model, [prompt + count // 2 for prompt, count in samples])
        share = needed / clock.per_token / bandwidth
        lines += [
            f"TPOT (median)      {clock.per_token * 1e3:.2f} ms",
            f"memory bandwidth   {needed / clock.per_token / 1e9:.1f} GB/s of weights and KV read, "
            f"{share:.0%} of the {bandwidth / 1e9:.1f} GB/s measured",
        ]
    return "\n".join(lines + _engine_lines(engine))


def _seeds(seeds: Sequence[int]) -> str:
    """Format the first seeds used: passing one as --seed reproduces the text."""
    more = f" and {len(seeds) - _SEEDS} more (--json has all)" if len(seeds) > _SEEDS else ""
    return ", ".join(map(str, seeds[:_SEEDS])) + more


def _engine_lines(stats: EngineStats) -> list[str]:
    """Format prefix cache, speculation and preemption counts; features that were not used have no line."""
    lines = []
    if stats.prefix_hits:
        lines.append(f"prefix cache       {stats.prefix_hits} of {stats.prefix_queries} prompt tokens found")
    if stats.drafts:
        mean, places = 1 + stats.draft_accepted / stats.drafts, stats.draft_accepted_at
        lines.append(
            f"draft tokens       {stats.draft_accepted} of {stats.draft_tokens} accepted, mean acceptance length "
            f"{mean:.2f}, by place " + ", ".join(f"{count / stats.drafts:.0%}" for count in places)
        )
    if any(stats.preemptions.values()):
        kinds = ", ".join(f"{count} by {kind}" for kind, count in stats.preemptions.items() if count)
        lines.append(f"preemptions        {kinds}; {stats.replayed_tokens} tokens computed again")
    return lines
