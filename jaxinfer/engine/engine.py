"""The engine: requests in, deltas out, one step at a time."""

from __future__ import annotations

import dataclasses
import secrets

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig, resolve
from jaxinfer.engine.runner import Launched, Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.kv.manager import KVManager
from jaxinfer.models.model import Model
from jaxinfer.sampling import SamplingLimits
from jaxinfer.types import Request, SequenceDelta


class Engine:
    """Continuous decoding of token-id requests on one model.

    Everything is compiled in the constructor; a request compiles nothing.
    """

    def __init__(self, model: Model, config: EngineConfig, platform: str) -> None:
        # XLA:CPU runs one-row bfloat16 products twenty times slower than two-row ones.
        min_rows = 2 if platform == "cpu" and model.dtype != jnp.float32 else 1
        self.config = resolve(
            config,
            model.cache_spec,
            max_position=model.config.max_position,
            itemsize=model.dtype.itemsize,
            min_rows=min_rows,
            prefill_rows=_prefill_rows(model, platform),
        )
        self.limits = SamplingLimits(max_logprobs=self.config.max_logprobs)
        resolved = self.config
        kv = KVManager(resolved.num_pages, resolved.page_size, resolved.rows, resolved.table_width)
        self._scheduler = Scheduler(resolved, kv)
        self._runner = Runner(model, resolved, self.limits, kv.tables)
        self._pending: Launched | None = None
        self._seeds = np.random.default_rng(resolved.seed if resolved.seed is not None else secrets.randbits(64))

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._pending is not None

    def add(self, request: Request) -> Request:
        """Queue a validated request; returns it with its seed resolved.

        Raises:
            RequestError: it can never fit.
        """
        if request.params.seed is None:
            seed = int(self._seeds.integers(2**63))
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        self._scheduler.add(request)
        return request

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its samples) without another delta."""
        self._scheduler.abort(request_id, index)

    def step(self) -> list[SequenceDelta]:
        """Launch the next step, then read the one before it: the device never waits for the host."""
        launched = self._runner.launch(self._scheduler.plan())
        deltas = self._scheduler.commit(self._runner.read(self._pending))
        self._pending = launched
        return deltas

    def check(self) -> None:
        """Raises AssertionError unless slots and pages are all accounted for."""
        self._scheduler.check()


def _prefill_rows(model: Model, platform: str) -> int:
    """Rows that fill the device. On a CPU products of few rows spend half their time packing weights; beyond some
    2e11 operations a program would gain nothing and its proof at start-up cost seconds."""
    if platform != "cpu":
        return 512
    operations = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return max(1, min(512, 200_000_000_000 // operations))
