"""Draft heads: small networks that read hidden states of a target model and draft its next tokens.

A head is a `Model` whose inputs are features of the target model. Its pair at position i is the feature of position i
and the token of position i + 1; the first draft token is that of position i + 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions, Tokens
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import DecoderConfig
from jaxinfer.quant import matmul_transposed, take
from jaxinfer.types import LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class HeadConfig(DecoderConfig):
    """The resolved config.json of a draft head: see `DecoderConfig`.

    Attributes:
        features: elements that it reads per position.
        taps: layers of the model whose inputs these are, concatenated; none: the state after the final norm.
        shares: names of the head's parameters that are the model's, each with its name in the model.
    """

    features: int
    taps: tuple[int, ...] = ()
    shares: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class HeadFiles:
    """Inputs from which the config of a draft head is read.

    Attributes:
        config_json: config.json of its folder.
        names: names of the tensors in the folder.
        target: config of the target model.
        windows: sliding windows of the target model's cache groups.
    """

    config_json: Mapping[str, Any]
    names: Set[str]
    target: Any
    windows: tuple[int | None, ...]

    def layers(self, count: int) -> tuple[LayerSpec, ...]:
        """Return layers that attend to all tokens that the target model keeps."""
        window = None if None in self.windows else max(window or 0 for window in self.windows)
        return (LayerSpec(window),) * count

    @property
    def head(self) -> str:
        """Name of the target model's LM head parameter."""
        return "embed" if self.target.tied else "head"


class DraftHead(Layer):
    """A draft head as a pure function of its parameters.

    ``recurrent`` heads draft one token at a time: their output is fed back in place of a feature. Other heads draft all
    tokens at once (`guesses`) and keep no state of earlier positions.
    """

    config: Any

    recurrent: ClassVar[bool] = True

    def embed(self, tokens: Tokens) -> Hidden:
        return take(self.weight("embed")["table"], tokens)

    def first(self, features: Float[Array, "*batch features"]) -> Hidden:
        """Map a feature of the target model to an input of the head."""
        return features

    def __call__(
        self, tokens: Tokens, hidden: Hidden, positions: Positions, attend: Attend, cache: Any
    ) -> HiddenAndCache:
        """Compute the state of each pair, which `head` reads and which may be fed back, and the caches.

        Args:
            hidden: `first` of the feature of each position, or the state of the previous pair.
            tokens: the tokens after these positions.
        """
        raise NotImplementedError

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        """Compute logits of the token after the pair, float32."""
        return matmul_transposed(hidden, self.weight("head")["table"]).astype(jnp.float32)

    def normed(self, x: Hidden, name: str = "final_norm") -> Hidden:
        norm: Any = RMSNorm(self.config.norm_eps, parent=None).apply
        return norm({"params": self.weight(name)}, x)

    def guesses(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch heads vocab"]:
        """Compute logits of the tokens after the pair, float32, for a head that is not ``recurrent``."""
        raise NotImplementedError


def shared(model_params: Mapping[str, Any], config: HeadConfig) -> dict[str, Any]:
    """Return the parameters (or specs) that a head shares with its target model, by the head's names."""
    return {own: model_params[theirs] for own, theirs in config.shares}


def without_shared(tree: ParamTree | Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the parameters (or specs) that are not shared; for a model that is no head, all of them."""
    names = dict(getattr(config, "shares", ()))
    return {name: node for name, node in tree.items() if name not in names}
