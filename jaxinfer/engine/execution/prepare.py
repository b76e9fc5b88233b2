"""Preparation of the model and the settings for an engine on a platform."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine, resolve
from jaxinfer.config.defaults import Defaults, of_platform
from jaxinfer.config.engine import Backend
from jaxinfer.config.speculative import other_vocabulary
from jaxinfer.engine.execution.encoder import image_needs, text_part
from jaxinfer.engine.execution.placement import (
    by_layers,
    offloaded,
    placed_params,
    shardable_model,
    with_copied_heads,
)
from jaxinfer.engine.execution.stages import returns_experts
from jaxinfer.kv.pool import no_kernel
from jaxinfer.models.head import DraftHead, shared, without_shared
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import device_memory
from jaxinfer.parallel.mesh import mesh_for, replicas
from jaxinfer.parallel.processes import own_devices, processes_of
from jaxinfer.quant import (
    KernelLost,
    Quantized,
    Unquantized,
    gemm_fault,
    gemm_refusal,
    is_stored,
    refused_products,
    rounds_activations,
)
from jaxinfer.sampling import SamplingLimits
from jaxinfer.spec import leading_paths, make_drafter
from jaxinfer.types import VISION, walk_specs
from jaxinfer.weights.errors import WeightsError
from jaxinfer.weights.fit import fitted, is_spec

_log = logging.getLogger("jaxinfer.start")


class Prepared(NamedTuple):
    """Inputs of an `Executor`.

    Attributes:
        model: spread, with weights in the format of the platform's kernels and the cache as stored, limited to the
        served length. Its parameters are abstract where those of the given model are.
        config: resolved settings.
        limits: limits of the sampler.
    """

    model: Model
    config: ResolvedEngine
    limits: SamplingLimits


def prepare(model: Model, config: EngineConfig, platform: str, mesh: Mesh | None = None) -> Prepared:
    """Prepare the inputs of an `Executor`, for an engine on a platform. Only the shape of the mesh matters (None: one
    is made): replicas share the result.

    Raises:
        EngineConfigError: a setting cannot be served; see also `with_activations` and `shardable_model`.
    """
    mesh = mesh or mesh_for(config)
    if config.enable_training_outputs and _stages_in_processes(config, mesh):
        raise EngineConfigError(
            "enable_training_outputs = True cannot be where pipeline stages are in several processes: the last one "
            "answers with samples alone"
        )
    draft, model = _draft_of(model, config, mesh), _with_images(model, config)
    model = shardable_model(with_activations(model, config), mesh)
    model = offloaded(model, config.weight_offload_gib, mesh).replace(draft=draft)
    resolved = _with_gemm(resolve_for(model, config, platform, mesh), model, platform, mesh)
    if platform == "gpu" and config.gemm_backend == "mosaic":
        _log_refused_products(model, mesh)
    model = _for_kernels(model, resolved.gemm_backend) if platform == "gpu" else model
    model = model.with_cache(resolved.kv_cache_dtype).up_to(resolved.max_model_len)
    model = model.replace(cache_spec=dataclasses.replace(model.cache_spec, page_size=resolved.page_size))
    if model.draft is not None:
        prepared = _prepared_head if resolved.drafts_by_head else _prepared_draft
        draft = prepared(model.draft, model, resolved, platform)
        model = model.replace(draft=draft)
        resolved = _with_drafts(resolved, draft.config)
    limits = SamplingLimits(
        max_logprobs=resolved.top_logprobs,
        drafts=resolved.speculative is not None,
        grammars=resolved.grammars and model.tokenizer is not None,
        masks=resolved.grammars,
        training=resolved.enable_training_outputs,
        whole=resolved.whole_vocabulary,
        experts=returns_experts(model.params, resolved),
    )
    return Prepared(model, resolved, limits)


def prepared_weights(model: Model, engine: ResolvedEngine, platform: str, mesh: Mesh) -> Model:
    """Return a model, or a draft model, with parameters, perhaps not all, in the form in which `prepare` gives them."""
    model = with_copied_heads(model, mesh)
    return _for_kernels(model, engine.gemm_backend) if platform == "gpu" else model


def compile_quantisers(model: Model, engine: ResolvedEngine, platform: str, mesh: Mesh) -> None:
    """Compile what quantises new weights: quantise and place zeros, once in each form of the quantised weights of a
    model and of its draft model."""
    for each in (model, model.draft):
        if each is not None:
            _compile(each, engine, platform, mesh)


def _compile(model: Model, engine: ResolvedEngine, platform: str, mesh: Mesh) -> None:
    declared, dtype = dict(walk_specs(model.declared_specs)), str(model.dtype)
    for path, spec in _forms(model).items():
        try:
            zeros = np.zeros(declared[path].shape, model.dtype)
            make = fitted(path, spec, zeros, declared=declared, dtype=dtype, cast=False, copy=False)
        except (KeyError, WeightsError):
            continue  # an update is rejected, too
        specs: Any = spec
        params = make()
        for name in reversed(path):
            specs, params = {name: specs}, {name: params}
        part = prepared_weights(model.replace(specs=specs, params=params, draft=None), engine, platform, mesh)
        jax.block_until_ready(placed_params(part.specs, part.params, mesh))


def _forms(model: Model) -> dict[tuple[str, ...], Quantized]:
    """Return one quantised weight, by path, for each layout and shape."""
    found: dict[Any, tuple[tuple[str, ...], Quantized]] = {}
    for keys, node in jax.tree_util.tree_leaves_with_path(model.specs, is_leaf=is_stored):
        if isinstance(node, Quantized):
            leaves, form = jax.tree.flatten(node, is_leaf=is_spec)
            kind = form, tuple((leaf.shape, leaf.axes, leaf.dtype) for leaf in leaves)
            found.setdefault(kind, (tuple(key.key for key in keys), node))
    return dict(found.values())


def _with_images(model: Model, config: EngineConfig) -> Model:
    """Return the model without its vision tower where the settings exclude images."""
    if model.vision is None or config.mm_limits.get("image") != 0:
        return model
    return model.map_weights(text_part).replace(vision=None)


def _for_kernels(model: Model, gemm: Backend) -> Model:
    """Return the model with weights for GPU kernels; those of a vision tower stay as they are."""
    changed = by_layers(model, lambda part: part.for_kernels(gemm))
    if VISION not in model.params:
        return changed
    return changed.replace(
        specs={**changed.specs, VISION: model.specs[VISION]}, params={**changed.params, VISION: model.params[VISION]}
    )


def _stages_in_processes(config: EngineConfig, mesh: Mesh) -> bool:
    """Whether the pipeline stages of an engine are in several processes."""
    return config.pipeline_parallel_size > 1 and any(len(processes_of(replica)) > 1 for replica in replicas(mesh))


def _draft_of(model: Model, config: EngineConfig, mesh: Mesh) -> Model | None:
    """Return the draft model or head that the settings request, spread like the model.

    Raises:
        EngineConfigError: there is none, or it cannot draft for this model.
    """
    if not config.drafts_on_device:
        return None
    if _stages_in_processes(config, mesh):
        raise EngineConfigError(
            f"speculative = {config.speculative} and pipeline_parallel_size = {config.pipeline_parallel_size} exclude "
            f"each other where stages are in several processes: drafts go to the first one from device to device"
        )
    if model.draft is None:
        raise EngineConfigError(f"speculative = {config.speculative} needs speculative_model: a folder or a hub id")
    if model.draft.cache_spec.stateful:
        raise EngineConfigError(
            f"speculative_model = {_named(model.draft, config)} cannot draft: its layers have states, and no draft "
            f"could be taken out of them"
        )
    if isinstance(model.draft.module, DraftHead) != config.drafts_by_head:
        raise EngineConfigError(
            f"speculative = {config.speculative} is not what {_named(model.draft, config)} is made for"
        )
    if (why := other_vocabulary(model.config.vocab_size, model.draft.config.vocab_size)) is not None:
        raise EngineConfigError(f"speculative_model = {_named(model.draft, config)} {why}")
    return shardable_model(model.draft, mesh)


def _prepared_draft(draft: Model, model: Model, engine: ResolvedEngine, platform: str) -> Model:
    """Return the draft model as it is served: its layers use the page tables of the model's group with the same window.

    Raises:
        EngineConfigError: its context is shorter, or it has a window that the model does not have.
    """
    name, longest = _named(draft, engine), draft.config.max_position
    if longest < engine.max_model_len:
        raise EngineConfigError(
            f"speculative_model = {name} cannot draft: it knows {longest} tokens of context, and "
            f"max_model_len = {engine.max_model_len}"
        )
    missing = [window for window in draft.cache_spec.windows if window not in model.cache_spec.windows]
    if missing:
        raise EngineConfigError(
            f"speculative_model = {name} cannot draft: it has layers with a window of {missing[0]} tokens (None: all), "
            f"and the model keeps pages for {model.cache_spec.windows}"
        )
    _require_backend(draft, engine, platform)
    draft = draft.for_kernels(engine.gemm_backend) if platform == "gpu" else draft
    draft = draft.with_cache(engine.kv_cache_dtype).up_to(engine.max_model_len)
    return draft.replace(cache_spec=dataclasses.replace(draft.cache_spec, groups=model.cache_spec.windows))


def _prepared_head(head: Model, model: Model, engine: ResolvedEngine, platform: str) -> Model:
    """Return the head as it is served, with the shared parameters in the form in which the model serves them."""
    if head.cache_spec.layers:
        _require_backend(head, engine, platform)
    head = head.for_kernels(engine.gemm_backend) if platform == "gpu" else head
    cache = dataclasses.replace(head.with_cache(engine.kv_cache_dtype).cache_spec, groups=model.cache_spec.windows)
    specs, params = (
        {**without_shared(own, head.config), **shared(theirs, head.config)}
        for own, theirs in ((head.specs, model.specs), (head.params, model.params))
    )
    return head.replace(cache_spec=cache, specs=specs, params=params)


def _with_drafts(engine: ResolvedEngine, draft: Any) -> ResolvedEngine:
    """Return the engine with the form of drafts: Medusa has one head for each token, and may have a static tree."""
    asked = engine.num_speculative_tokens
    most = min(asked, getattr(draft, "guesses", asked))
    nodes = getattr(draft, "choices", ())
    tree = leading_paths(nodes, engine.speculative_tree, most)
    return dataclasses.replace(engine, num_speculative_tokens=most, draft_tree=tree)


def _named(draft: Model, config: EngineConfig) -> str:
    return config.speculative_model or draft.name or "the model's own"


def with_activations(model: Model, config: EngineConfig) -> Model:
    """Return the model with products in ``activation_dtype``; EngineConfigError if no weight supports it."""
    changed = model.with_activations(config.activation_dtype)
    if config.activation_dtype not in ("auto", "none") and not rounds_activations(changed.params):
        raise EngineConfigError(
            f"activation_dtype = {config.activation_dtype!r} cannot be: no weight of the model is stored in that dtype "
            f"with a scale a channel"
        )
    return changed


def resolve_for(model: Model, config: EngineConfig, platform: str, mesh: Mesh | None = None) -> ResolvedEngine:
    """Run `jaxinfer.config.resolve` for a model, with possibly abstract parameters, on a mesh of a platform's devices
    (None: their properties are not known)."""
    _require_backend(model, config, platform)
    _require_gemm(model, config, platform)
    make_drafter(config)  # rejects a name that is not registered
    return resolve(
        config,
        model.cache_spec,
        max_position=model.config.max_position,
        itemsize=model.dtype.itemsize,
        defaults=_defaults_for(model, config, platform, mesh),
        draft=model.draft.cache_spec if model.draft is not None and config.drafts_on_device else None,
        images=image_needs(model),
    )


def _defaults_for(model: Model, config: EngineConfig, platform: str, mesh: Mesh | None) -> Defaults:
    """Return the platform's defaults, adjusted to the model and to the memory of the devices."""
    if platform != "cpu":
        own = [] if mesh is None else own_devices(mesh)
        return of_platform(platform, min(map(device_memory, own), default=0))
    found = of_platform(platform)
    rows = 1 if _one_row_is_fast(model, config, mesh) else 2
    return found._replace(min_rows=rows, max_prefill_rows=_prefill_rows(model, found.max_prefill_rows))


def _one_row_is_fast(model: Model, config: EngineConfig, mesh: Mesh | None) -> bool:
    """Whether one row runs fast. XLA:CPU runs products of one row of 16-bit or 8-bit numbers twenty times slower than
    those of two, except for unsharded arrays, see `pallas_kernels.one_row`."""
    if model.dtype.itemsize > 2:
        return not rounds_activations(model.params)
    weights = jax.tree.leaves(model.params, is_leaf=is_stored)
    plain = all(isinstance(weight, Unquantized) or not is_stored(weight) for weight in weights)
    return plain and not config.enable_lora and (mesh is None or mesh.size == 1)


def _require_backend(model: Model, config: EngineConfig, platform: str) -> None:
    if config.attention_backend != "mosaic":
        return
    spec = model.cache_spec.stored_as(config.kv_cache_dtype).on_each(config.devices)
    why = no_kernel(spec, config.page_size, model.dtype)
    if platform == "cpu":
        why = "its kernels are for GPUs, and this is a CPU"
    if why is not None:
        raise EngineConfigError(f"attention_backend = mosaic cannot be: {why}")


def _require_gemm(model: Model, config: EngineConfig, platform: str) -> None:
    if config.gemm_backend == "mosaic" and (why := gemm_refusal(model.dtype, platform)) is not None:
        raise EngineConfigError(f"gemm_backend = mosaic cannot be: {why}")


def _with_gemm(engine: ResolvedEngine, model: Model, platform: str, mesh: Mesh) -> ResolvedEngine:
    """Resolve "auto" in exact mode to the kernel if it is supported and passes its trial. A GPU that is only described
    (to compile for) is assumed to pass. Processes sharing a model skip the trial: results might differ.

    Raises:
        EngineConfigError: the device did not recover from the trial.
    """
    wants = (engine.gemm_backend, engine.exactness) == ("auto", "exact") and len(processes_of(mesh)) == 1
    if not wants or gemm_refusal(model.dtype, platform) is not None:
        return engine
    fault = _gemm_fault(engine, model, mesh)
    if fault is not None:
        _log.warning("gemm_backend = auto is xla here: the kernel was tried, and %s", fault)
    return dataclasses.replace(engine, gemm_backend="mosaic" if fault is None else "xla")


def _log_refused_products(model: Model, mesh: Mesh) -> None:
    for each in (model, model.draft):
        for product, why in (refused_products(each.specs, mesh, each.dtype) if each is not None else {}).items():
            _log.warning("gemm_backend = mosaic: XLA multiplies %s, which the kernel does not: %s", product, why)


def _gemm_fault(engine: ResolvedEngine, model: Model, mesh: Mesh) -> str | None:
    device = own_devices(mesh)[0]
    if device.platform not in ("gpu", "cuda") or device not in jax.local_devices():
        return None
    trees = [each.specs for each in (model, model.draft) if each is not None]
    rows = {engine.rows // engine.microbatches, *engine.prefill_sizes, *map(math.prod, engine.wide_prefills)}
    try:
        return gemm_fault(trees, sorted(rows), model.dtype, mesh)
    except KernelLost as lost:
        raise EngineConfigError(
            f"gemm_backend = auto: the kernel was tried on this GPU, and {lost}. This process cannot go on. The next "
            f"one takes XLA where a compilation cache tells it of this; with gemm_backend = xla nothing is tried"
        ) from lost


def _prefill_rows(model: Model, most: int) -> int:
    """Return the prefill rows that fill a CPU. Products of few rows spend half their time packing weights; beyond some
    2e11 operations a program would gain nothing and its probe at start-up would cost seconds."""
    operations = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return max(1, min(most, 200_000_000_000 // operations))
