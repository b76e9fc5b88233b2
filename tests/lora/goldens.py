"""Golden adapters: a model folder, an adapter folder saved by PEFT, and PEFT's logits."""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import load_model
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared, model_base
from jaxinfer.lora.peft.read import read_adapter
from jaxinfer.models.model import Model
from tests.models.parity import allowed, tokenizer_json
from tools.oracle.adapters_golden import AdapterGolden, load_adapter_golden, write_base

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "adapters"
MAX_RANK = 8
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def golden(name: str) -> AdapterGolden:
    return load_adapter_golden(GOLDENS / name)


def write_model(case: AdapterGolden, folder: pathlib.Path) -> pathlib.Path:
    """Write a servable folder with a tokenizer and a chat template."""
    write_base(case, folder, GOLDENS)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(case.config["vocab_size"])))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def load_base(case: AdapterGolden, folder: pathlib.Path) -> Model:
    write_model(case, folder)
    return load_model(str(folder), dtype="float32", show_progress=False)


def copy_adapter(name: str, folder: pathlib.Path, changes: Mapping[str, Any] | None = None) -> pathlib.Path:
    """Copy an adapter folder with changed configuration values."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDENS / name / "adapter_model.safetensors", folder)
    config = json.loads((GOLDENS / name / "adapter_config.json").read_text()) | dict(changes or {})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read(folder: pathlib.Path, model: Model, max_rank: int = MAX_RANK) -> Adapter:
    return read_adapter(folder, declared(model), max_rank=max_rank, base=model_base(model))


def faults(case: AdapterGolden, model: Model) -> list[str]:
    """Return the deviations of a model's logits under the float64 rule (tests/models/parity.py)."""
    logits = np.asarray(jax.jit(model.apply)(model.params, jnp.asarray([case.tokens]))[0], np.float64)
    error, bound = float(np.abs(logits - case.logits).max()), float(allowed(case.error))
    return [] if error <= bound else [f"off by {error:.2e}, allowed {bound:.2e}"]
