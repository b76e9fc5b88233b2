"""Engine of one replica: a model on its devices, with continuous batching of requests, one step at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from jaxinfer.compilations import compilations_during
from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.engine.execution.calibration import Calibration, calibrate
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import LocalExecutor, MakeExecutor
from jaxinfer.engine.execution.on_policy import ServedPrograms, served_programs
from jaxinfer.engine.execution.prepare import Prepared, prepared_weights
from jaxinfer.engine.execution.runner import Runner
from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.structured.matcher import Vocabulary


class Engine(EngineLoop):
    """Continuous batching of token-id requests on one model: an `EngineCore`.

    All programs are compiled in the constructor; a request compiles none.

    Args:
        mesh: devices of the engine; None: the first ones.
        progress: called at the beginning and after each compilation.
        make_executor: factory of an executor other than `LocalExecutor`.
        calibration: calibration of the executor's programs, if another engine has made it.
        loras: adapters that requests may name; None: requests have none.

    Raises:
        ValueError: the mesh has a ``data`` axis larger than 1 (see `jaxinfer.engine.distributed.make`).
    """

    def __init__(
        self,
        prepared: Prepared,
        mesh: Mesh | None = None,
        progress: CompileProgress | None = None,
        make_executor: MakeExecutor = LocalExecutor,
        calibration: Calibration | None = None,
        loras: LoRAStore | None = None,
    ) -> None:
        mesh = mesh or mesh_for(prepared.config)
        if mesh.shape["data"] != 1:
            raise ValueError("an engine runs on one replica: jaxinfer.engine.distributed.make makes several")
        model, engine, limits = prepared
        self._executor, self._mesh = make_executor(prepared, mesh, progress), mesh
        platform = mesh.devices.flat[0].platform
        self.calibration = found = calibration or calibrate(self._executor, prepared, platform)
        self._programs = served_programs(prepared, found.size_classes, mesh)
        kv = new_kv(engine, model.cache_spec.windows)
        if not found.exact_resume:
            kv.stop_caching()  # resuming a prompt within a chunk would not be bitwise identical
        vocab = model.config.vocab_size
        batches, sizes = found.prefill_batches, found.decode_sizes
        vision = model.vision
        runner = Runner(self._executor, engine, limits, kv.tables, vocab, batches, sizes, vision)
        engine = dataclasses.replace(engine, multi_step=found.multi_step)
        super().__init__(
            engine,
            kv,
            runner,
            limits=limits,
            size_classes=found.size_classes,
            decode_agrees=found.decode_agrees,
            vocab_size=vocab,
            costs=found.costs,
            loras=loras,
            axes=vision.family.axes(vision.config) if vision is not None and vision.family.axes is not None else None,
            vocabulary=functools.partial(_vocabulary, model.tokenizer, vocab) if limits.grammars else None,
        )
        self._compiled = compilations_during(self)

    def _compilations(self) -> int:
        return self._compiled.count

    def served_programs(self) -> ServedPrograms:
        return self._programs

    def usage(self) -> Usage:
        return self._executor.usage().timed(self.busy.busy, self.busy.seconds)

    def temporaries(self) -> int:
        return self._executor.temporaries()

    def launch(self) -> bool:
        if self.shares_weights and self.has_work and (path := self._executor.deleted()) is not None:
            raise DeletedWeightsError(path)
        return super().launch()

    def stage(self, model: Model, *, drafts: bool = False) -> Any:
        platform = self._mesh.devices.flat[0].platform
        return self._executor.stage(prepared_weights(model, self.config, platform, self._mesh), drafts=drafts)

    def swap(self, weights: Sequence[Any], version: int, *, restart: bool = True) -> None:
        self.settle()
        self._executor.swap(weights)
        self.renew(version, restart=restart)

    def sleep(self, *, cache: bool, weights: bool) -> None:
        super().sleep(cache=cache, weights=weights)
        self._executor.sleep(cache=cache, weights=weights)

    def wake(self) -> None:
        self._executor.wake()


class DeletedWeightsError(RuntimeError):
    """Error for served parameters whose arrays another owner has deleted."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} was deleted: a program that donates arguments, such as an optimizer's step, took an array that is "
            f"served. Serve a copy: LLM(model, copy=True), update_weights(params, copy=True)"
        )


def _vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Return the vocabulary for grammars: the bytes of the tokens that a model scores (special tokens: their names)."""
    tokens = [tokenizer.token_bytes(number) for number in range(min(size, tokenizer.vocab_size))]
    special, ends = ([each for each in ids if each < size] for ids in (tokenizer.special_ids, tokenizer.eos_ids))
    return Vocabulary(tokens, frozenset(special), tuple(ends), size)
