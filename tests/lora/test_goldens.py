"""Adapters saved by PEFT give PEFT's logits, applied at run time and merged."""

import json
import pathlib
import subprocess
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.lora.merge import merge_lora
from tests.lora.goldens import GOLDENS, faults, golden, load_base, read
from tests.lora.peft.test_read import Edit, changed, tensors_of, without
from tools.oracle.cases.adapters import ADAPTERS

NAMES = [case.name for case in ADAPTERS]
STORED = {case.name for case in ADAPTERS if case.storage is not None}
TIED = {"llama-tied-embeddings", "llama-tied-tokens", "llama-tied-head", "gemma-vocabulary"}


def test_golden_files_are_those_of_the_cases():
    assert sorted(path.name for path in GOLDENS.iterdir()) == sorted(NAMES)
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*")) < 1_500_000


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_peft(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    model = load_base(case, tmp_path)
    adapter = read(GOLDENS / name, model)
    assert faults(case, model.with_lora(adapter)) == []
    assert faults(case, model) != []
    if name in STORED | TIED:
        why = "before it is quantised" if name in STORED else "are one array"
        with pytest.raises(ValueError, match=why):
            merge_lora(model, adapter)
    else:
        assert faults(case, merge_lora(model, adapter)) == []


drop = without("embed_tokens")


def put_rows(tensors: dict[str, np.ndarray]) -> None:
    tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = np.eye(
        2, 32, dtype=np.float32
    )


def put_whole(name: str, *tensors: str) -> Edit:
    """Add whole tables of which some rows were trained."""

    def edit(found: dict[str, np.ndarray]) -> None:
        for tensor in tensors:
            value = tensors_of(name)[tensor].copy()
            value[3:8] *= np.float32(-0.7)
            found[f"base_model.model.{tensor}"] = value

    return edit


def put_own(name: str, tensor: str) -> Edit:
    return lambda found: found.update({f"base_model.model.{tensor}": tensors_of(name)[tensor]})


SAVED = {"modules_to_save": ["embed_tokens", "lm_head"]}
TABLE, LM_HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
ONLY_Q = {"target_modules": ["q_proj"], "trainable_token_indices": None}
LIVE: dict[str, tuple[str, Edit, dict[str, Any]]] = {
    "modules without tensors": (
        "llama-qv",
        without("layers.0", "v_proj"),
        {"target_modules": ["q_proj", "v_proj", "x"]},
    ),
    "keys that are not known": ("llama-patterns", lambda _: 0, {"lorap_emb_lr": 1e-6, "a_key_of_tomorrow": [3]}),
    "numbers of another type": ("llama-rslora", lambda _: 0, {"lora_alpha": 3.0, "use_rslora": 1}),
    "rows of a tied table": (
        "llama-tied-embeddings",
        lambda t: (drop(t), put_rows(t)),
        {"trainable_token_indices": [7, 2], "target_modules": ["q_proj"]},
    ),
    "tables that are saved whole": ("llama-qv", put_whole("llama-qv", TABLE, LM_HEAD), SAVED),
    "a head that is saved whole": ("llama-qv", put_whole("llama-qv", LM_HEAD), {"modules_to_save": ["lm_head"]}),
    "a tied table that is saved whole": (
        "llama-tied-embeddings",
        lambda t: (drop(t), put_whole("llama-tied-embeddings", TABLE)(t)),
        {**ONLY_Q, "modules_to_save": ["embed_tokens"]},
    ),
    "a tied table beside the adapter": (
        "llama-tied-embeddings",
        lambda t: (drop(t), put_whole("llama-tied-embeddings", TABLE)(t)),
        ONLY_Q,
    ),
    "a copy of the model's norm": (
        "llama-qv",
        put_own("llama-qv", "model.norm.weight"),
        {"modules_to_save": ["model.norm"]},
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", LIVE)
def test_peft_reads_it_alike(case: str, oracle_python: pathlib.Path, repo: pathlib.Path, tmp_path: pathlib.Path):
    name, edit, config = LIVE[case]
    model, folder = load_base(golden(name), tmp_path / "base"), changed(name, tmp_path / "adapter", edit, config)
    arguments = [*(str(tmp_path / one) for one in ("base", "adapter")), json.dumps(golden(name).tokens)]
    command = [oracle_python, "-m", "tools.oracle.saved_adapter", *arguments, str(tmp_path / "out.npy")]
    subprocess.run(command, cwd=repo, check=True)
    logits = np.asarray(model.with_lora(read(folder, model))(jnp.asarray([golden(name).tokens]))[0])
    np.testing.assert_allclose(logits, np.load(tmp_path / "out.npy"), atol=1e-5)
