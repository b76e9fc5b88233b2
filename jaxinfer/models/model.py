"""A loaded model: a pure module, its parameters, and the metadata of its checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxinfer.formats.multimodal import text_model
from jaxinfer.layers.attention import causal_attend
from jaxinfer.layers.moe import layers_of_experts, sown_experts, with_routing
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import Family, family_for
from jaxinfer.models.vision.tower import Vision
from jaxinfer.parallel.mesh import require_auto
from jaxinfer.quant import for_gemm, for_kernels, is_stored, laid_out, with_activations
from jaxinfer.quant.banks import adapt
from jaxinfer.types import VISION, CacheSpec, ImageInput, ParamTree, walk_specs
from pallas_kernels.choice import Wish
from pallas_kernels.matmul import Layout

_DECLARED: Any = None  # placeholder: declared by the family from the config


@runtime_checkable
class Origin(Protocol):
    """Folder of a checkpoint."""

    def save(self, model: Model, folder: str | os.PathLike[str], config_json: Mapping[str, Any] | None) -> None:
        """Write the model, see `Model.save`."""


@runtime_checkable
class Serving(Protocol):
    """An engine, or what it says of its programs: an `LLM`, or the result of its `served_programs`."""

    def served_programs(self) -> Any:
        """Return a `jaxinfer.engine.execution.on_policy.ServedPrograms`."""


@runtime_checkable
class LowRank(Protocol):
    """A LoRA adapter: its arrays (`a`, `b`, `magnitude`, `bias`) by the path of the parameter that they change."""

    @property
    def deltas(self) -> Mapping[tuple[str, ...], Any]: ...


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A model: `load_model` returns one, `LLM` serves it.

    It is a pytree whose leaves are those of ``params``: `jax.jit` and `jax.grad` take a model as an argument.

    Attributes:
        module: the Flax module; `module.clone(...)` makes an edited one.
        params: a nested dict of arrays.
        config: the family's frozen config.
        family: derives specs, cache and module from the config.
        tokenizer, chat_template, generation_config: as in the checkpoint folder.
        origin: the checkpoint that it was loaded from, whose format `save` writes.
        specs: a tree like ``params`` with a `ParamSpec` for each array; default: declared by the family.
        cache_spec: the KV cache that the model needs; default: declared by the family.
        draft: a smaller draft model with the same vocabulary (docs/speculation.md).
        folded: scales of inputs are folded into the layers (AWQ, SmoothQuant), so that single weights and adapters of
            the checkpoint's model do not fit.
        vision: the vision tower, whose parameters are ``params["vision"]``; None: the model takes text alone.
    """

    module: nn.Module
    params: Any
    config: Any
    family: Family
    name: str = ""
    tokenizer: Any = None
    chat_template: Any = None
    generation_config: Any = dataclasses.field(default_factory=dict)
    origin: Origin | None = None
    specs: ParamTree = _DECLARED
    cache_spec: CacheSpec = _DECLARED
    draft: Model | None = dataclasses.field(default=None, compare=False)
    vision: Vision | None = None
    folded: bool = False

    def __post_init__(self) -> None:
        if self.specs is _DECLARED or self.cache_spec is _DECLARED:
            for name, value in _declared(self.family, self.config, self.vision).items():
                if getattr(self, name) is _DECLARED:
                    object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash((self.module, self.config, self.name))

    def __repr__(self) -> str:
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if isinstance(leaf, jax.Array)]
        devices = {device for leaf in leaves if not isinstance(leaf, Tracer) for device in leaf.devices()}
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params, is_leaf=is_stored))
        parts = [
            type(self.module).__name__,
            *([f"{_rounded(numbers)} parameters", str(self.dtype)] if numbers else []),
            f"{len(self.cache_spec.layers)} layers",
            *([f"{len(devices)} device{'s' * (len(devices) > 1)}"] if devices else []),
        ]
        return f"<{f'Model {self.name}'.strip()}: {', '.join(parts)}>"

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations, which is that of unquantised weights."""
        leaves = jax.tree.leaves(self.params, is_leaf=is_stored)
        return next(leaf.dtype for leaf in leaves if not is_stored(leaf))

    @property
    def declared_specs(self) -> ParamTree:
        """Specs that the family declares: of unquantised parameters, without transformations for devices or kernels."""
        specs: ParamTree = _declared(self.family, self.config, self.vision)["specs"]
        return specs

    def __call__(
        self, tokens: Int[Array, "*batch time"], images: Sequence[ImageInput] = ()
    ) -> Float[Array, "*batch time vocab"]:
        """Compute logits with the model's own parameters, see `apply`."""
        return self.apply(self.params, tokens, images)

    def apply(
        self,
        params: Any,
        tokens: Int[Array, "*batch time"],
        images: Sequence[ImageInput] = (),
        *,
        routed_experts: Int[Array, "..."] | None = None,
    ) -> Float[Array, "*batch time vocab"]:
        """Compute logits (float32) of every position of contiguous sequences. Pure: jit, grad and vmap go through it.

        Every token is attended to. Padding on the right changes no logits before it; padding on the left counts as text
        and shifts positions: `jaxinfer.research.apply` takes a mask.

        Args:
            images: in the order of their image tokens in ``tokens`` (docs/images.md). With normalised pixels (floating
                point) the logits are differentiable with respect to them.
            routed_experts: [*batch, time, layers, top_k] ids of the experts that each token takes in each layer that
                has any (`routed_experts`), with the weights that the router gives them: another forward pass's routing,
                replayed. -1: those that the router chooses.

        Raises:
            ValueError: ``routed_experts`` are not of these tokens, or not of as many layers as there are with experts.
        """
        apply: Any = self.module.apply
        if routed_experts is not None:
            params = self._replaying(params, tokens, routed_experts)
        return apply({"params": params}, self.hidden(params, tokens, images), method="head")

    def routed_experts(self, params: Any, tokens: Int[Array, "*batch time"]) -> Int[Array, "*batch time layers top_k"]:
        """Compute the ids of the experts that `apply` routes each token to, for each layer that has experts.

        Raises:
            ValueError: the model has no experts.
        """
        require_ids(tokens)
        if not layers_of_experts(params):
            raise ValueError(f"routed_experts: {self.name or 'the model'} has no experts")
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        apply: Any = self.module.apply
        _, sown = apply({"params": params}, tokens, positions, causal_attend, None, mutable=["routing"])
        found = sown_experts(sown["routing"])
        return found.reshape(*tokens.shape, *found.shape[1:])

    def _replaying(self, params: Any, tokens: Any, routed: Int[Array, "..."]) -> Any:
        names = [f"layers_{index}" for index in range(len(self.config.layers))]
        layers = sum(layers_of_experts(params[name]) for name in names)
        if routed.shape[:-1] != (*tokens.shape, layers) or not layers:
            reason = f"of shape {routed.shape} must be [*{tokens.shape}, {layers} layers with experts, top_k]"
            raise ValueError(f"routed_experts {reason}")
        each = iter(jnp.moveaxis(routed, -2, 0))
        return {**params, **{name: with_routing(params[name], each) for name in names}}

    def hidden(
        self, params: Any, tokens: Int[Array, "*batch time"], images: Sequence[ImageInput] = ()
    ) -> Float[Array, "*batch time d"]:
        """Compute hidden states after the final norm.

        Raises:
            TypeError: ``tokens`` is no array of integers, or it or ``params`` is on a mesh with Explicit axes.
            ValueError: the model takes no images, or the image tokens are not as many as the rows of the images.
        """
        require_ids(tokens)
        require_auto("params", jax.tree.leaves(params)[0])
        apply: Any = self.module.apply
        if images:
            if self.vision is None:
                raise ValueError(f"images: {len(images)} were given, and {self.name or 'the model'} takes text alone")
            merged, positions = self.vision.merged(params[VISION], tokens, images)
            return apply({"params": params}, merged, positions, self.vision.attend(tokens), None)[0]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        return apply({"params": params}, tokens, positions, causal_attend, None)[0]

    def logprobs(
        self,
        params: Any,
        tokens: Int[Array, "*batch time"],
        *,
        like: Serving,
        prompt_lengths: Int[Any, " batch"] | None = None,
        lengths: Int[Any, " batch"] | None = None,
        lora: LowRank | None = None,
    ) -> Float[Array, "batch positions"]:
        """Compute the log probability (float32) of each generated token in the bits that an engine serves, with the
        gradient of `apply`; 0 at prompts and padding. Pure: jit and grad go through it (docs/rl.md).

        Args:
            tokens: each sequence from its first token, padded on the right with any ids. The result at ``i`` is of
                token ``i + 1``.
            like: the engine: an `LLM`, or its `served_programs()`, which may be a static argument of `jax.jit`.
            prompt_lengths: tokens that the engine was given, at least 1 (None: 1 in each sequence).
            lengths: tokens without padding (None: all).
            lora: the adapter of the requests, as `LLM.load_lora` takes it: differentiable, too. None: they had none.

        Raises:
            RequestError: the engine's results cannot be reproduced, or it could not serve the adapter; says why.
            ValueError: shapes do not fit, or the engine serves another model, or parameters of another form.
        """
        logprobs: Array = like.served_programs().logprobs(self, params, tokens, prompt_lengths, lengths, lora)
        return logprobs

    def with_cache(self, kv_cache_dtype: str) -> Model:
        """Return the model with another KV cache dtype, see `CacheSpec.stored_as`."""
        return self.replace(cache_spec=self.cache_spec.stored_as(kv_cache_dtype))

    def with_activations(self, kind: str) -> Model:
        """Return the model with another input dtype of quantised weights, see `EngineConfig.activation_dtype`."""
        return self if kind == "auto" else self.map_weights(functools.partial(with_activations, kind=kind))

    def for_kernels(self, gemm: Wish) -> Model:
        """Return the model with weights in the layout of GPU kernels, see `jaxinfer.quant.for_kernels`, and products of
        unquantised weights by the path ``gemm``, see `jaxinfer.quant.Plain`."""
        model = self.map_weights(functools.partial(for_kernels, gemm=gemm))
        if gemm == "xla":
            return model
        specs, params = for_gemm(model.specs, model.params, gemm)
        return model.replace(specs=specs, params=params)

    def laid_out(self, layout: Layout) -> Model:
        """Return the model with its weights, and its draft's, in a layout for some CPUs, see `jaxinfer.quant.laid_out`;
        replaced arrays of this model are deleted."""
        specs, params = laid_out(self.specs, self.params, layout)
        draft = None if self.draft is None else self.draft.laid_out(layout)
        return self.replace(specs=specs, params=params, draft=draft)

    def map_weights(self, function: Callable[[Any], Any]) -> Model:
        """Apply ``function`` to the tree of specs and to the tree of parameters."""
        return self.replace(specs=function(self.specs), params=function(self.params))

    def with_lora(self, adapter: LowRank) -> Model:
        """Return the model with a LoRA adapter. `apply` is differentiable in its arrays, which become parameters.

        Args:
            adapter: `jaxinfer.lora.adapter.Adapter`.

        Raises:
            ValueError: the model has no such weight, or the weight does not support adapters.
        """
        specs, params = self.specs, self.params
        for path, delta in adapter.deltas.items():
            specs, params = adapt(specs, params, self.family.param_specs(self.config), path, delta)
        return self.replace(specs=specs, params=params)

    def with_specs(self, specs: ParamTree, dtype: str) -> Model:
        """Return the model with abstract parameters (`jax.ShapeDtypeStruct`), in ``dtype`` unless specs set one."""
        params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype)), specs)
        return self.replace(specs=specs, params=params)

    def up_to(self, length: int) -> Model:
        """Return the model for sequences of at most ``length`` tokens, see `Decoder.up_to`."""
        return self.replace(module=self.module.up_to(length)) if isinstance(self.module, Decoder) else self

    def save(self, folder: str | os.PathLike[str], config_json: Mapping[str, Any] | None = None) -> None:
        """Write a Hugging Face folder with these parameters, and with the tokenizer of the model's own folder.

        Args:
            config_json: replaces the one that the model was loaded with, if its config was replaced.

        Raises:
            ValueError: `load_model` would read a different model there; the message gives the reason.
            OSError: the folder cannot be written.
        """
        if self.origin is None:
            raise ValueError(
                "the model was not loaded from a folder: jaxinfer.weights.save_params writes its parameters"
            )
        self.origin.save(self, folder, config_json)

    def replace(self, **changes: Any) -> Model:
        """Copy the model with other parameters, another module, ...: it is served exactly as given.

        With another config or family, module, specs and cache are those that these declare, unless given.

        Raises:
            ValueError: the parameters would have other shapes and are not given, or the module has no config.
        """
        if not changes.keys().isdisjoint(("config", "family")):
            changes = self._redeclared(**changes) | changes
        return dataclasses.replace(self, **changes)

    def _redeclared(self, **changes: Any) -> dict[str, Any]:
        """Return the fields for which a config or family among the ``changes`` declares new values."""
        family, config = changes.get("family", self.family), changes.get("config", self.config)
        before = _declared(self.family, self.config, self.vision)
        after = _declared(family, config, self.vision)
        found = {name: value for name, value in after.items() if value != before[name]}
        if changes.keys().isdisjoint(("params", "specs")):
            _require_same_shapes(before["specs"], after["specs"])
        if "module" not in changes:
            found["module"] = self._module_with(family, config)
        return found

    def _module_with(self, family: Family, config: Any) -> nn.Module:
        if family.module is not self.family.module:
            return family.module(config)
        if not hasattr(self.module, "config"):
            raise ValueError(f"config: the module {type(self.module).__name__} has none: pass module=..., too")
        return self.module.clone(config=config)


def _flatten(model: Model) -> tuple[tuple[tuple[jax.tree_util.GetAttrKey, Any]], Model]:
    return ((jax.tree_util.GetAttrKey("params"), model.params),), dataclasses.replace(model, params=())


def _unflatten(rest: Model, children: Any) -> Model:
    return dataclasses.replace(rest, params=next(iter(children)))


jax.tree_util.register_pytree_with_keys(Model, _flatten, _unflatten)


def require_ids(tokens: Any) -> None:
    if not hasattr(tokens, "dtype"):
        raise TypeError(f"tokens is a {type(tokens).__name__}: pass an array of token ids, jnp.array(...)")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens are {tokens.dtype}: pass an array of token ids, which are integers")
    require_auto("tokens", tokens)


def _require_same_shapes(before: ParamTree, after: ParamTree) -> None:
    old, new = (dict(walk_specs(specs)) for specs in (before, after))
    for path in old | new:
        shapes = [specs[path].shape if path in specs else "absent" for specs in (old, new)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"config: {'.'.join(path)} is {shapes[0]} and would be {shapes[1]}: pass params=..., too")


def _rounded(count: int) -> str:
    """Format a number of parameters: 4.9M, 8B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _declared(family: Family, config: Any, vision: Vision | None) -> dict[str, Any]:
    tower = {} if vision is None else {VISION: vision.family.param_specs(vision.config)}
    return {"specs": {**family.param_specs(config), **tower}, "cache_spec": family.cache_spec(config)}


def abstract(
    config_json: Mapping[str, Any],
    dtype: str,
    name: str = "",
    families: Mapping[str, Family] = MappingProxyType({}),
) -> Model:
    """Make the model that a config.json describes, without weights: its parameters are `jax.ShapeDtypeStruct`.

    Args:
        families: see `family_for`.

    Raises:
        ConfigError: the config.json is not supported; the message is one sentence with the reason.
    """
    config_json = text_model(config_json)
    return describe(family_for(config_json, families), config_json, dtype, name)


def with_vision(model: Model, vision: Vision | None, dtype: str) -> Model:
    """Return an abstract model with a vision tower."""
    if vision is None:
        return model
    model = dataclasses.replace(model, vision=vision, specs=_DECLARED)
    return model.with_specs(model.specs, dtype)


def describe(family: Family, config_json: Mapping[str, Any], dtype: str, name: str = "") -> Model:
    """Make the abstract model (`abstract`) of a known family."""
    config = family.config(config_json)
    model = Model(family.module(config), {}, config, family, name)
    return model.with_specs(model.specs, dtype)
