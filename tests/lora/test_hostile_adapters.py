"""Malformed adapters: each is read or rejected with one sentence, in little memory and time."""

import pathlib
import random
import resource
import shutil
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.config import parse_config
from tests.lora.goldens import copy_adapter
from tests.lora.peft.test_read import read
from tests.weights.test_hostile_folders import mutate

NAMES = ("llama-dora", "llama-patterns", "qwen2-bias-dora", "gpt2-all", "mixtral-experts", "llama-tokens")
FAST, SLOW = 200, 2_000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        *("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "bias", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
        *("init_lora_weights", "peft_type", "modules_to_save", "trainable_token_indices", "anything"),
    ]
)


def attempt(name: str, folder: pathlib.Path) -> bool:
    """Return whether an adapter was read; else it was rejected with one sentence."""
    begin = time.monotonic()
    try:
        adapter = read(name, folder)
    except AdapterError as error:
        said = str(error)
    else:
        return all_finite(adapter)
    finally:
        assert time.monotonic() - begin < 30
    assert 0 < len(said) < 3000, said
    assert said.isprintable(), said
    return False


def all_finite(adapter: Adapter) -> bool:
    for delta in adapter.deltas.values():
        parts = [part for part in (delta.a, delta.b, delta.magnitude, delta.bias) if part is not None]
        assert all(part.dtype == np.float32 and np.isfinite(part).all() for part in parts)
    return True


@pytest.mark.parametrize("count", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_mutated_adapters_are_read_or_refused(name: str, count: int, seed: int, tmp_path: pathlib.Path):
    folder, spoilt = copy_adapter(name, tmp_path / "adapter"), tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    assert attempt(name, spoilt)
    begin, loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for number in range(seed, seed + count):
        file, content = mutate(folder, random.Random(number))
        (spoilt / file.name).write_bytes(content)
        try:
            loaded += attempt(name, spoilt)
        except Exception as error:
            error.add_note(f"--seed {number}, {file.name}: {content[:4000]!r}")
            raise
        (spoilt / file.name).write_bytes(file.read_bytes())
    assert 0 < loaded < count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin < 300_000  # KiB


def test_files_cut_short_at_every_power_of_two(tmp_path: pathlib.Path):
    folder = copy_adapter("llama-dora", tmp_path)
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        for size in (0, *(2**power for power in range(len(raw).bit_length()))):
            file.write_bytes(raw[:size])
            assert not attempt("llama-dora", folder) or size == len(raw), (file.name, size)
        file.write_bytes(raw)


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_values_of_keys_are_read_or_refused(changes: dict[str, object]):
    try:
        config = parse_config({"peft_type": "LORA", "target_modules": ["q_proj"], **changes})
        config.targets("model.layers.0.self_attn.q_proj")
        config.scale("model.layers.0.self_attn.q_proj")
        said = ""
    except AdapterError as error:
        said = str(error)
    assert said.isprintable(), said
