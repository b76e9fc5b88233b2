"""Draft heads that are compared with the original implementations. Plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

EAGLE = "SafeAILab/EAGLE at cb7e084"
MEDUSA = "FasterDecoding/Medusa at e2a5d20"
VOCABULARY = 128
PAIRS = 12
CHAIN = 4


@dataclasses.dataclass(frozen=True)
class HeadCase:
    """A head to ask the original about.

    Attributes:
        name: unique.
        method: see `tools.oracle.heads_golden.HeadGolden`.
        original: whose code answers.
        config: config.json, in the words of the format.
        borrows: tensors that a published head leaves to its target: name in the head -> name in the target.
        tree: settings of EAGLE-2's dynamic tree.
        shared_blocks: of Medusa: the blocks of one head are one and the same, as in the original.
    """

    name: str
    method: str
    original: str
    config: dict
    borrows: dict[str, str] = dataclasses.field(default_factory=dict)
    tree: dict[str, int] | None = None
    shared_blocks: bool = False


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
    _eagle3(
        "eagle3-specforge",
        _llama(64, 4, 1, draft_vocab_size=48, architectures=["LlamaForCausalLMEagle3"], eos_token_id=[2, 3]),
    ),
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
    return HeadCase(name, "medusa", f"{MEDUSA}, medusa/model/medusa_model.py: {code}", config, shared_blocks=shared)


MEDUSA_HIDDEN = 48  # config.json of these heads has neither size: they are the target's
MEDUSA_HEADS = (
    _medusa("medusa-one-layer", 1),
    _medusa("medusa-two-layers", 2),
    _medusa("medusa-two-layers-apart", 2, shared=False),
)

HEADS = (*EAGLE3, *EAGLE1, *MEDUSA_HEADS)
