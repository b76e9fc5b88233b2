"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5: DeepSeek-V3 with sparse attention to tokens selected by an indexer.

In GLM-5.2 most layers have no indexer and use the selection of the last layer that has one (arXiv:2603.12201).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, Layer
from jaxinfer.layers.dsa import SparseLatentAttention
from jaxinfer.models.config import ConfigReader, aliased
from jaxinfer.models.families import deepseek
from jaxinfer.models.families.deepseek import Deepseek, DeepseekBlock, DeepseekConfig, with_layer_types
from jaxinfer.models.families.sparse import SparseContext
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, layer_norm, linear
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

_V32 = {"max_position_embeddings": 163840, "index_n_heads": 64}
_GLM = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
}
_KINDS = {"F": "full", "S": "shared"}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DeepseekSparseConfig(DeepseekConfig):
    """The resolved config.json of a checkpoint: see `DeepseekConfig`.

    Attributes:
        index_heads, index_interleaved: see `Indexer`; its key dim and the number of selected tokens are in ``layers``.
        indexed: whether each layer has an indexer; a layer without one uses the previous selection.
    """

    index_heads: int
    index_interleaved: bool
    indexed: tuple[bool, ...]

    @staticmethod
    def from_v32(config: Mapping[str, Any]) -> DeepseekSparseConfig:
        """Read the config.json of a DeepseekV32ForCausalLM; raises as `DeepseekConfig.from_v2` does."""
        fields = with_layer_types(config, _V32)
        return _with_indexers(fields, (True,) * ConfigReader(fields).positive("num_hidden_layers"))

    @staticmethod
    def from_glm(config: Mapping[str, Any]) -> DeepseekSparseConfig:
        """Read the config.json of a GlmMoeDsaForCausalLM; raises as `DeepseekConfig.from_v2` does."""
        fields = with_layer_types(config, _GLM)
        return _with_indexers(fields, _indexed(ConfigReader(fields)))


def _with_indexers(fields: Mapping[str, Any], indexed: tuple[bool, ...]) -> DeepseekSparseConfig:
    read, base = ConfigReader(fields), DeepseekConfig.from_v3(fields)
    dim = read.positive("index_head_dim", 128)
    read.require(dim >= base.rope_dim, "index_head_dim", f"must be at least qk_rope_head_dim ({base.rope_dim})")
    read.require(base.q_rank is not None, "q_lora_rank", "must be a number: indexers read the queries' latent")
    layer = LayerSpec(latent_rank=base.rank, index_topk=read.positive("index_topk", 2048), index_dim=dim)
    known = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return DeepseekSparseConfig(
        **known | {"layers": (layer,) * len(indexed), "head_dim": base.head_dim + dim},
        index_heads=read.positive("index_n_heads"),
        index_interleaved=read.flag("indexer_rope_interleave", False),
        indexed=indexed,
    )


def _indexed(read: ConfigReader) -> tuple[bool, ...]:
    """Read which layers have an indexer: from a list of kinds, a string of letters, or an interval."""
    count, kinds, name = read.positive("num_hidden_layers"), read.get("indexer_types"), "indexer_types"
    if kinds is None and read.get("index_topk_pattern") is not None:
        name = "index_topk_pattern"
        kinds = read.fields[name]
        kinds = [_KINDS.get(letter) for letter in kinds] if isinstance(kinds, str) else kinds
    if kinds is None:
        every, first = read.positive("index_topk_freq", 1), deepseek.count_of(read, "index_skip_topk_offset", 2)
        return tuple(max(index - first + 1, 0) % every == 0 for index in range(count))
    known = isinstance(kinds, list) and all(kind in ("full", "shared") for kind in kinds)
    read.require(known and len(kinds) == count, name, f"must name {count} layers full or shared")
    read.require(kinds[0] == "full", name, "must begin with a full layer, whose choice others share")
    return tuple(kind == "full" for kind in kinds)


class Carried(NamedTuple):
    """Value passed between blocks: hidden states, and the last token selection (None: all tokens)."""

    x: Hidden
    chosen: Any = None


class DeepseekSparseBlock(DeepseekBlock):
    """`DeepseekBlock` with attention to the tokens of an indexer, which is its own if it is ``indexed``."""

    config: DeepseekSparseConfig
    indexed: bool = True

    def make_attention(self, kind: Callable[..., Layer], **options: Any) -> Any:
        interleaved = self.config.index_interleaved if self.indexed else None
        return super().make_attention(SparseLatentAttention, index_interleaved=interleaved, **options)

    def __call__(  # type: ignore[override]
        self, carried: Carried, context: SparseContext, attend: Attend, cache: Any
    ) -> tuple[Carried, Any]:
        x, chosen = carried
        mixed, chosen, cache = self.attention(self.attention_norm(x), context.rope, attend, cache, chosen)
        return Carried(self.fed_forward(x + mixed, context), chosen), cache


class DeepseekSparse(Deepseek):
    config: DeepseekSparseConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        cfg, make = self.config, override or DeepseekSparseBlock
        return make(cfg, cfg.layers[index], index < cfg.dense, cfg.indexed[index], parent=None)

    def begins(self, index: int) -> bool:
        return self.config.indexed[index]

    def carried(self, x: Hidden) -> Carried:
        return Carried(x)

    def hidden(self, carried: Carried) -> Hidden:
        return carried.x


def param_specs(cfg: DeepseekSparseConfig) -> ParamTree:
    return decoder(cfg, lambda index, prefix: _block_specs(cfg, prefix, index))


def _block_specs(cfg: DeepseekSparseConfig, prefix: str, index: int) -> dict[str, Any]:
    tree = deepseek.block_specs(cfg, prefix, index < cfg.dense)
    if cfg.indexed[index]:
        tree["attention"]["indexer"] = _indexer_specs(cfg, f"{prefix}.self_attn.indexer")
    return tree


def _indexer_specs(cfg: DeepseekSparseConfig, prefix: str) -> dict[str, Any]:
    d, heads, dim, rank = cfg.hidden_size, cfg.index_heads, cfg.layers[0].index_dim, cfg.q_rank
    assert rank is not None
    q = Source(f"{prefix}.wq_b.weight", (heads * dim, rank), transpose=True, reshape=(rank, heads, dim))
    weights = linear(f"{prefix}.weights_proj.weight", (d, heads), ("embed", None))
    return {
        "q": ParamSpec((rank, heads, dim), (None, None, "head_dim"), sources=(q,), inputs=0),
        "k": linear(f"{prefix}.wk.weight", (d, dim), ("embed", None)),
        "k_norm": layer_norm(f"{prefix}.k_norm", dim),
        "weights": dataclasses.replace(weights, dtype="float32", inputs=None),
    }


DEEPSEEK_V32 = Family(
    aliased(DeepseekSparseConfig.from_v32, {"num_local_experts": "n_routed_experts"}),
    param_specs,
    cache_spec,
    DeepseekSparse,
)
GLM_MOE_DSA = dataclasses.replace(
    DEEPSEEK_V32, config=aliased(DeepseekSparseConfig.from_glm, {"num_local_experts": "n_routed_experts"})
)
