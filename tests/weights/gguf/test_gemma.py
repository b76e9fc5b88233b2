"""Gemma 3n and Gemma 4 as GGUF and back, and rejected files."""

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.registry import family_for
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from tests.models.parity import logit_faults
from tests.weights.files import refused
from tests.weights.gguf.files import TOKENIZER, Blocks, logits_of, q8_0, saved, write_gguf
from tests.weights.gguf.gemma_files import tensors_of_file
from tools.oracle.gguf_cases import PER_LAYER, Converted, read_converted
from tools.oracle.golden import Golden, load

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens"
_LENGTHS = ("attention.key_length", "attention.value_length")
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
_TABLE = "model.embed_tokens_per_layer.weight"


def answer(name: str) -> Converted:
    return read_converted(GOLDENS / "gguf" / f"{name}.json")


def filed(name: str) -> tuple[Golden, dict[str, Any], dict[str, np.ndarray]]:
    """Return a case, and the metadata and tensors of its file."""
    case, told = load(GOLDENS / "models" / name), answer(name)
    return case, dict(told.metadata), tensors_of_file(told.config, told.metadata, case.tensors())


def written(path: pathlib.Path, name: str, without: str = "", **changes: Any) -> tuple[Golden, GgufCheckpoint]:
    case, metadata, tensors = filed(name)
    arch = metadata["general.architecture"]
    metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if key != f"{arch}.{without}"}
    return case, open_gguf(write_gguf(path / "model.gguf", kept, tensors))


@pytest.mark.parametrize("name", PER_LAYER)
def test_files_are_those_of_the_converter(name: str) -> None:
    told = answer(name)
    tensors = tensors_of_file(told.config, told.metadata, told.checkpoint())
    sums = {
        key: ["F32", list(tensor.shape), hashlib.sha256(tensor.tobytes()).hexdigest()[:16]]
        for key, tensor in tensors.items()
    }
    assert sums.keys() == told.tensors.keys()
    assert sums == {key: list(told.tensors[key]) for key in sums}


@pytest.mark.parametrize("name", PER_LAYER)
def test_there_and_back(tmp_path: pathlib.Path, name: str) -> None:
    """Equal tensors, except for padding rows of Gemma 3n's per-layer embedding table."""
    case, checkpoint = written(tmp_path, name)
    told, family = dict(checkpoint.config_json), family_for(case.config)
    assert family_for(told) is family
    padded = {"vocab_size_per_layer_input": told.get("vocab_size_per_layer_input", 262_144)}
    assert family.config(told) == family.config({**answer(name).config, **padded})
    expected = case.tensors()
    assert checkpoint.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        found = checkpoint.read(key)
        assert found.shape == tensor.shape or key == _TABLE, key
        np.testing.assert_array_equal(found[: len(tensor)], tensor, err_msg=key)
        assert not found[len(tensor) :].any()


def filed_logits(
    path: pathlib.Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]
) -> np.ndarray:
    return logits_of(write_gguf(path / "model.gguf", metadata | TOKENIZER, tensors), ids)


@pytest.mark.parametrize("name", PER_LAYER)
def test_logits_are_those_of_the_checkpoint(tmp_path: pathlib.Path, name: str) -> None:
    """Logits also match transformers. Tokens without per-layer embeddings are left out: a file of Gemma 3n has zeros
    there, and a checkpoint uses the first token's."""
    case, metadata, tensors = filed(name)
    ids = case.prompt + case.greedy[:-1]
    known = case.config.get("vocab_size_per_layer_input", case.config["vocab_size"])
    within = [index if index < known else 1 for index in ids]
    expected = logits_of(saved(tmp_path, case.config, case.tensors()), within)
    ours = filed_logits(tmp_path, metadata, tensors, within)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
    if within == ids:
        assert logit_faults(case, ours) == []


def _one_more(norm: np.ndarray) -> np.ndarray:
    return norm + 1


def _turned(stack: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stack.swapaxes(1, 2))


def _exchanged(stack: np.ndarray) -> np.ndarray:
    """Return a stack with up before gate."""
    return np.concatenate(np.split(stack, 2, axis=1)[::-1], axis=1)


def _reversed(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor[::-1])


@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        ("gemma4_text-effective-hub", "blk.1.attn_norm.weight", _one_more),
        ("gemma4_text-effective-hub", "per_layer_proj_norm.weight", _one_more),
        ("gemma4_text-experts", "blk.0.ffn_gate_up_exps.weight", _exchanged),
        ("gemma4_text-experts", "blk.1.ffn_down_exps.scale", _reversed),
        ("gemma4_text-experts", "blk.1.ffn_gate_inp.scale", _reversed),
        ("gemma3n_text-hub", "blk.1.laurel_post_norm.weight", _one_more),
        ("gemma3n_text-hub", "altup_proj.weight", _turned),
        ("gemma3n_text-hub", "altup_unembd_proj.weight", _turned),
        ("gemma3n_text-hub", "altup_proj.weight", _reversed),
    ],
)
def test_logits_tell_a_wrong_file(
    tmp_path: pathlib.Path, name: str, tensor: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    case, metadata, tensors = filed(name)
    changed = tensors | {tensor: change(tensors[tensor])}
    right, wrong = (filed_logits(tmp_path, metadata, each, case.prompt) for each in (tensors, changed))
    assert np.abs(wrong - right).max() > 1e-3


def test_what_no_product_reads_is_made_plain(tmp_path: pathlib.Path) -> None:
    case, metadata, tensors = filed("gemma3n_text-default-pattern-hub")
    wide = {"altup_router", "per_layer_token_embd", "attn_q"}
    files: dict[str, np.ndarray | Blocks] = {}
    for key, tensor in tensors.items():
        stem = key.removesuffix(".weight").rpartition(".")[2]
        files[key] = q8_0(tensor) if stem in wide and tensor.shape[-1] % 32 == 0 else tensor
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata, files))
    assert {key.rpartition(".self_attn.")[2] for key in checkpoint.weights} == {"q_proj.weight"}
    for key in ("model.layers.1.altup.modality_router.weight", "model.layers.1.self_attn.q_proj.weight"):
        found = checkpoint.read(key) if key in checkpoint.tensors else checkpoint.weights[key].dense()
        assert np.abs(found - case.tensors()[key]).max() < np.abs(found).max() / 120


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4_text-experts", dict.fromkeys(_LENGTHS, 16), "has not 8 numbers in rope_freqs.weight"),
        ("gemma4_text-experts", {"rope.dimension_count_swa": 8}, "'8' as gemma4.rope.dimension_count_swa"),
        ("gemma4_text-experts", {"attention.sliding_window_pattern": 2}, "'2' as gemma4.attention.sliding_window_pat"),
        ("gemma4_text-experts", dict.fromkeys(_LENGTHS, 24), "'24' as gemma4.attention.key_length"),
        ("gemma4_text-effective-hub", {"feed_forward_length": [40]}, "a list as gemma4.feed_forward_length"),
        ("gemma4_text-experts", {"attention.value_length": 16}, "'16' as gemma4.attention.value_length"),
        ("gemma4_text-experts", {"attention.value_length_swa": 32}, "'32' as gemma4.attention.value_length_swa"),
        ("gemma4_text-experts", {"rope.scaling.type": "yarn"}, "'yarn' as gemma4.rope.scaling.type"),
        ("gemma4_text-experts", _LINEAR, "'linear' as gemma4.rope.scaling.type"),
        ("gemma3n_text-hub", _LINEAR, "'linear' as gemma3n.rope.scaling.type"),
        ("gemma3n_text-hub", {"activation_sparsity_scale": 0.5}, "'0.5' as gemma3n.activation_sparsity_scale"),
    ],
)
def test_what_is_not_supported(tmp_path: pathlib.Path, name: str, changes: dict[str, Any], message: str) -> None:
    with refused(message):
        written(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gemma4_text-experts", "attention.key_length_swa"),
        ("gemma4_text-experts", "expert_used_count"),
        ("gemma4_text-experts", "attention.shared_kv_layers"),
        ("gemma3n_text-hub", "altup.num_inputs"),
        ("gemma3n_text-hub", "activation_sparsity_scale"),
    ],
)
def test_what_is_not_given(tmp_path: pathlib.Path, name: str, key: str) -> None:
    with refused(f"lacks the metadata .*{key}"):
        written(tmp_path, name, without=key)


def test_frequencies_that_turn_behind_those_that_do_not(tmp_path: pathlib.Path) -> None:
    _, metadata, tensors = filed("gemma4_text-experts")
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"][::-1].copy()
    with refused("rope_freqs.weight that are 1 behind others"):
        open_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors))


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors as ``--fuse-qkv`` writes them: fused in layers that have all three."""
    made = dict(tensors)
    for value in [key for key in tensors if key.endswith(".attn_v.weight")]:
        names = [value.replace(".attn_v.", f".attn_{part}.") for part in "qkv"]
        made[value.replace(".attn_v.", ".attn_qkv.")] = np.concatenate([made.pop(name) for name in names])
    return made


@pytest.mark.parametrize("name", PER_LAYER)
def test_queries_keys_and_values_in_one(tmp_path: pathlib.Path, name: str) -> None:
    """KV heads and head sizes differ from layer to layer."""
    case, metadata, tensors = filed(name)
    apart, one = (open_gguf(write_gguf(tmp_path / "model.gguf", metadata, each)) for each in (tensors, fused(tensors)))
    assert one.config_json == apart.config_json
    assert one.tensors.keys() == apart.tensors.keys()
    for key, tensor in case.tensors().items():
        np.testing.assert_array_equal(one.read(key)[: len(tensor)], tensor, err_msg=key)


@pytest.mark.parametrize("rows", [64, 80, 112, 120])
def test_rows_in_one_that_are_no_heads(tmp_path: pathlib.Path, rows: int) -> None:
    """Fused: four query heads of 16, plus nothing, half a KV pair, one and a half, or no whole number of heads."""
    _, metadata, tensors = filed("gemma4_text-experts")
    made = fused(tensors)
    made["blk.0.attn_qkv.weight"] = np.zeros((rows, 48), np.float32)
    with refused("'4' as gemma4.attention.head_count"):
        open_gguf(write_gguf(tmp_path / "model.gguf", metadata, made))


def test_gates_and_ups_apart(tmp_path: pathlib.Path) -> None:
    _, metadata, tensors = filed("gemma4_text-experts")
    gate, up = np.split(tensors.pop("blk.0.ffn_gate_up_exps.weight"), 2, axis=1)
    tensors |= {"blk.0.ffn_gate_exps.weight": gate.copy(), "blk.0.ffn_up_exps.weight": up.copy()}
    with refused("ffn_gate_exps and ffn_up_exps apart"):
        open_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors))
