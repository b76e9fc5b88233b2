"""The engine: requests in, deltas out, one step at a time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine, resolve
from jaxinfer.engine.compilations import count_compilations
from jaxinfer.engine.compiled import CompileProgress
from jaxinfer.engine.executor import Executor, MakeExecutor
from jaxinfer.engine.placement import spread_model
from jaxinfer.engine.queues import Queued
from jaxinfer.engine.runner import Launched, Proved, Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.stats import EngineStats
from jaxinfer.kv.manager import KVConfig, KVManager
from jaxinfer.kv.pool import no_kernel
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.quant import rounds_activations
from jaxinfer.sampling import SamplingLimits
from jaxinfer.spec import Drafter, NgramDrafter
from jaxinfer.types import Request, SequenceDelta


class Engine:
    """Continuous batching of token-id requests on one model.

    Everything is compiled in the constructor; a request compiles nothing.

    Args:
        progress: called at the beginning and after each compilation.
        mesh: the devices that it runs on; None: the first ones.
        make_executor: makes another one than `Executor`.
        proved: of the executor's programs, where another engine found it out.

    Raises:
        EngineConfigError: a setting cannot be served.
        ValueError: the mesh has more than one place along ``data`` (see `jaxinfer.engine.replicas`).
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        platform: str,
        progress: CompileProgress | None = None,
        mesh: Mesh | None = None,
        make_executor: MakeExecutor = Executor,
        proved: Proved | None = None,
    ) -> None:
        mesh = mesh or mesh_for(config)
        if mesh.shape["data"] != 1:
            raise ValueError("an engine runs on one replica: jaxinfer.engine.replicas makes several")
        model, self.config, self.limits = prepare(model, config, platform, mesh)
        self._kv = _new_kv(model, self.config)
        self._executor = make_executor(model, self.config, self.limits, mesh, progress)
        vocab, itemsize = model.config.vocab_size, model.dtype.itemsize
        self._runner = Runner(
            self._executor, self.config, self.limits, self._kv.tables, vocab, model.cache_spec, itemsize, proved
        )
        self.proved = proved = self._runner.proved
        if not proved.resumes:
            self._kv.stop_caching()  # a prompt that goes on within a piece would have other bits
        self._scheduler = Scheduler(
            dataclasses.replace(self.config, multi_step=proved.multi_step),
            self._kv,
            proved.classes,
            drafter=_drafter(self.config),
            costs=proved.costs,
        )
        self._pending: collections.deque[Launched] = collections.deque()
        self._ahead = self.config.turns if self.config.async_scheduling else 0
        self._last_read = time.monotonic()
        seed = self.config.seed
        self._seeds = np.random.default_rng(seed if seed is not None else secrets.randbits(64))
        ready = contextlib.ExitStack()
        self._compiled = ready.enter_context(count_compilations())
        weakref.finalize(self, ready.close)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._pending)

    def add(self, request: Request) -> Request:
        """Queue a validated request; returns it with its seed resolved.

        Raises:
            RequestError: its id is in use, or it can never fit.
            QueueFullError: too much is waiting.
        """
        if request.params.seed is None:
            seed = int(self._seeds.integers(2**63))
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed))
        self._scheduler.add(request)
        return request

    def check_room(self, request: Request, ahead: int = 0) -> None:
        """What `add` would say of the queue; see `Scheduler.check_room`. From any thread, also while a step runs.

        Raises:
            QueueFullError: too much is waiting.
        """
        self._scheduler.check_room(request, ahead)

    @property
    def alive(self) -> int:
        """Sequences that wait or run."""
        return self._scheduler.running + sum(self._scheduler.waiting.values())

    @property
    def queued(self) -> Queued:
        """What waits. From any thread."""
        return self._scheduler.queued

    def cached(self, request: Request) -> int:
        """Tokens of a prompt that would be found in the prefix cache now."""
        return self._scheduler.cached(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its samples) without another delta."""
        self._scheduler.abort(request_id, index)

    def step(self) -> list[SequenceDelta]:
        """Launch the next step, then read an earlier one: the device never waits for the host."""
        return self.read(self.launch())

    def launch(self) -> bool:
        """Plan the next step and send it on its way; whether there was anything to do."""
        launched = self._runner.launch(self._scheduler.plan())
        if launched is not None:
            self._pending.append(launched)
        return launched is not None

    def read(self, launched: bool) -> list[SequenceDelta]:
        """The results of the oldest step, if it is due: as many may be on their way as there are pipeline stages, each
        in another one, and all are read when nothing more was ``launched``."""
        due = self._pending and (not launched or len(self._pending) > self._ahead)
        before = self._pending.popleft() if due else None
        deltas = self._scheduler.commit(self._runner.read(before))
        self._time_step(before)
        return deltas

    def _time_step(self, read: Launched | None) -> None:
        now = time.monotonic()
        if read is not None:
            self._scheduler.stats.step(now - self._last_read)
        self._last_read = now

    def stats(self) -> EngineStats:
        """What runs, waits and is held now, and what was counted since the start."""
        scheduler = self._scheduler
        return scheduler.stats.snapshot(
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv=self._kv.usage(),
            compilations=self._compiled.count,
        )

    def temporaries(self) -> int:
        """Bytes of device memory that the hungriest program uses while it runs."""
        return self._executor.temporaries()

    def reset_prefix_cache(self) -> int:
        """Forget every cached page that no sequence uses; how many those were."""
        return self._kv.reset_prefix_cache()

    def check(self) -> None:
        """Raises AssertionError unless slots and pages are all accounted for."""
        self._scheduler.check()


def prepare(
    model: Model, config: EngineConfig, platform: str, mesh: Mesh
) -> tuple[Model, ResolvedEngine, SamplingLimits]:
    """What an `Executor` is made of: the model as it is spread, as far as it is served.

    Raises:
        EngineConfigError: a setting cannot be served.
    """
    model = as_served(model, config, platform, mesh)
    resolved = resolve_for(model, config, platform)
    model = model.with_cache(resolved.kv_cache_dtype).up_to(resolved.max_model_len)
    return model, resolved, SamplingLimits(max_logprobs=resolved.max_logprobs)


def with_activations(model: Model, config: EngineConfig) -> Model:
    """The model with products as ``activation_dtype`` asks for.

    Raises:
        EngineConfigError: no weight is stored in a way that goes with it.
    """
    changed = model.with_activations(config.activation_dtype)
    if config.activation_dtype not in ("auto", "none") and not rounds_activations(changed.params):
        raise EngineConfigError(
            f"activation_dtype = {config.activation_dtype!r} cannot be: no weight of the model is stored in that dtype "
            f"with a scale a channel"
        )
    return changed


def as_served(model: Model, config: EngineConfig, platform: str, mesh: Mesh) -> Model:
    """The same function in the form in which an engine on a platform has it. Parameters may be abstract.

    Raises:
        EngineConfigError: see `with_activations` and `spread_model`.
    """
    spread = spread_model(with_activations(model, config), mesh)
    return spread.for_kernels() if platform == "gpu" else spread


def resolve_for(model: Model, config: EngineConfig, platform: str) -> ResolvedEngine:
    """`jaxinfer.config.resolve` for a model, whose parameters may be abstract, on a platform.

    Raises:
        EngineConfigError: a setting cannot be served.
    """
    # XLA:CPU runs one-row products of bfloat16 or 8-bit numbers twenty times slower than two-row ones.
    narrow = model.dtype != jnp.float32 or rounds_activations(model.params)
    min_rows = 2 if platform == "cpu" and narrow else 1
    resolved = resolve(
        config,
        model.cache_spec,
        max_position=model.config.max_position,
        itemsize=model.dtype.itemsize,
        min_rows=min_rows,
        prefill_rows=_prefill_rows(model, platform),
    )
    _require_backend(model, config, platform)
    return resolved


def _require_backend(model: Model, config: EngineConfig, platform: str) -> None:
    if config.attention_backend != "mosaic":
        return
    spec = model.cache_spec.stored_as(config.kv_cache_dtype)
    if not spec.latent:  # each device works on its own heads
        spec = dataclasses.replace(spec, kv_heads=spec.kv_heads // config.devices)
    why = no_kernel(spec, config.page_size, model.dtype)
    if platform == "cpu":
        why = "its kernels are for GPUs, and this is a CPU"
    if why is not None:
        raise EngineConfigError(f"attention_backend = mosaic cannot be: {why}")


def _prefill_rows(model: Model, platform: str) -> int:
    """Rows that fill the device. On a CPU products of few rows spend half their time packing weights; beyond some
    2e11 operations a program would gain nothing and its proof at start-up cost seconds."""
    if platform != "cpu":
        return 512
    operations = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return max(1, min(512, 200_000_000_000 // operations))


def _new_kv(model: Model, engine: ResolvedEngine) -> KVManager:
    return KVManager(
        KVConfig(
            pages=engine.num_pages,
            page_size=engine.page_size,
            slots=engine.rows,
            width=engine.table_width,
            windows=model.cache_spec.windows,
            host_pages=engine.host_pages,
            prefix_caching=engine.enable_prefix_caching,
        )
    )


def _drafter(engine: ResolvedEngine) -> Drafter | None:
    if engine.speculative is None:
        return None
    return NgramDrafter(engine.prompt_lookup_min, engine.prompt_lookup_max)
