"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): each drafts one more token from a model's last hidden state."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.base import Hidden
from jaxinfer.models.config import ConfigError, ConfigReader
from jaxinfer.models.family import HeadFamily
from jaxinfer.models.head import DraftHead, HeadConfig, HeadFiles
from jaxinfer.models.specs import cache_spec, matrix, plain, vocabulary
from jaxinfer.parallel.mesh import gathered_logits
from jaxinfer.quant import matmul_transposed
from jaxinfer.types import ParamTree

_RANKS = 64  # tokens of a head that may be in a tree: each is a pass over its logits
_LINEAR = re.compile(r"^(?P<prefix>(?:medusa_head\.)?)(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight$")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MedusaConfig(HeadConfig):
    """The resolved config.json of Medusa heads.

    Attributes:
        guesses: number of heads, one draft token each.
        depth: residual layers per head.
        prefix: prefix of the tensor names.
        choices: nodes of the static draft tree, each the ranks of the tokens up to it; none: drafts have no fixed form.
    """

    guesses: int
    depth: int
    prefix: str
    choices: tuple[tuple[int, ...], ...] = ()


def config(files: HeadFiles) -> MedusaConfig:
    """Read the config.json of Medusa heads: sizes are those of the target model.

    Raises:
        ConfigError: a field is missing or of the wrong type, or the tensors have other names.
    """
    read, target = ConfigReader(files.config_json), files.target
    found = [match for match in map(_LINEAR.match, sorted(files.names)) if match]
    if not found:
        raise ConfigError("no tensor is named 0.0.linear.weight, as Medusa's first residual layer is")
    size = {name: getattr(target, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position")}
    guesses = read.positive("medusa_num_heads", 1 + max(int(match["head"]) for match in found))
    rest = {name: getattr(target, name) for name in ("heads", "kv_heads", "head_dim", "norm_eps", "activation")}
    return MedusaConfig(
        **size,
        **rest,
        layers=(),
        tied=False,
        features=target.hidden_size,
        guesses=guesses,
        depth=read.positive("medusa_num_layers", 1 + max(int(match["layer"]) for match in found)),
        prefix=found[0]["prefix"],
        choices=_choices(read, guesses, target.vocab_size),
    )


def _choices(read: ConfigReader, guesses: int, vocab: int) -> tuple[tuple[int, ...], ...]:
    """Read ``medusa_choices``, as in Medusa's medusa_choices.py: a list of paths of ranks, most useful first."""
    given: Any = read.get("medusa_choices", [])
    lists = isinstance(given, list) and all(isinstance(node, list) and node for node in given)
    read.require(lists, "medusa_choices", "must be a list of lists of ranks")
    nodes = tuple(map(tuple, given))
    ranks = all(type(rank) is int and 0 <= rank < min(vocab, _RANKS) for node in nodes for rank in node)
    read.require(ranks, "medusa_choices", f"must have ranks from 0 to {min(vocab, _RANKS) - 1}")
    read.require(len({*nodes}) == len(nodes), "medusa_choices", "names a path twice")
    read.require(all(node[:-1] in {(), *nodes} for node in nodes), "medusa_choices", "lacks the beginning of a path")
    read.require(
        max(map(len, nodes), default=0) <= guesses, "medusa_choices", f"has paths of more than {guesses} heads"
    )
    return nodes


class Medusa(DraftHead):
    """Medusa heads. Parameters of each: ``head_i`` {``block_j`` {weight [d, d], bias}, table [vocab, d]}."""

    config: MedusaConfig

    recurrent: ClassVar[bool] = False

    def guesses(self, features: Float[Array, "*batch features"]) -> Float[Array, "*batch heads vocab"]:
        return jnp.stack([self._guess(features, index) for index in range(self.config.guesses)], axis=-2)

    def _guess(self, x: Hidden, index: int) -> Float[Array, "*batch vocab"]:
        own = self.weight(f"head_{index}")
        for layer in range(self.config.depth):
            block = own[f"block_{layer}"]
            pushed = matmul_transposed(x, block["weight"]) + block["bias"].astype(x.dtype)
            x = x + jax.nn.silu(pushed.astype(jnp.float32)).astype(x.dtype)
        return gathered_logits(matmul_transposed(x, own["table"]).astype(jnp.float32))


def param_specs(cfg: MedusaConfig) -> ParamTree:
    return {f"head_{index}": _guess_specs(cfg, f"{cfg.prefix}{index}") for index in range(cfg.guesses)}


def _guess_specs(cfg: MedusaConfig, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    tree: dict[str, Any] = {}
    for layer in range(cfg.depth):
        name = f"{prefix}.{layer}.linear"
        weight, bias = (
            matrix(f"{name}.weight", (d, d), (None, "embed")),
            plain(f"{name}.bias", (d,), ("embed",), "zeros"),
        )
        tree[f"block_{layer}"] = {"weight": weight, "bias": bias}
    return {**tree, **vocabulary(f"{prefix}.{cfg.depth}.weight", cfg.vocab_size, d)}


MEDUSA = HeadFamily(config, param_specs, cache_spec, Medusa)
