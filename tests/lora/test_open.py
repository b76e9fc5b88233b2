"""The modules for which an engine has banks, and the adapters that it rejects otherwise."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.open import open_store
from jaxinfer.lora.store import LoRAError, LoRAStore
from tests.lora.goldens import GOLDENS, golden, load_base


def store(name: str, folder: pathlib.Path, *modules: str) -> LoRAStore:
    """Return a store for the base model of an adapter."""
    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    return open_store(load_base(golden(name), folder), EngineConfig(**settings, lora_target_modules=modules))


@pytest.mark.parametrize(
    ("name", "modules", "sentence"),
    [
        (
            "llama-vocabulary",
            ("all-linear", "lm_head"),
            r"embed\.table: lora_target_modules does not name embed_tokens",
        ),
        ("llama-vocabulary", ("all-linear", "embed_tokens"), r"head\.table: lora_target_modules .* lm_head"),
        ("llama-tied-head", ("all-linear", "embed_tokens"), r"head\.table: lora_target_modules .* lm_head"),
        ("gpt2-vocabulary", ("all-linear",), r"(embed|head)\.table: lora_target_modules does not name"),
        (
            "llama-all-linear",
            ("q_proj", "o_proj"),
            r"lora_target_modules does not name (gate_proj or up_proj|down_proj)",
        ),
        ("mixtral-experts", ("q_proj",), r"lora_target_modules does not name (w1 or w3|w2)"),
    ],
)
def test_what_has_no_bank_is_refused_by_module_and_setting(name, modules, sentence, tmp_path: pathlib.Path):
    with pytest.raises(LoRAError, match=sentence):
        store(name, tmp_path, *modules).load("it", str(GOLDENS / name))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama-vocabulary", ("q_proj", "embed_tokens", "lm_head")),
        ("llama-qv", ("k_proj",)),  # q, k and v are one parameter
        ("mixtral-attention", ("q_proj", "o_proj")),
        ("gpt2-attention", ("c_attn",)),
    ],
)
def test_what_has_one_is_loaded(name: str, modules: tuple[str, ...], tmp_path: pathlib.Path):
    store(name, tmp_path, *modules).load("it", str(GOLDENS / name))


def test_a_module_that_the_model_lacks_is_refused_with_those_that_it_has(tmp_path: pathlib.Path):
    with pytest.raises(
        EngineConfigError, match=r"lora_target_modules = 'wte' .* has all-linear, down_proj, embed_tokens"
    ):
        store("llama-qv", tmp_path, "q_proj", "wte")


def test_arrays_of_no_weight_of_the_model_are_refused(tmp_path: pathlib.Path):
    delta = Delta(np.ones((1, 2), np.float32), np.ones((2, 1), np.float32))
    for path in (("layers_9", "mlp", "up"), ("layers_0", "attention_norm", "scale")):
        with pytest.raises(LoRAError, match=re.escape(".".join(path))):
            store("llama-qv", tmp_path, "q_proj").load("it", Adapter("", 1, {path: delta}))
