"""Draft heads: what is trained, and for how long."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.train_heads.generated import Text


@dataclasses.dataclass(frozen=True)
class HeadRecipe:
    """One kind of head: its shape and its training.

    Attributes:
        method: of `jaxinfer.models.registry.HEADS`.
        guesses: tokens that it is trained to draft: Medusa's heads, the turns of EAGLE-3's layer.
        discount: the loss of each further one counts so much less.
        intermediate, draft_vocab: of EAGLE-3; no larger than the target's.
        steps: of ``rows`` sequences each.
        warmup, decay: steps over which the learning rate rises, and falls to zero at the end.
        corpus_share: rows of a step that are of the text itself, not of what the target says.
        join_every: one step in so many has its rows in one sequence, for longer contexts.
        weight_decay: of matrices.
    """

    method: str
    guesses: int
    steps: int
    learning_rate: float
    discount: float = 0.8
    intermediate: int = 0
    draft_vocab: int = 0
    rows: int = 4
    warmup: int = 50
    decay: int = 250
    corpus_share: float = 0.25
    join_every: int = 5
    weight_decay: float = 0.01
    eval_every: int = 100
    text: Text = dataclasses.field(default_factory=Text)


MEDUSA = HeadRecipe("medusa", guesses=3, steps=500, learning_rate=1e-3)
EAGLE3 = HeadRecipe("eagle3", guesses=4, steps=600, learning_rate=2e-3, intermediate=512, draft_vocab=1152)
RECIPES = {recipe.method: recipe for recipe in (MEDUSA, EAGLE3)}


def quick(recipe: HeadRecipe) -> HeadRecipe:
    """The same recipe, so small that it takes seconds."""
    text = Text(length=24, counts=((0.0, 8), (1.0, 8)), held_out=2)
    return dataclasses.replace(
        recipe, guesses=2, steps=6, rows=4, warmup=1, decay=2, eval_every=3, intermediate=32, draft_vocab=64, text=text
    )


def config_json(recipe: HeadRecipe, target: Any, name: str) -> dict[str, Any]:
    """config.json as the methods' authors write it, for a head of the target with this config and name."""
    if recipe.method == "medusa":
        numbers = {"medusa_num_heads": recipe.guesses, "medusa_num_layers": 1}
        return {**numbers, "base_model_name_or_path": name, "dtype": "bfloat16"}
    count = len(target.layers)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(recipe.draft_vocab, target.vocab_size),
        "hidden_size": target.hidden_size,
        "intermediate_size": min(recipe.intermediate, target.intermediate_size),
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope.theta,
        "eagle_aux_hidden_state_layer_ids": [0, count // 2 - 1, count - 2],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
