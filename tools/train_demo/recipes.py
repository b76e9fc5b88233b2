"""Recipes of the demo models: shapes and training schedules."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

CONTEXT = 2048


@dataclasses.dataclass(frozen=True)
class Stage:
    """Training steps on windows of one length."""

    steps: int
    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Recipe of one model: its shape and its training.

    The learning rate rises over ``warmup`` steps, stays, and falls linearly to zero over the last ``decay`` steps
    (Hu et al. 2024), so the length of the constant phase can be changed without repeating the steps before.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    stages: tuple[Stage, ...]
    vocab: int = 2048
    learning_rate: float = 1.5e-3
    warmup: int = 50
    decay: int = 700
    weight_decay: float = 0.1
    dropout: float = 0.1
    eval_every: int = 100

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def ends_stage(self, step: int) -> bool:
        """Return whether ``step`` steps complete a stage."""
        return step in itertools.accumulate(stage.steps for stage in self.stages)

    def config_json(self) -> dict[str, Any]:
        """Return config.json as `transformers` writes it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


TARGET = Recipe(
    "target",
    hidden=256,
    layers=6,
    heads=8,
    kv_heads=4,
    intermediate=688,
    stages=(Stage(1500, 8, 256), Stage(300, 1, CONTEXT)),
    decay=400,
)
DRAFT = Recipe(
    "draft",
    hidden=128,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate=344,
    stages=(Stage(1400, 8, 256), Stage(300, 1, CONTEXT)),
    learning_rate=3e-3,
    decay=400,
    dropout=0.0,
    eval_every=200,
)
RECIPES = {recipe.name: recipe for recipe in (TARGET, DRAFT)}


def quick(recipe: Recipe) -> Recipe:
    """Shrink a recipe so that it trains in seconds."""
    return dataclasses.replace(
        recipe,
        hidden=32,
        layers=2,
        heads=2,
        kv_heads=1,
        intermediate=64,
        vocab=512,
        stages=(Stage(3, 2, 32), Stage(3, 2, 64)),
        warmup=1,
        decay=2,
        eval_every=2,
    )
