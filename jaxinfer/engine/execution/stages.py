"""Pipeline stages of a model: each has a range of layers, and runs on its own devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.config import EngineConfigError, ResolvedEngine
from jaxinfer.engine.execution.encoder import text_part
from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Positions
from jaxinfer.layers.merged import Merged
from jaxinfer.layers.moe import layers_of_experts, sown_experts
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.head import DraftHead, HeadConfig
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import abstract
from jaxinfer.quant import Unquantized, is_stored
from jaxinfer.types import ParamTree

_Tapped = tuple[Float[Array, "*batch d"], Float[Array, "*batch width"], Any]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A range of layers of a model.

    Attributes:
        model: has the parameters and the cache of this stage; the module is the whole one.
        layers: layer indices in the whole model; None: all of them, and the module need not be a `Decoder`.
        first, last: whether its input are tokens, and whether its output is the input of the head.
        width: width of hidden states.
        drafts: whether it is a draft model or a draft head, which is whole and drafts for the slots of another model.
        features: numbers per position that a draft head reads of this model; 0: there is no head.
        prompts: whether the head also reads those of prompts, because it has a cache.
    """

    model: Model
    layers: range | None = None
    first: bool = True
    last: bool = True
    width: int = 0
    drafts: bool = False
    features: int = 0
    prompts: bool = False

    @property
    def taken(self) -> int:
        """Numbers per position received from the stage before: hidden states, and the features so far."""
        assert self.layers is not None
        return self.width * (1 + self._tapped_before(self.layers.start))

    @property
    def given(self) -> int:
        """Numbers per position passed to the next stage."""
        assert self.layers is not None
        return self.width * (1 + self._tapped_before(self.layers.stop))

    def _tapped_before(self, layer: int) -> int:
        return sum(tap < layer for tap in getattr(self.model.module, "taps", ()))

    @property
    def loops(self) -> bool:
        """Whether programs may loop over weights: quantized weights without a kernel are dequantized in loops."""
        weights = jax.tree.leaves(self.model.specs, is_leaf=is_stored)
        return any(is_stored(weight) and not isinstance(weight, Unquantized) for weight in weights)

    def described_by(self, params: Any) -> Stage:
        """Return the stage for its programs: with abstract parameters, since programs take the real ones as arguments,
        those of a vision tower apart, and without the text components of the checkpoint."""
        of = self.model
        specs, cache_spec = text_part(of.specs), of.cache_spec
        model = Model(of.module, params, of.config, of.family, specs=specs, cache_spec=cache_spec, vision=of.vision)
        return dataclasses.replace(self, model=model)

    def without_weights(self) -> Stage:
        """Return the stage with abstract parameters."""
        return dataclasses.replace(self, model=self.model.replace(params=abstract(self.model.params), draft=None))

    @property
    def is_head(self) -> bool:
        """Whether the stage is a head that reads another model's states."""
        return isinstance(self.model.module, DraftHead)

    def routed(
        self, params: Any, x: Array | Merged, positions: Positions, attend: Attend, pools: Any, *, experts: bool
    ) -> tuple[_Tapped, Int[Array, "*batch layers top_k"] | None]:
        """Compute as `tapped`, of a whole model; also the experts of each position, for each layer that has any, if
        ``experts``."""
        if not experts:
            return self.tapped(params, x, positions, attend, pools), None
        (hidden, pools), sown = self.backbone(params, x, positions, attend, pools, mutable=["features", "routing"])
        own = sown.get("features", {}).get("taps", ())
        features = jnp.concatenate(own, axis=-1) if own else hidden
        return (hidden, features, pools), sown_experts(sown["routing"])

    def tapped(self, params: Any, x: Array | Merged, positions: Positions, attend: Attend, pools: Any) -> _Tapped:
        """Compute as `backbone`; also the features of each position: inputs of tapped layers, else the hidden states.
        Features of earlier stages arrive after the hidden states."""
        if not getattr(self.model.module, "taps", ()):
            hidden, pools = self.backbone(params, x, positions, attend, pools)
            return hidden, hidden, pools
        earlier: list[Array] = []
        if not self.first:
            assert not isinstance(x, Merged)
            x, *earlier = jnp.split(x, self.taken // self.width, axis=-1)
        (hidden, pools), sown = self.backbone(params, x, positions, attend, pools, mutable=["features"])
        own = sown.get("features", {}).get("taps", ())
        return hidden, jnp.concatenate([*earlier, *own], axis=-1) if earlier or own else hidden[..., :0], pools

    def handed(self, hidden: Float[Array, "*batch d"], features: Float[Array, "*batch some"]) -> Array:
        """Return the input of the next stage."""
        return jnp.concatenate([hidden, features], axis=-1) if getattr(self.model.module, "taps", ()) else hidden

    def backbone(
        self, params: Any, x: Array | Merged, positions: Positions, attend: Attend, pools: Any, **options: Any
    ) -> Any:
        """Compute hidden states and the new pools from tokens (and images), or from the hidden states of the stage
        before; ``options`` are those of Flax's `apply`."""
        apply: Any = self.model.module.apply
        part: dict[str, Any] = {} if self.layers is None else {"layers": self.layers, "method": "part"}
        return apply({"params": params}, x, positions, attend, pools, **part, **options)

    def head(self, params: Any, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
        apply: Any = self.model.module.apply
        return apply({"params": params}, hidden, method="head")


def returns_experts(params: Any, engine: ResolvedEngine) -> bool:
    """Whether requests may ask for the experts of their tokens: a stage knows those of its own layers alone."""
    trains = engine.enable_training_outputs and engine.pipeline_parallel_size == 1
    return trains and layers_of_experts(params) > 0


def cut(model: Model, count: int) -> list[Stage]:
    """Cut a model, with possibly abstract parameters, into stages with equal numbers of layers; the first stages have
    one more. The last stage has its draft model or head.

    Raises:
        EngineConfigError: there are fewer layers, or this module cannot be cut.
    """
    model, head = _tap(model)
    if count == 1:
        return [_read(Stage(model), head)]
    total, what = len(model.cache_spec.layers), f"pipeline_parallel_size = {count} cannot be:"
    if total < count:
        raise EngineConfigError(f"{what} the model has {total} layers")
    if not isinstance(model.module, Decoder):
        raise EngineConfigError(f"{what} {type(model.module).__name__} is no jaxinfer.models.decoder.Decoder")
    if model.module.bound is not None:
        raise EngineConfigError(f"{what} the model's layers read {model.module.bound}")
    width = _width(model)
    firsts = [index * (total // count) + min(index, total % count) for index in range(count + 1)]
    if model.vision is not None and model.vision.config.deep > firsts[1]:
        deep = model.vision.config.deep
        raise EngineConfigError(f"{what} images are added to {deep} layers, and the first stage has {firsts[1]}")
    for first in firsts[:-1]:
        if not model.module.begins(first):
            raise EngineConfigError(f"{what} layer {first} would begin a stage, and takes more than hidden states")
    parts = [_stage(model, model.module, range(*firsts[index : index + 2]), width) for index in range(count)]
    return [*parts[:-1], _read(parts[-1], head)]


def draft_stages(model: Model) -> list[Stage]:
    """Return the stage of a model's draft model or head, if it has one."""
    return [] if model.draft is None else [Stage(model.draft, drafts=True)]


def sharing(stage: Stage, params: Any) -> Stage:
    """Return the stage of a draft head with the model parameters that it shares; ``params``: those on its devices."""
    if not stage.is_head:
        return stage
    here = {own: params[theirs] for own, theirs in stage.model.config.shares if theirs in params}
    return dataclasses.replace(stage, model=stage.model.replace(params=stage.model.params | here))


def unshared(draft: Model, model: Model) -> Model:
    """Return a draft model or head without the parameters that it shares with the model (or its drafting stage)."""
    theirs = dict(getattr(draft.config, "shares", ()))
    return draft.map_weights(lambda tree: {name: tree[name] for name in tree if theirs.get(name) not in model.params})


def drafted_width(engine: ResolvedEngine) -> int:
    """Return the draft tokens per slot of a program on the device, over all paths: a draft model's last is no draft."""
    return engine.num_speculative_tokens * engine.speculative_tree + (not engine.drafts_by_head)


def _tap(model: Model) -> tuple[Model, HeadConfig | None]:
    """Return the model with the taps that its draft head reads, and the head's config; None: it has no head."""
    head = None if model.draft is None else model.draft.config
    if not isinstance(head, HeadConfig):
        return model, None
    if not head.taps:
        return model, head
    if not isinstance(model.module, Decoder):
        raise EngineConfigError(
            f"{type(model.module).__name__} is no jaxinfer.models.decoder.Decoder: the head reads its layers"
        )
    return model.replace(module=model.module.clone(taps=head.taps)), head


def _read(last: Stage, head: HeadConfig | None) -> Stage:
    """Return the last stage with the sizes of the features that a draft head reads."""
    if head is None:
        return last
    assert last.model.draft is not None
    return dataclasses.replace(last, features=head.features, prompts=bool(last.model.draft.cache_spec.layers))


def _width(model: Model) -> int:
    apply: Any = model.module.apply

    def embed(params: Any, ids: jax.Array) -> jax.Array:
        return apply({"params": params}, ids, ids, method="embed")

    return int(jax.eval_shape(embed, model.params, jax.ShapeDtypeStruct((1,), jnp.int32)).shape[-1])


def _stage(model: Model, module: Decoder, layers: range, width: int) -> Stage:
    def own(tree: ParamTree) -> ParamTree:
        return {name: node for name, node in tree.items() if module.owns(name, layers)}

    cache, last = model.cache_spec.part(slice(layers.start, layers.stop)), layers.stop == len(model.cache_spec.layers)
    draft, vision = model.draft if last else None, None if layers.start else model.vision
    part = model.map_weights(own).replace(cache_spec=cache, draft=draft, vision=vision)
    return Stage(part, layers, layers.start == 0, last, width)
