"""Model families by the architecture that config.json names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn

from jaxinfer.models import (
    apertus,
    arcee,
    cohere,
    deepseek,
    deepseek_sparse,
    dots1,
    eagle,
    ernie,
    ernie_moe,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    granite_moe,
    hunyuan,
    internlm3,
    lfm2,
    llama,
    llama4,
    medusa,
    minimax,
    ministral,
    mixtral,
    mtp,
    nemotron,
    nemotron_h,
    neox,
    olmo,
    olmoe,
    per_layer,
    phi,
    phi3,
    phimoe,
    qwen3_next,
    qwen_moe,
    smollm3,
    sparse,
    stablelm,
    starcoder2,
)
from jaxinfer.models.config import ConfigError, aliased, shown
from jaxinfer.models.head import DraftHead, HeadFiles
from jaxinfer.models.nearest import nearest
from jaxinfer.models.specs import cache_spec
from jaxinfer.types import CacheSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models: its config from config.json, its parameters, its cache and its forward pass.

    Attributes:
        param_specs: every parameter with its shape, logical axes and source checkpoint tensors.
        ignore: patterns of checkpoint tensors that are not loaded.
        prefix: common name prefix of the decoder's tensors; checkpoints of the bare decoder omit it.
    """

    config: Callable[[Mapping[str, Any]], Any]
    param_specs: Callable[[Any], ParamTree]
    cache_spec: Callable[[Any], CacheSpec]
    module: Callable[[Any], nn.Module]
    ignore: tuple[str, ...] = ()
    prefix: str = "model."


_EXPERTS = {"num_local_experts": "n_routed_experts"}

LLAMA = Family(llama.LlamaConfig.from_json, llama.param_specs, cache_spec, llama.Llama)
MIMO = dataclasses.replace(LLAMA, ignore=llama.IGNORE)
INTERNLM3 = dataclasses.replace(LLAMA, config=internlm3.config_from_json)
ARCEE = Family(arcee.config_from_json, arcee.param_specs, cache_spec, arcee.Arcee)
APERTUS = Family(apertus.config_from_json, apertus.param_specs, cache_spec, apertus.Apertus)
NEMOTRON = Family(nemotron.config_from_json, nemotron.param_specs, cache_spec, nemotron.Nemotron)
MINISTRAL = Family(ministral.MinistralConfig.from_json, llama.param_specs, cache_spec, ministral.Ministral)
OLMO2 = Family(olmo.OlmoConfig.from_olmo2, olmo.param_specs, cache_spec, olmo.Olmo)
OLMO3 = dataclasses.replace(OLMO2, config=olmo.OlmoConfig.from_olmo3)
GRANITE = Family(granite.GraniteConfig.from_json, llama.param_specs, cache_spec, granite.Granite)
SMOLLM3 = Family(smollm3.SmolLM3Config.from_json, llama.param_specs, cache_spec, smollm3.SmolLM3)
COHERE = Family(cohere.CohereConfig.from_cohere, cohere.param_specs, cache_spec, cohere.Cohere)
COHERE2 = dataclasses.replace(COHERE, config=cohere.CohereConfig.from_cohere2)
GLM = Family(glm.GlmConfig.from_json, glm.param_specs, cache_spec, glm.Glm)
EXAONE4 = Family(exaone4.Exaone4Config.from_json, exaone4.param_specs, cache_spec, exaone4.Exaone4)
ERNIE = Family(ernie.config_from_json, llama.param_specs, cache_spec, ernie.Ernie)
HUNYUAN = Family(hunyuan.config_from_json, hunyuan.param_specs, cache_spec, hunyuan.Hunyuan)
NEOX = Family(neox.NeoXConfig.from_json, neox.param_specs, cache_spec, neox.NeoX, neox.IGNORE, "gpt_neox.")
STARCODER2 = Family(starcoder2.config_from_json, starcoder2.param_specs, cache_spec, starcoder2.Starcoder2)
STABLELM = Family(stablelm.StableLmConfig.from_json, stablelm.param_specs, cache_spec, stablelm.StableLm)
GEMMA = Family(gemma.GemmaConfig.from_json, gemma.param_specs, cache_spec, gemma.Gemma)
GEMMA3N = Family(gemma3n.Gemma3nConfig.from_json, gemma3n.param_specs, per_layer.cache_spec, gemma3n.Gemma3n)
GEMMA4 = Family(gemma4.Gemma4Config.from_json, gemma4.param_specs, per_layer.cache_spec, gemma4.Gemma4)
PHI3 = Family(phi3.config_from_json, phi3.param_specs, cache_spec, llama.Llama)
GPT2 = Family(gpt2.GPT2Config.from_json, gpt2.param_specs, cache_spec, gpt2.GPT2, gpt2.IGNORE, "transformer.")
GPTJ = Family(gptj.GPTJConfig.from_json, gptj.param_specs, cache_spec, gptj.GPTJ, gpt2.IGNORE, "transformer.")
PHI = Family(phi.PhiConfig.from_json, phi.param_specs, cache_spec, phi.Phi)
FALCON = Family(
    falcon.FalconConfig.from_json, falcon.param_specs, falcon.cache_spec, falcon.Falcon, prefix="transformer."
)
MIXTRAL = Family(mixtral.config_from_json, mixtral.param_specs, cache_spec, sparse.Sparse)
QWEN2_MOE = Family(qwen_moe.qwen2_from_json, qwen_moe.param_specs, cache_spec, sparse.Sparse)
QWEN3_MOE = Family(qwen_moe.qwen3_from_json, qwen_moe.param_specs, cache_spec, sparse.Sparse)
GPT_OSS = Family(gpt_oss.config_from_json, gpt_oss.param_specs, cache_spec, sparse.Sparse)
DEEPSEEK_V2 = Family(
    aliased(deepseek.DeepseekConfig.from_v2, {"num_experts": "n_routed_experts"}),
    deepseek.param_specs,
    cache_spec,
    deepseek.Deepseek,
)
DEEPSEEK_V3 = Family(
    aliased(deepseek.DeepseekConfig.from_v3, _EXPERTS), deepseek.param_specs, cache_spec, deepseek.Deepseek
)
DEEPSEEK_V32 = Family(
    aliased(deepseek_sparse.DeepseekSparseConfig.from_v32, _EXPERTS),
    deepseek_sparse.param_specs,
    cache_spec,
    deepseek_sparse.DeepseekSparse,
)
GLM_MOE_DSA = dataclasses.replace(DEEPSEEK_V32, config=aliased(deepseek_sparse.DeepseekSparseConfig.from_glm, _EXPERTS))
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3, config=aliased(deepseek.DeepseekConfig.from_glm, {**_EXPERTS, "head_dim": "qk_rope_head_dim"})
)
GLM4_MOE = Family(aliased(glm4_moe.config_from_json, _EXPERTS), glm4_moe.param_specs, cache_spec, sparse.Sparse)
DOTS1 = dataclasses.replace(GLM4_MOE, config=aliased(dots1.config_from_json, _EXPERTS))
MINIMAX_M2 = Family(minimax.config_from_json, minimax.param_specs, cache_spec, sparse.Sparse, minimax.IGNORE)
LLAMA4 = Family(llama4.Llama4Config.from_json, llama4.param_specs, cache_spec, llama4.Llama4)
OLMOE = Family(olmoe.config_from_json, olmoe.param_specs, cache_spec, sparse.Sparse)
PHIMOE = Family(phimoe.PhiMoeConfig.from_json, phimoe.param_specs, cache_spec, phimoe.module)
ERNIE4_5_MOE = Family(
    aliased(ernie_moe.config_from_json, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}),
    ernie_moe.param_specs,
    cache_spec,
    sparse.Sparse,
    ernie_moe.IGNORE,
)
QWEN3_NEXT = Family(
    qwen3_next.Qwen3NextConfig.from_json, qwen3_next.param_specs, cache_spec, qwen3_next.Qwen3Next, qwen3_next.IGNORE
)
QWEN3_5_MOE = dataclasses.replace(QWEN3_NEXT, config=qwen3_next.Qwen3NextConfig.from_moe)
QWEN3_5 = dataclasses.replace(QWEN3_NEXT, config=qwen3_next.Qwen3NextConfig.from_dense)
GRANITE_MOE = Family(
    granite_moe.GraniteMoeConfig.from_json, granite_moe.param_specs, cache_spec, granite_moe.GraniteMoe
)
GRANITE_MOE_SHARED = dataclasses.replace(GRANITE_MOE, config=granite_moe.GraniteMoeConfig.from_shared)
GRANITE_HYBRID = Family(
    granite_hybrid.GraniteHybridConfig.from_json, granite_hybrid.param_specs, cache_spec, granite_hybrid.GraniteHybrid
)
NEMOTRON_H = Family(
    nemotron_h.NemotronHConfig.from_json,
    nemotron_h.param_specs,
    cache_spec,
    nemotron_h.NemotronH,
    nemotron_h.IGNORE,
    "backbone.",
)
FALCON_H1 = Family(falcon_h1.FalconH1Config.from_json, falcon_h1.param_specs, cache_spec, falcon_h1.FalconH1)
LFM2 = Family(lfm2.Lfm2Config.from_dense, lfm2.param_specs, cache_spec, lfm2.Lfm2)
LFM2_MOE = dataclasses.replace(LFM2, config=lfm2.Lfm2Config.from_moe)
YOUTU = dataclasses.replace(DEEPSEEK_V3, config=deepseek.DeepseekConfig.from_youtu)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "SeedOssForCausalLM": LLAMA,
    "MiMoForCausalLM": MIMO,
    "InternLM3ForCausalLM": INTERNLM3,
    "ArceeForCausalLM": ARCEE,
    "ApertusForCausalLM": APERTUS,
    "NemotronForCausalLM": NEMOTRON,
    "Ministral3ForCausalLM": MINISTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "GraniteForCausalLM": GRANITE,
    "SmolLM3ForCausalLM": SMOLLM3,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM,
    "Exaone4ForCausalLM": EXAONE4,
    "Ernie4_5ForCausalLM": ERNIE,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "GPTNeoXForCausalLM": NEOX,
    "Starcoder2ForCausalLM": STARCODER2,
    "StableLmForCausalLM": STABLELM,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "Phi3ForCausalLM": PHI3,
    "GPT2LMHeadModel": GPT2,
    "GPTJForCausalLM": GPTJ,
    "PhiForCausalLM": PHI,
    "FalconForCausalLM": FALCON,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": GLM_MOE_DSA,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Dots1ForCausalLM": DOTS1,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "Llama4ForCausalLM": LLAMA4,
    "OlmoeForCausalLM": OLMOE,
    "PhimoeForCausalLM": PHIMOE,
    "PhiMoEForCausalLM": PHIMOE,
    "Ernie4_5_MoeForCausalLM": ERNIE4_5_MOE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "YoutuForCausalLM": YOUTU,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "NemotronHForCausalLM": NEMOTRON_H,
    "FalconH1ForCausalLM": FALCON_H1,
}


@dataclasses.dataclass(frozen=True)
class HeadFamily:
    """A kind of draft heads: as `Family`, but a head's config is read together with that of the target model."""

    config: Callable[[HeadFiles], Any]
    param_specs: Callable[[Any], ParamTree]
    cache_spec: Callable[[Any], CacheSpec]
    module: Callable[[Any], DraftHead]
    ignore: tuple[str, ...] = ()

    def family(self, files: HeadFiles) -> Family:
        """Return the family of heads for one target model."""

        def config(config_json: Mapping[str, Any]) -> Any:
            return self.config(dataclasses.replace(files, config_json=config_json))

        return Family(config, self.param_specs, self.cache_spec, self.module, self.ignore)


HEADS: dict[str, HeadFamily] = {
    "medusa": HeadFamily(medusa.config, medusa.param_specs, medusa.cache_spec, medusa.Medusa),
    "eagle": HeadFamily(eagle.eagle_config, eagle.eagle_specs, cache_spec, eagle.Eagle, eagle.IGNORE),
    "eagle3": HeadFamily(eagle.eagle3_config, eagle.eagle3_specs, cache_spec, eagle.Eagle3, eagle.IGNORE),
    "mtp": HeadFamily(mtp.config, mtp.param_specs, mtp.cache_spec, mtp.Mtp, ("*",)),
}
"""Draft heads by the name of their method (`SpeculativeConfig.speculative`)."""


_PAGE = "docs/models.md lists what is, docs/add_a_model.md says how to add one with --family"


def family_for(config_json: Mapping[str, Any], families: Mapping[str, Family] = MappingProxyType({})) -> Family:
    """Find the family of this checkpoint: in ``families`` first, then in `FAMILIES`.

    Raises:
        ConfigError: config.json names no architecture, or an unknown one; the message gives the nearest known ones and
            the differences.
    """
    known = {**FAMILIES, **families}
    names = config_json.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures = {shown(names)} must be a list of names ({_PAGE})")
    for name in names:
        if name in known:
            return known[name]
    near = nearest(names[0], config_json, {name: family.config for name, family in FAMILIES.items()})
    beside = f"; the nearest: {'; '.join(map(str, near))}" if near else ""
    raise ConfigError(f"config.json: architectures = {shown(names)} is not supported{beside} ({_PAGE})")
