"""Draft heads: small networks that read hidden states of another model and guess its next tokens.

A head is a `Model` like any other, but what it computes starts from features of the model it drafts for. Its pair at
position i is the feature of position i and the token of position i + 1; the first guess is the token of position i + 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Layer
from jaxinfer.models.config import DecoderConfig
from jaxinfer.quant import take
from jaxinfer.types import LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class HeadConfig(DecoderConfig):
    """A head's config.json, resolved: see `DecoderConfig`.

    Attributes:
        features: numbers that it reads of each position.
        taps: layers of the model whose inputs these are, side by side; none: the state behind the final norm.
        shares: its own names of parameters that are the model's, with the model's names of them.
    """

    features: int
    taps: tuple[int, ...] = ()
    shares: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class HeadFiles:
    """What a head's config is read from.

    Attributes:
        config_json: of its folder.
        names: of the tensors in it.
        target: config of the model that it drafts for.
        windows: of the model's cache groups.
    """

    config_json: Mapping[str, Any]
    names: Set[str]
    target: Any
    windows: tuple[int | None, ...]

    def layers(self, count: int) -> tuple[LayerSpec, ...]:
        """Layers that see all that the model keeps."""
        window = None if None in self.windows else max(window or 0 for window in self.windows)
        return (LayerSpec(window),) * count

    @property
    def head(self) -> str:
        """The model's name of the table that makes its logits."""
        return "embed" if self.target.tied else "head"


class DraftHead(Layer):
    """A head as a pure function of its parameters.

    ``recurrent`` heads guess one token at a time: what they return is fed to them again in place of a feature. Others
    guess all at once (`guesses`) and keep nothing of earlier positions.
    """

    config: Any

    recurrent: ClassVar[bool] = True

    def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
        return take(self.weight("embed")["table"], tokens)

    def first(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch d"]:
        """What a feature of the model is to the head."""
        return features

    def __call__(
        self,
        tokens: Int[Array, "*batch"],
        hidden: Float[Array, "*batch d"],
        positions: Int[Array, "*batch"],
        attend: Attend,
        cache: Any,
    ) -> tuple[Float[Array, "*batch d"], Any]:
        """Compute the state of each pair, which `head` reads and which may be fed back, and the caches.

        Args:
            hidden: `first` of the feature of each position, or the state of the pair before.
            tokens: those that follow these positions.
        """
        raise NotImplementedError

    def head(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
        """Compute logits of the token after the pair's, float32."""
        raise NotImplementedError

    def guesses(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch heads vocab"]:
        """Compute logits of the tokens behind the pair's, float32, of a head that is not ``recurrent``."""
        raise NotImplementedError


def shared(model_params: Mapping[str, Any], config: HeadConfig) -> dict[str, Any]:
    """The parameters (or specs) that a head shares with its model, by the head's names."""
    return {own: model_params[theirs] for own, theirs in config.shares}


def without_shared(tree: ParamTree | Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The parameters (or specs) that are the head's own; of another model, all."""
    names = dict(getattr(config, "shares", ()))
    return {name: node for name, node in tree.items() if name not in names}
