"""A model cut into pipeline stages: each has some of the layers, and runs on devices of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.config import EngineConfigError, ResolvedEngine
from jaxinfer.layers.attention import Attend
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.head import DraftHead, HeadConfig, shared, without_shared
from jaxinfer.models.model import Model
from jaxinfer.types import ParamTree


@dataclasses.dataclass(frozen=True)
class Stage:
    """Some layers of a model.

    Attributes:
        model: its parameters and its cache are those of this stage; the module is the whole one.
        layers: of the whole model; None: all of them, and the module need not be a `Decoder`.
        first, last: whether it is given tokens, and whether it gives what the head is applied to.
        width: of the hidden states that one stage hands to the next.
        drafts: it is a draft model or a draft head, which is whole and drafts for the slots of another one.
        features: numbers of each position that a draft head reads of this model; 0: there is none.
        prompts: whether it reads those of prompts, too, because it has a cache.
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
    def is_head(self) -> bool:
        """Whether it reads another model's states."""
        return isinstance(self.model.module, DraftHead)

    def tapped(
        self, params: Any, x: Array, positions: Int[Array, "*batch"], attend: Attend, pools: Any
    ) -> tuple[Float[Array, "*batch d"], Float[Array, "*batch width"], Any]:
        """Compute as `backbone`; also features of each position: inputs of tapped layers, else the hidden states."""
        if not getattr(self.model.module, "taps", ()):
            hidden, pools = self.backbone(params, x, positions, attend, pools)
            return hidden, hidden, pools
        apply: Any = self.model.module.apply
        (hidden, pools), sown = apply({"params": params}, x, positions, attend, pools, mutable=["features"])
        return hidden, jnp.concatenate(sown["features"]["taps"], axis=-1), pools

    def backbone(
        self, params: Any, x: Array, positions: Int[Array, "*batch"], attend: Attend, pools: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        """Compute hidden states and the new pools from tokens, or from the hidden states of the stage before."""
        apply: Any = self.model.module.apply
        if self.layers is None:
            return apply({"params": params}, x, positions, attend, pools)
        return apply({"params": params}, x, positions, attend, pools, self.layers, method="part")

    def head(self, params: Any, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
        apply: Any = self.model.module.apply
        return apply({"params": params}, hidden, method="head")


def cut(model: Model, count: int) -> list[Stage]:
    """The stages of a model, whose parameters may be abstract: layers evenly, the first stages have one more.

    Raises:
        EngineConfigError: there are fewer layers, or nobody knows how to cut this module.
    """
    if count == 1:
        return [_whole(model)]
    total, what = len(model.cache_spec.layers), f"pipeline_parallel_size = {count} cannot be:"
    if total < count:
        raise EngineConfigError(f"{what} the model has {total} layers")
    if not isinstance(model.module, Decoder):
        raise EngineConfigError(f"{what} {type(model.module).__name__} is no jaxinfer.models.decoder.Decoder")
    width = _width(model)
    firsts = [index * (total // count) + min(index, total % count) for index in range(count + 1)]
    return [_stage(model, model.module, range(*firsts[index : index + 2]), width) for index in range(count)]


def draft_stages(model: Model) -> list[Stage]:
    """The stage of a model's draft model or head, where it has one."""
    return [] if model.draft is None else [Stage(model.draft, drafts=True)]


def sharing(stage: Stage, params: Any) -> Stage:
    """The stage of a draft head with those parameters that are its model's, of which these are all."""
    if not stage.is_head:
        return stage
    own = stage.model.params | shared(params, stage.model.config)
    return dataclasses.replace(stage, model=stage.model.replace(params=own))


def unshared(draft: Model) -> Model:
    """A draft model or head without the parameters that are its model's."""
    return draft.map_weights(lambda tree: without_shared(tree, draft.config))


def drafted_width(engine: ResolvedEngine) -> int:
    """Tokens of each slot that a program on the device drafts, all paths together: a draft model's last is no draft."""
    return engine.num_speculative_tokens * engine.speculative_tree + (not engine.drafts_by_head)


def _whole(model: Model) -> Stage:
    if model.draft is None or not isinstance(model.draft.config, HeadConfig):
        return Stage(model)
    head, prompts = model.draft.config, bool(model.draft.cache_spec.layers)
    if not head.taps:
        return Stage(model, features=head.features, prompts=prompts)
    if not isinstance(model.module, Decoder):
        raise EngineConfigError(
            f"{type(model.module).__name__} is no jaxinfer.models.decoder.Decoder: the head reads its layers"
        )
    model = model.replace(module=model.module.clone(taps=head.taps))
    return Stage(model, features=head.features, prompts=prompts)


def _width(model: Model) -> int:
    apply: Any = model.module.apply

    def embed(params: Any, ids: jax.Array) -> jax.Array:
        return apply({"params": params}, ids, ids, method="embed")

    return int(jax.eval_shape(embed, model.params, jax.ShapeDtypeStruct((1,), jnp.int32)).shape[-1])


def _stage(model: Model, module: Decoder, layers: range, width: int) -> Stage:
    def own(tree: ParamTree) -> ParamTree:
        return {name: node for name, node in tree.items() if module.owns(name, layers)}

    cache = model.cache_spec.part(slice(layers.start, layers.stop))
    part = model.map_weights(own).replace(cache_spec=cache)
    return Stage(part, layers, layers.start == 0, layers.stop == len(model.cache_spec.layers), width)
