"""Draft heads to compare with the original implementations. Data only."""

from __future__ import annotations

import dataclasses
from typing import Any

EAGLE = "SafeAILab/EAGLE at cb7e084"
MEDUSA = "FasterDecoding/Medusa at e2a5d20"
SPECFORGE = "sgl-project/SpecForge at a6b6b02"
SPECULATORS = "the package speculators 0.9.0"
VOCABULARY = 128
PAIRS = 12
CHAIN = 4


@dataclasses.dataclass(frozen=True)
class HeadCase:
    """A draft head whose outputs the original implementation computes.

    Attributes:
        name: unique.
        method: see `tools.oracle.heads_golden.HeadGolden`.
        original: the implementation that computes the outputs.
        config: config.json, with the field names of the format.
        borrows: tensors that a published head shares with its target: name in the head -> name in the target.
        tree: settings of EAGLE-2's dynamic tree.
        checkout: the original's sources, by the command line's name for them.
        shared_blocks: whether the blocks of one Medusa head are identical, as in the original.
        copies: tensors that are duplicates of another in the published format: name -> name.
    """

    name: str
    method: str
    original: str
    config: dict
    borrows: dict[str, str] = dataclasses.field(default_factory=dict)
    tree: dict[str, int] | None = None
    shared_blocks: bool = False
    copies: dict[str, str] = dataclasses.field(default_factory=dict)
    checkout: str = "eagle"


_EMBEDDING = {"embed_tokens.weight": "model.embed_tokens.weight"}
_HEAD = {"lm_head.weight": "lm_head.weight"}
_TREE = {"total_tokens": 12, "depth": 3, "top_k": 3}


def _llama(hidden: int = 32, heads: int = 4, kv_heads: int | None = 2, **others: Any) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 3 * hidden // 2,
        "max_position_embeddings": 256,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    return {key: value for key, value in (config | others).items() if value is not None}


def _eagle3(name: str, config: dict, *, borrows: dict | None = None, tree: dict | None = None) -> HeadCase:
    return HeadCase(name, "eagle3", f"{EAGLE}, eagle/model/cnets.py", config, borrows or {}, tree)


def _eagle(name: str, config: dict, *, borrows: dict | None = None, tree: dict | None = None) -> HeadCase:
    return HeadCase(name, "eagle", f"{EAGLE}, eagle/model/cnets1.py", config, _HEAD | (borrows or {}), tree)


EAGLE3 = (
    _eagle3("eagle3-original", _llama(draft_vocab_size=48), borrows=_EMBEDDING, tree=_TREE),
    _eagle3("eagle3-wider-target", _llama(draft_vocab_size=48, target_hidden_size=48)),
    _eagle3(
        "eagle3-whole-vocabulary",
        _llama(48, draft_vocab_size=VOCABULARY, rope_theta=1e6, rms_norm_eps=1e-3),
        borrows=_EMBEDDING,
        tree=_TREE,
    ),
)


def _specforge(name: str, config: dict, *, borrows: dict | None = None) -> HeadCase:
    config = config | {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "rope_scaling": None}
    file = "specforge/modeling/draft/llama3_eagle.py"
    return HeadCase(name, "eagle3", f"{SPECFORGE}, {file}", config, borrows or {}, checkout="specforge")


EAGLE3_SPECFORGE = (
    _specforge("eagle3-specforge", _llama(draft_vocab_size=48, head_dim=12, rope_theta=1e6)),
    _specforge(
        "eagle3-specforge-fc-norm",
        _llama(64, 4, 1, draft_vocab_size=48, head_dim=8, target_hidden_size=48, fc_norm=True, pad_token_id=None),
    ),
    _specforge("eagle3-specforge-borrows", _llama(48, draft_vocab_size=40), borrows=_EMBEDDING),
)


def _speculators(name: str, layer: dict | None = None, *, borrows: dict | None = None, **switches: Any) -> HeadCase:
    """Build the case as speculators 0.9.0 saves it."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 48,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": _PROPOSALS,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": _LAYER | (layer or {}),
        "transformers_version": "5.23.0",
    }
    file = "speculators/models/eagle3/core.py"
    return HeadCase(name, "eagle3", f"{SPECULATORS}, {file}", config | switches, borrows or {}, checkout="speculators")


_PROPOSALS = {
    "algorithm": "eagle3",
    "default_proposal_method": "greedy",
    "proposal_methods": [
        {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    ],
    "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
}
_LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
_QWEN = {"model_type": "qwen3", "head_dim": 12, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
_OLDER_LAYER = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "torch_dtype": "float32",
}


def _older_speculators() -> HeadCase:
    """Build the case with the field names of checkpoints of 2025."""
    case = _speculators("eagle3-speculators-hub", borrows=_EMBEDDING)
    later = ("eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "fc_norm", "norm_before_fc", "norm_output")
    config = {key: value for key, value in case.config.items() if key not in later}
    layer = {key: value for key, value in _LAYER.items() if key != "rope_parameters"} | _OLDER_LAYER
    config |= {"norm_before_residual": True, "transformer_layer_config": layer, "torch_dtype": "float32"}
    config |= {"has_no_defaults_at_init": False, "speculators_version": "0.1.0", "transformers_version": "4.55.4"}
    return dataclasses.replace(case, config=config)


EAGLE3_SPECULATORS = (
    _speculators("eagle3-speculators", {"head_dim": 12}),
    _speculators("eagle3-speculators-norm-before-residual", norm_before_residual=True),
    _speculators("eagle3-speculators-norm-before-fc", norm_before_fc=True, norm_before_residual=True),
    _speculators("eagle3-speculators-fc-norm-norm-output", fc_norm=True, norm_output=True),
    _speculators("eagle3-speculators-qwen3", _QWEN, borrows=_EMBEDDING, draft_vocab_size=VOCABULARY),
    _older_speculators(),
)
EAGLE1 = (
    _eagle("eagle-bias", _llama(kv_heads=None, rms_norm_eps=1e-6), tree=_TREE),
    _eagle("eagle-no-bias", _llama(bias=False), borrows=_EMBEDDING),
    _eagle("eagle-qkv-bias", _llama(48, qkv_bias=True, bias=True, rope_theta=1e6), borrows=_EMBEDDING),
)


def _medusa(name: str, layers: int, *, shared: bool = True) -> HeadCase:
    config = {
        "base_model_name_or_path": "target",
        "medusa_num_heads": 3,
        "medusa_num_layers": layers,
        "transformers_version": "4.34.1",
    }
    code = "MedusaModelABC" if shared else "ResBlock, one object a block"
    return HeadCase(
        name,
        "medusa",
        f"{MEDUSA}, medusa/model/medusa_model.py: {code}",
        config,
        shared_blocks=shared,
        checkout="medusa",
    )


MEDUSA_HIDDEN = 48  # config.json of these heads lacks both sizes: they are the target's
MEDUSA_HEADS = (
    _medusa("medusa-one-layer", 1),
    _medusa("medusa-two-layers", 2),
    _medusa("medusa-two-layers-apart", 2, shared=False),
)

_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}


def _mtp(name: str, **others: Any) -> HeadCase:
    return HeadCase(
        name,
        "mtp",
        "transformers' decoder layer, put together in tools/oracle/head_mtp.py",
        _DEEPSEEK | others,
        checkout="transformers",
        copies={
            "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
            "model.layers.2.shared_head.head.weight": "lm_head.weight",
        },
    )


MTP = (
    _mtp("mtp-deepseek-v3"),
    _mtp("mtp-deepseek-v3-yarn", rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, q_lora_rank=None),
    _mtp("mtp-deepseek-v3-dense", first_k_dense_replace=3),
)

HEADS = (*EAGLE3, *EAGLE3_SPECFORGE, *EAGLE3_SPECULATORS, *EAGLE1, *MEDUSA_HEADS, *MTP)
