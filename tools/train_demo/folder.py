"""Writing and reading the trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tokenizers import Tokenizer

from jaxinfer.models.model import Model
from jaxinfer.weights import load_params, save_params
from tools.train_demo.corpus import ASSISTANT, BOS, EOS
from tools.train_demo.recipes import CONTEXT, Recipe

CHAT_TEMPLATE = f"""\
{{{{- bos_token -}}}}
{{%- for message in messages -%}}
    {{%- if message["role"] not in ["system", "user", "assistant"] -%}}
        {{{{- raise_exception("roles are system, user and assistant, not " + message["role"]) -}}}}
    {{%- endif -%}}
    {{{{- "<|" + message["role"] + "|>" + (message["content"] | trim) + eos_token -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
    {{{{- "{ASSISTANT}" -}}}}
{{%- endif -%}}
"""


def write(folder: pathlib.Path, recipe: Recipe, model: Model, params: Any, tokenizer: Tokenizer) -> None:
    """Write weights rounded to bfloat16, configs, tokenizer and chat template."""
    save_params(folder, params, model.specs, recipe.config_json(), "bfloat16")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def stored_params(folder: pathlib.Path, model: Model) -> Any:
    """Read the rounded weights of ``folder``, in float32."""
    return load_params(folder, model.specs, "float32")


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def write_json(file: pathlib.Path, value: dict[str, Any]) -> None:
    """Write an object as JSON, indented."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
