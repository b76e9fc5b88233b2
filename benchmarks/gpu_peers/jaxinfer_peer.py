"""jaxinfer as a peer: an engine with its defaults, except for the settings that all engines share.

With random weights JAX, Flax and numpy suffice: checkpoint readers are imported only for a checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from benchmarks.gpu_peers.drive import drive
from benchmarks.gpu_peers.loads import Load
from benchmarks.peers.protocol import Reply, answer
from jaxinfer.compilations import use_compilation_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.make import make_engine
from jaxinfer.gpu_check.llama import random_model
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from jaxinfer.version import __version__


class JaxInfer:
    """A jaxinfer engine, stepped in the process that holds it."""

    def __init__(self) -> None:
        self._engine: EngineCore | None = None
        self._runs = 0

    def load(self, config: dict[str, Any], settings: dict[str, Any], folder: str = "", cache: str = "") -> Reply:
        """Load ``folder``, or random weights of ``config`` without one. ``cache``: compilation cache folder."""
        given = dict(settings)
        dtype = given.pop("dtype")
        start = time.perf_counter()
        model = _read(folder, dtype) if folder else random_model(config)
        loaded = time.perf_counter()
        engine = EngineConfig(
            enable_prefix_caching=False, memory_utilization=given.pop("gpu_memory_utilization"), seed=0, **given
        )
        use_compilation_cache(cache)
        self._engine = make_engine(model, engine, jax.default_backend())
        found = self._engine.config
        return {
            "weights_seconds": round(loaded - start, 2),
            "engine_seconds": round(time.perf_counter() - loaded, 2),
            "num_pages": found.num_pages,
            "rows": found.rows,
            "prefill_sizes": list(found.prefill_sizes),
            "prefill_batch_sizes": list(found.prefill_batch_sizes),
        }

    def run(self, load: dict[str, Any], seed: str, vocab: int, rate: float | None) -> Reply:
        assert self._engine is not None
        given = Load(**load)
        self._runs += 1
        stepped = _Stepped(self._engine, f"{self._runs}")
        return drive(stepped, given, given.prompts(seed, vocab), given.due(seed, rate))

    def generate(self, prompt: list[int], output: int) -> Reply:
        """Return the greedy tokens of one prompt."""
        assert self._engine is not None
        self._engine.add(Request("check", tuple(prompt), _greedy(output)))
        tokens: list[int] = []
        while self._engine.has_work:
            for delta in self._engine.step():
                tokens += delta.token_ids
        return {"tokens": tokens}


def _read(folder: str, dtype: str) -> Model:
    return importlib.import_module("jaxinfer.loading").load_model(folder, dtype, show_progress=False)


class _Stepped:
    def __init__(self, engine: EngineCore, name: str) -> None:
        self._engine, self._name = engine, name

    def add(self, request: int, prompt: Sequence[int], output: int) -> None:
        self._engine.add(Request(f"{self._name}-{request}", tuple(prompt), _greedy(output)))

    def step(self) -> Iterable[tuple[int, int]]:
        return [(int(delta.request_id.split("-")[1]), len(delta.token_ids)) for delta in self._engine.step()]

    @property
    def has_work(self) -> bool:
        return self._engine.has_work


def _greedy(output: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)


if __name__ == "__main__":
    peer = JaxInfer()
    versions = {"jaxinfer": __version__} | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    answer(versions, {"load": peer.load, "run": peer.run, "generate": peer.generate})
