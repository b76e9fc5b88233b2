"""Engine core process: `python -m jaxinfer.serve.core`, started by the front end (see supervisor.py)."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import time
from typing import Literal

import jax

from jaxinfer.config import EngineConfigError, ResolvedEngine
from jaxinfer.engine.distributed.leader import FollowerMemory, follow, report_usage
from jaxinfer.group_weights import FollowingWeights, LeadingWeights
from jaxinfer.loading import StartProgress, open_weights, start_engine, start_follower
from jaxinfer.models.model import Model
from jaxinfer.opening import LOADING_ERRORS, model_folder
from jaxinfer.parallel.group import Group, GroupError
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.core import process
from jaxinfer.serve.core.group import enter_group, run_follower
from jaxinfer.serve.core.messages import StartupEvent
from jaxinfer.serve.core.service import Built, Report
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.core.summary import summary
from jaxinfer.served import ServedModel, without_weights
from jaxinfer.text.intake import recommended_sampling
from jaxinfer.weights.open import open_model_files

_MOST_TRACE_BYTES = 4 << 30

_log = logging.getLogger("jaxinfer.serve.core")


def build(settings: CoreSettings, report: Report) -> Built:
    """Load the model and build its engine, as `jaxinfer.LLM` does.

    Raises:
        CheckpointError, ConfigError, TokenizerError, TemplateError, EngineConfigError: see `start_engine`.
        GroupError: see `enter_group`.
    """

    def weights(done: int, total: int, name: str) -> None:
        report(StartupEvent("loading_weights", bytes_done=done, bytes_total=total))

    def compiled(done: int, total: int) -> None:
        phase: Literal["checking", "compiling"] = "checking" if done == total else "compiling"
        report(StartupEvent(phase, compilations_done=done, compilations_total=total))

    def starting() -> None:
        report(StartupEvent())

    starting()
    folder = model_folder(settings.model)
    group, progress = enter_group(settings, folder, starting), StartProgress(weights, compiled)
    if group is not None and not group.leads:
        return _follow(settings, folder, group, progress)
    model, engine = start_engine(
        settings.model,
        settings.engine,
        settings.dtype,
        family=settings.family,
        chat_template=settings.chat_template,
        check_finite=settings.check_finite,
        compilation_cache_dir=settings.compilation_cache_dir,
        show_progress=False,
        progress=progress,
        group=group,
    )
    _log.info("%s", summary(model, engine.config))
    profiler = None if settings.profile_dir is None else JaxProfiler(pathlib.Path(settings.profile_dir))
    card, journals = describe(model, engine.config, settings, folder), engine.journals() if settings.kv_events else ()
    read = functools.partial(read_weights, without_weights(model), engine.config, settings)
    if group is not None:
        leading = LeadingWeights(model, engine, group, read, settings.weights_root, check_finite=settings.check_finite)
        return Built(engine, card, str(folder), profiler, journals, leading, _listed)
    served = ServedModel(model, engine, check_finite=settings.check_finite)
    return Built(engine, card, str(folder), profiler, journals, served, read)


def _listed(*folders: str) -> tuple[str, ...]:
    """Return the folders themselves: each process of a group reads them."""
    return folders


def read_weights(model: Model, config: ResolvedEngine, settings: CoreSettings, folder: str, *parts: str) -> Model:
    """Open new weights for a served model, see `open_weights`.

    Args:
        model: the served model; its parameters may be abstract.

    Raises:
        RequestError: they cannot be served.
    """
    try:
        return open_weights(folder, model, config, parts=parts, family=settings.family)
    except (*LOADING_ERRORS, EngineConfigError, OSError) as error:
        raise RequestError("path", f": {error}") from error


def _follow(settings: CoreSettings, folder: pathlib.Path, group: Group, progress: StartProgress) -> Built:
    model, config, executors = start_follower(
        settings.model,
        settings.engine,
        group,
        settings.dtype,
        family=settings.family,
        chat_template=settings.chat_template,
        check_finite=settings.check_finite,
        compilation_cache_dir=settings.compilation_cache_dir,
        progress=progress,
    )
    served = ServedModel(model, FollowerMemory(executors, config), check_finite=settings.check_finite)
    read = functools.partial(read_weights, without_weights(model), config, settings)
    weights = FollowingWeights(served, group, read, settings.weights_root)
    run_follower(
        group,
        engine=lambda: follow(executors, group, weights.changes),
        weights=weights.listen,
        usage=lambda: report_usage(executors, group),
    )
    return Built(None, describe(model, config, settings, folder), str(folder))


def folder_name(model: str, folder: pathlib.Path) -> str:
    """Return the default model name for clients: the name that was requested, or the last component of a path."""
    if not pathlib.Path(model).exists():
        return model
    return folder.stem if folder.is_file() else folder.name


def describe(model: Model, config: ResolvedEngine, settings: CoreSettings, folder: pathlib.Path) -> ModelCard:
    """Return the model card of a model and its engine."""
    named = open_model_files(folder).config_json.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else type(model.module).__name__
    return ModelCard(
        name=settings.served_model_name or folder_name(settings.model, folder),
        architecture=architecture,
        dtype=str(model.dtype),
        max_model_len=config.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=list(model.tokenizer.eos_ids) if model.tokenizer is not None else [],
        defaults=recommended_sampling(model.generation_config),
        engine=dataclasses.asdict(config),
        created=int(time.time()),
        image_processor=model.vision.family.maker if model.vision is not None and config.images is not None else "",
    )


class JaxProfiler:
    """A profiler that writes traces for TensorBoard and Perfetto below a folder, until that has ``max_bytes``.

    A trace has programs and kernels, and no Python functions: these are many in a step, and would slow it down.
    """

    def __init__(self, folder: pathlib.Path, max_bytes: int = _MOST_TRACE_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def start(self) -> None:
        size = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        if size >= self._max_bytes:
            raise RuntimeError(f"the folder of profiles has {size} bytes, and may have {self._max_bytes}: clear it")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self._folder), profiler_options=options)

    def stop(self) -> str:
        jax.profiler.stop_trace()
        return str(self._folder)


if __name__ == "__main__":
    logging.getLogger("jax").setLevel(logging.WARNING)  # at "info" it logs each missing platform
    process.run(build, (*LOADING_ERRORS, EngineConfigError, GroupError))
