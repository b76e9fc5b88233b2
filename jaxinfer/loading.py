"""Loading of a model by name (the demo, a folder or a hub id), and start of an engine that serves it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.compilations import timed, use_compilation_cache
from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine
from jaxinfer.config.aliases import draft_of
from jaxinfer.config.quantization import QuantizationConfig
from jaxinfer.draft_heads import describe_head, load_head
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.make import make_engine, make_followers
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.placement import (
    link_bandwidth,
    offloaded,
    place_of,
    shardable_model,
    with_tensor_size,
)
from jaxinfer.engine.execution.prepare import resolve_for, with_activations
from jaxinfer.engine.execution.stages import cut
from jaxinfer.formats.multimodal import text_model
from jaxinfer.images.expansion import for_vocabulary, within
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.edits import require_described, require_one_dtype, require_specified
from jaxinfer.models.model import Model
from jaxinfer.models.registry import HEADS, Family
from jaxinfer.opening import (
    checked_dtype,
    describe_model,
    described_by,
    filled_params,
    saved_specs,
    warn_of_others,
    write_companions,
)
from jaxinfer.parallel.group import Group
from jaxinfer.parallel.mesh import make_mesh, mesh_for, require_mesh, stages
from jaxinfer.parallel.processes import own_devices, require_processes
from jaxinfer.planner.memory import MemoryPlan
from jaxinfer.quant import layout_for_cpu, with_values
from jaxinfer.quant.make.recipe import Recipe, RecipeError
from jaxinfer.quantize.on_load import Loading, described
from jaxinfer.quantize.settings import recipe_for, refused, samples_for
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.text import (
    ChatTemplate,
    find_tokenizer,
    given_template,
    load_template,
)
from jaxinfer.text.intake import recommended_sampling
from jaxinfer.types import ParamSpec
from jaxinfer.weights import CheckpointError, on_devices, save_params
from jaxinfer.weights.files import ModelFiles
from jaxinfer.weights.load import Progress, deferred
from jaxinfer.weights.native.manifest import is_converted
from jaxinfer.weights.progress import loading_bar
from jaxinfer.weights.safetensors.checkpoint import read_json_object
from jaxinfer.weights.tree import Fill, Place
from pallas_kernels.matmul import Layout

_log, _start_log = logging.getLogger("jaxinfer"), logging.getLogger("jaxinfer.start")
_AS_IT_IS = QuantizationConfig()


@dataclasses.dataclass(frozen=True)
class StartProgress:
    """Progress callbacks of a start; None: no callback.

    Attributes:
        weights: called after each tensor, see `load_params`.
        compiled: called at the beginning and after each compilation.
    """

    weights: Progress | None = None
    compiled: CompileProgress | None = None


def start_engine(
    model: str | Model,
    config: EngineConfig,
    dtype: str = "auto",
    *,
    family: str = "auto",
    chat_template: str | None = None,
    check_finite: bool = False,
    compilation_cache_dir: str | None = None,
    show_progress: bool = True,
    progress: StartProgress = StartProgress(),
    group: Group | None = None,
) -> tuple[Model, EngineCore]:
    """Plan memory, load weights and compile: turn the user's settings into a running engine.

    Args:
        model: "demo", a folder, a hub id, or a `Model`, which is served exactly as it is.
        dtype: see `load_model`; for a `Model`, "auto" keeps its dtype, any other value casts its parameters.
        family, chat_template, check_finite, show_progress: see `load_model`.
        compilation_cache_dir: where compiled programs are kept between runs; "" keeps none.
        group: process group with this as process 0; the others call `start_follower` with the same settings.

    Raises:
        CheckpointError, ConfigError, TokenizerError, TemplateError, EngineConfigError: one sentence with the reason. A
            model that does not fit into memory is rejected before the weights are loaded.
        ValueError: parameters of a `Model` do not match its specs; names the first.
    """
    use_compilation_cache(compilation_cache_dir)
    platform = jax.default_backend()
    in_memory = _as_dtype(model, dtype) if isinstance(model, Model) else None
    if chat_template is not None:
        given = given_template(chat_template)  # reject an invalid template before planning
        in_memory = in_memory and in_memory.replace(chat_template=_with_tokens(given, in_memory))
    if in_memory and config.quantization is not None:
        raise refused(config, "a Model is served as it is: load_model(..., quantization=...) quantises")
    planned = in_memory or abstract_model(str(model), dtype, family, quantization=config)
    with timed("memory planned"):
        planned = with_draft(planned, config, abstract_draft(config, dtype))
        config = _with_tensor_size(config, planned)
        mesh = mesh_for(config)
        layout = _layout(planned, config, mesh) if in_memory is None else None
        plan, sized = _plan(planned.laid_out(layout) if layout else planned, config, mesh, group)
    load = functools.partial(
        load_model, check_finite=check_finite, show_progress=show_progress, progress=progress.weights, mesh=mesh
    )
    target = functools.partial(load, quantization=config, weight_offload_gib=config.weight_offload_gib)
    with timed("weights loaded"):
        loaded = in_memory or target(str(model), dtype, family=family, chat_template=chat_template)
        loaded = with_activations(loaded, config)  # the caller gets the model that is served
        loaded = with_draft(loaded, config, _loaded_draft(config, functools.partial(load, dtype=dtype), mesh))
        loaded = offloaded(loaded.laid_out(layout) if layout else loaded, config.weight_offload_gib, mesh)
    _report_offload(plan, mesh)
    engine = make_engine(loaded, sized, platform, progress.compiled, mesh, group)
    plan.require(engine.temporaries)
    if loaded.vision is not None and (sizes := engine.config.encoder_sizes):
        bounded = within(loaded.vision.processor, sizes[-1])
        loaded = loaded.replace(vision=dataclasses.replace(loaded.vision, processor=bounded))
    _warn_of_long_texts(loaded, engine.config.max_model_len)
    return loaded, engine


def _with_tensor_size(config: EngineConfig, model: Model) -> EngineConfig:
    found = with_tensor_size(config, model, jax.devices())
    if found is not config:
        used, size = mesh_for(found).size, found.tensor_parallel_size
        _start_log.info("tensor_parallel_size = auto is %d: %d of %d devices", size, used, jax.device_count())
    return found


def _report_offload(plan: MemoryPlan, mesh: Mesh) -> None:
    """Log what weights in host memory cost, if there are any."""
    if plan.needs.host.layers:
        device = own_devices(mesh)[0]
        _start_log.info(plan.needs.host.text(None if device.platform == "cpu" else link_bandwidth(device)))


def _with_tokens(template: ChatTemplate, model: Model) -> ChatTemplate:
    """Return the template with the special tokens of the model's tokenizer."""
    return ChatTemplate(template.sources, {} if model.tokenizer is None else model.tokenizer.texts)


def _layout(model: Model, config: EngineConfig, mesh: Mesh) -> Layout | None:
    """Return the matrix layout for a model that the engine loads itself; None: the layout of the family."""
    if jax.default_backend() != "cpu" or mesh.size > 1:
        return None
    return layout_for_cpu(resolve_for(model, config, "cpu", mesh).rows, model.dtype.itemsize)


def _warn_of_long_texts(model: Model, length: int) -> None:
    """Warn that longrope computes short texts with the long factors, if the checkpoint distinguishes them."""
    ropes = [value for value in vars(model.config).values() if isinstance(value, RopeConfig)]
    original = min((rope.original_max_position for rope in ropes if rope.kind == "longrope"), default=length)
    if length > original:
        _log.warning(
            f"max_model_len = {length}: texts of up to {original} tokens, too, are computed with the long factors of "
            f"longrope; max_model_len = {original} serves those with the short ones (docs/rope.md)"
        )


def start_follower(
    model: str,
    config: EngineConfig,
    group: Group,
    dtype: str = "auto",
    *,
    family: str = "auto",
    chat_template: str | None = None,
    check_finite: bool = False,
    compilation_cache_dir: str | None = None,
    progress: StartProgress = StartProgress(),
) -> tuple[Model, ResolvedEngine, dict[int, LocalExecutor]]:
    """Load and compile the shard of this process, which is not the first of its group; see `start_engine`.

    The executors are for `jaxinfer.engine.distributed.leader.follow`. Arguments and errors are those of `start_engine`.
    """
    use_compilation_cache(compilation_cache_dir)
    planned = abstract_model(model, dtype, family, quantization=config)
    planned = with_draft(planned, config, abstract_draft(config, dtype))
    config = _with_tensor_size(config, planned)
    mesh = mesh_for(config)
    plan, sized = _plan(planned, config, mesh, group)
    load = functools.partial(
        load_model, check_finite=check_finite, show_progress=False, progress=progress.weights, mesh=mesh
    )
    draft = _loaded_draft(config, functools.partial(load, dtype=dtype), mesh)
    target = functools.partial(load, quantization=config, weight_offload_gib=config.weight_offload_gib)
    loaded = with_draft(target(model, dtype, family=family, chat_template=chat_template), config, draft)
    resolved, executors = make_followers(loaded, sized, jax.default_backend(), mesh, progress.compiled)
    plan.require(lambda: max(executor.temporaries() for executor in executors.values()))
    return loaded, resolved, executors


def _plan(model: Model, config: EngineConfig, mesh: Mesh, group: Group | None) -> tuple[MemoryPlan, EngineConfig]:
    """Return the memory plan, and the settings with its pool size: the minimum over processes, equal in all of them."""
    require_processes(mesh, grouped=group is not None)
    if group is not None and config.calibration_data is not None:
        instead = "cannot be with num_processes above 1: jaxinfer convert --quantize calibrates once for all"
        raise EngineConfigError(f"calibration_data = {config.calibration_data} {instead}")
    plan = plan_engine(model, config, jax.default_backend(), mesh)
    if group is not None:
        plan = dataclasses.replace(plan, pages=group.least(plan.pages))
    return plan, dataclasses.replace(config, num_pages=plan.pages)


def _as_dtype(model: Model, dtype: str) -> Model:
    if model.draft is not None:
        model = model.replace(draft=_as_dtype(model.draft, dtype))
    require_specified(model)
    dtype = checked_dtype(dtype)
    if dtype == "auto":
        require_one_dtype(model)
        return model
    stored = model.map_weights(functools.partial(with_values, dtype=dtype))
    params = jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype or dtype), stored.specs, stored.params)
    return stored.replace(params=params)


def load_model(
    name: str,
    dtype: str = "auto",
    *,
    check_finite: bool = False,
    show_progress: bool = True,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
    families: Mapping[str, Family] = MappingProxyType({}),
    family: str = "auto",
    chat_template: str | None = None,
    vision: bool = True,
    quantization: str | QuantizationConfig | None = None,
    weight_offload_gib: float = 0.0,
) -> Model:
    """Load config, tokenizer and weights; each tensor goes directly to the device.

    A folder without a tokenizer gives a model that takes token ids only.

    Args:
        name: see `model_folder`.
        dtype: dtype of the parameters: "float32", "bfloat16", "float16", or "auto" for that of the checkpoint.
        check_finite: reject NaN and infinite weights.
        show_progress: draw a bar on stderr if it is a terminal.
        progress: called instead of drawing a bar, see `load_params`.
        mesh: the devices over which the weights are sharded, see docs/parallelism.md; None: JAX's first device. Weights
            that several pipeline stages need (tied embeddings) are loaded on the first of them. With several processes
            each loads the stages that have some of its devices; other parameters are abstract there.
        families: additional model families, by the architecture that config.json names (docs/add_a_model.md).
        family: "auto": the package's own families or, for unknown architectures, those of installed packages;
            "jaxinfer": the package's own only; ``module:NAME``: import it from there, whatever config.json names.
        chat_template: replaces that of the checkpoint: a file, or the text of a template.
        vision: load the vision tower, if the checkpoint has one; otherwise the model takes text alone.
        quantization: quantise a model that is not, a weight after the other: the name of a method, or all settings.
        weight_offload_gib: keep so much of each device's weights in host memory, see `EngineConfig`.

    Raises:
        CheckpointError, ConfigError, TokenizerError, TemplateError: one sentence with the reason.
        EngineConfigError: the model cannot be sharded over the mesh, or not be quantised, or the mesh is not from
            `make_mesh`.
    """
    mesh = require_mesh(mesh or make_mesh())
    files, source = describe_model(name, dtype, family, families, vision)
    settings = quantization
    if not isinstance(settings, QuantizationConfig):
        settings = QuantizationConfig(quantization=settings)
    recipe = recipe_for(files, settings)
    model = shardable_model(_quantized(files, source, recipe, settings), mesh)
    model = offloaded(model, weight_offload_gib, mesh)
    tokenizer, template = find_tokenizer(files.path), load_template(files.path, chat_template)
    if model.vision is not None and tokenizer is not None:
        processor = for_vocabulary(model.vision.processor, tokenizer.token_to_id)
        model = model.replace(vision=dataclasses.replace(model.vision, processor=processor))
    warn_of_others(files, model)
    bar = loading_bar() if show_progress and progress is None else contextlib.nullcontext(progress)
    place = _place(model, mesh)
    with bar as on_tensor:
        if recipe is None:
            params = filled_params(files, model, place, on_tensor, check_finite)
        else:
            samples = samples_for(recipe, settings, tokenizer)
            read = filled_params(files, source, deferred(source.dtype), on_tensor, check_finite)
            params = Loading(files, source.replace(params=read), model.specs, recipe, samples).load(place)
    return model.replace(
        params=params,
        tokenizer=tokenizer,
        chat_template=template,
        generation_config=_generation_config(files.path),
        origin=LoadedFrom(files.path, described_by(files, model)),
    )


def _generation_config(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    fields = read_json_object(path) if path.exists() else {}
    try:
        SamplingParams(**recommended_sampling(fields))
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return fields


@dataclasses.dataclass(frozen=True)
class LoadedFrom:
    """Folder, or GGUF file, of a loaded model."""

    path: pathlib.Path
    config_json: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(self.path)

    def save(self, model: Model, folder: str | os.PathLike[str], config_json: Mapping[str, Any] | None) -> None:
        """See `Model.save`."""
        described, target = self.config_json if config_json is None else config_json, pathlib.Path(folder)
        require_specified(model)
        require_described(model, text_model(described))
        save_params(target, model.params, saved_specs(model, described), described)
        if not self.path.exists() or not target.samefile(self.path):
            write_companions(self.path, target)


def open_weights(
    folder: str, served: Model, config: ResolvedEngine, *, parts: Sequence[str] = (), family: str = "auto"
) -> Model:
    """Return the model of a folder of safetensors in the form of a served model, with lazily read parameters, for
    `jaxinfer.served.ServedModel.stage`.

    Args:
        served: the model, as `start_engine` returned it; only its description is used.
        config: settings of its engine.
        parts: folders with the tensors that the first one lacks.
        family: see `load_model`.

    Raises:
        CheckpointError, ConfigError: one sentence with the reason; for values, when they are read.
        EngineConfigError: it has no weights in ``activation_dtype``.
    """
    path = pathlib.Path(folder)
    if is_converted(path):
        raise CheckpointError(f"{folder} is converted: weights of a running engine are read from a checkpoint")
    more = tuple(map(pathlib.Path, parts))
    files, model = describe_model(folder, str(served.dtype), family, vision=served.vision is not None, parts=more)
    model = shardable_model(model, mesh_for(config))
    if (type(model.module), model.config) != (type(served.module), served.config):
        raise CheckpointError(f"{folder}: config.json describes another model than the served one")
    model = model.replace(params=filled_params(files, model, deferred(model.dtype), None, check_finite=False))
    return model.with_activations(config.activation_dtype) if files.quantized else model


def with_draft(model: Model, config: EngineConfig, load: Callable[[str, Model], Model]) -> Model:
    """Return the model with the draft model or head of ``config``: the one that it names, else the model's own, else
    the demo model's; an MTP layer is in the model's own folder.

    Args:
        load: loads a draft by name for a target model.
    """
    if not config.drafts_on_device:
        return model
    own = None if model.draft is not None else draft_of(model.name, config.speculative)
    name = config.speculative_model or own
    return model if name is None else model.replace(draft=load(name, model))


def abstract_draft(config: EngineConfig, dtype: str) -> Callable[[str, Model], Model]:
    """Return a loader of draft models or heads without weights, for `with_draft`."""
    if config.speculative in HEADS:
        return lambda name, model: describe_head(name, str(config.speculative), model)
    return lambda name, model: abstract_model(name, dtype)


def _loaded_draft(config: EngineConfig, load: Callable[..., Model], mesh: Mesh) -> Callable[[str, Model], Model]:
    """Return a loader that places drafts on the last pipeline stage of the model."""
    last = stages(mesh)[-1]
    if config.speculative in HEADS:
        return lambda name, model: load_head(name, str(config.speculative), model, last)
    return lambda name, model: load(name, mesh=last)


def _place(model: Model, mesh: Mesh) -> Place:
    """Return a function that places parameters on the stages of the mesh, as far as they are of this process."""
    parts, places = [set(part.model.params) for part in cut(model, mesh.shape["stage"])], stages(mesh)

    def place(path: tuple[str, ...], spec: ParamSpec, fill: Fill) -> jax.Array | jax.ShapeDtypeStruct:
        owners = [stage for stage, names in zip(places, parts, strict=True) if path[0] in names]
        local = [stage for stage in owners if own_devices(stage)]
        if not local:  # other processes read it
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or str(model.dtype))
        return on_devices(place_of(local[0], spec), spec, fill)

    return place


def _quantized(files: ModelFiles, model: Model, recipe: Recipe | None, config: QuantizationConfig) -> Model:
    """Return a model that is described without weights, as it is when it has been quantised."""
    if recipe is None:
        return model
    try:
        return described(files, model, recipe)
    except RecipeError as error:
        raise refused(config, error) from error


def abstract_model(
    name: str,
    dtype: str = "auto",
    family: str = "auto",
    vision: bool = True,
    quantization: QuantizationConfig = _AS_IT_IS,
) -> Model:
    """Return the model without its weights, from config.json: the parameters are `jax.ShapeDtypeStruct`.

    Args:
        name, dtype, family, vision, quantization: see `load_model`.

    Raises:
        CheckpointError, ConfigError: one sentence with the reason.
        EngineConfigError: the model cannot be quantised in this way.
    """
    files, model = describe_model(name, dtype, family, vision=vision)
    return _quantized(files, model, recipe_for(files, quantization), quantization)
