"""MTP layer (multi-token prediction, arXiv:2412.19437, 2.2) of DeepSeek-V3's checkpoints: predicts one more token.

It follows the last layer in the model's own checkpoint, and drafts several tokens by reading back its own states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Positions, Tokens
from jaxinfer.layers.rope import in_sequence
from jaxinfer.models.config import ConfigError, ConfigReader
from jaxinfer.models.families.deepseek import DeepseekBlock, DeepseekConfig, block_specs
from jaxinfer.models.families.deepseek_sparse import DeepseekSparseConfig
from jaxinfer.models.families.sparse import SparseContext
from jaxinfer.models.family import HeadFamily
from jaxinfer.models.head import DraftHead, HeadConfig, HeadFiles
from jaxinfer.models.specs import cache_spec, linear, rms_norm, vocabulary
from jaxinfer.quant import matmul
from jaxinfer.types import ParamTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MtpConfig(HeadConfig):
    """The config of an MTP layer. ``block``: the model's config; ``dense``: the layer has no experts."""

    block: DeepseekConfig
    dense: bool


def config(files: HeadFiles) -> MtpConfig:
    """Read the config.json of a model with an MTP layer.

    Raises:
        ConfigError: the model is not of the DeepSeek-V3 family, or has no supported MTP layer.
    """
    read, target = ConfigReader(files.config_json), files.target
    if not isinstance(target, DeepseekConfig):
        raise ConfigError("only models of DeepSeek-V3's family have MTP layers that are known")
    if isinstance(target, DeepseekSparseConfig):
        raise ConfigError("MTP layers with an indexer (DeepSeek-V3.2, GLM-5) are not supported")
    read.require(target.predictors == 1, "num_nextn_predict_layers", "must be 1")
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(HeadConfig) if _kept(field.name)}
    dense = f"{_prefix(target)}.mlp.gate.weight" not in files.names
    fields |= {"layers": target.layers[-1:], "tied": False, "features": target.hidden_size}
    return MtpConfig(**fields, block=target, dense=dense)


def _prefix(target: DeepseekConfig) -> str:
    return f"model.layers.{len(target.layers)}"


def _kept(name: str) -> bool:
    return name not in ("layers", "tied", "features", "taps", "shares")


class Mtp(DraftHead):
    """MTP draft head. Parameters: ``enorm``, ``hnorm`` and ``final_norm`` {scale}, ``project`` [2 d, d], ``layer``,
    ``embed`` and ``head`` {table}."""

    config: MtpConfig

    def __call__(
        self, tokens: Tokens, hidden: Hidden, positions: Positions, attend: Attend, cache: Any
    ) -> HiddenAndCache:
        cfg, block, at = self.config, self.config.block, in_sequence(positions)
        embedded = jnp.where(at[..., None] == 0, 0, self.embed(tokens)).astype(hidden.dtype)
        both = jnp.concatenate([self.normed(embedded, "enorm"), self.normed(hidden, "hnorm")], axis=-1)
        layer: Any = DeepseekBlock(block, cfg.layers[0], cfg.dense, parent=None).apply
        context = SparseContext(block.rope.angles(positions, block.rope_dim), at >= 0)
        entering = matmul(both, self.weight("project")), context, attend, None if cache is None else cache[0]
        x, kept = layer({"params": self.weight("layer")}, *entering)
        return self.normed(x), None if cache is None else [kept]


def param_specs(cfg: MtpConfig) -> ParamTree:
    d, prefix = cfg.hidden_size, _prefix(cfg.block)
    return {
        "embed": vocabulary(f"{prefix}.embed_tokens.weight", cfg.vocab_size, d),
        "enorm": rms_norm(f"{prefix}.enorm", d),
        "hnorm": rms_norm(f"{prefix}.hnorm", d),
        "project": linear(f"{prefix}.eh_proj.weight", (2 * d, d), (None, "embed")),
        "layer": block_specs(cfg.block, prefix, cfg.dense),
        "final_norm": rms_norm(f"{prefix}.shared_head.norm", d),
        "head": vocabulary(f"{prefix}.shared_head.head.weight", cfg.vocab_size, d),
    }


MTP = HeadFamily(config, param_specs, cache_spec, Mtp, ("*",))
