"""Qwen3-Next and Qwen3.5 as GGUF and back, dense and in blocks; settings that files cannot express are rejected."""

import pathlib
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.registry import family_for
from jaxinfer.weights.gguf.checkpoint import GgufCheckpoint, open_gguf
from tests.models.parity import logit_faults
from tests.weights.files import refused
from tests.weights.gguf.files import TOKENIZER, logits_of, q8_0, saved, write_gguf
from tests.weights.gguf.hybrid_files import converted
from tools.oracle.golden import Golden, load, make_tensors

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens" / "models"
CASES = (
    "qwen3_next-hub",
    "qwen3_next-kinds-biased-dense-tied",
    "qwen3_next-one-value-head-each-two-taps",
    "qwen3_5_text-dense",
    "qwen3_5_moe_text-experts",
)
EACH = ("qwen3_next-hub", "qwen3_5_text-dense", "qwen3_5_moe_text-experts")


def written(path: pathlib.Path, name: str, without: str = "", **changes: Any) -> tuple[Golden, GgufCheckpoint]:
    case = load(GOLDENS / name)
    metadata, tensors = converted(case.config, case.tensors())
    arch = metadata["general.architecture"]
    metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    metadata.pop(f"{arch}.{without}", None)
    return case, open_gguf(write_gguf(path / "model.gguf", metadata, tensors))


def same_tensors(checkpoint: GgufCheckpoint, expected: dict[str, np.ndarray]) -> None:
    """Check that tensors are bitwise identical, except norms (stored plus one) and decays (stored as powers of e)."""
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert checkpoint.tensors[name].shape == tensor.shape, name
        slack = 3e-7 if name.endswith(("norm.weight", "A_log")) else 0
        np.testing.assert_allclose(checkpoint.read(name), tensor, rtol=0, atol=slack, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path: pathlib.Path, name: str) -> None:
    case, checkpoint = written(tmp_path, name)
    told = dict(checkpoint.config_json)
    family = family_for(case.config)
    assert family_for(told) is family
    assert family.config(told) == family.config(case.config | {"norm_topk_prob": True})  # files have no norm_topk_prob
    same_tensors(checkpoint, case.tensors())


def with_values(name: str, values: int) -> tuple[Golden, dict[str, Any], dict[str, np.ndarray]]:
    """Return a case, its config and tensors with ``values`` value heads per key head.

    With two key heads of two value heads, the reordering is its own inverse.
    """
    case = load(GOLDENS / name)
    sizes = {4: 2 * values, 8: 4 * values, 96: 48 * values, 160: 64 + 48 * values, 256: 64 + 96 * values}
    shapes = {key: _grown(key, shape, sizes) for key, shape in case.shapes.items()}
    tensors = make_tensors(case.seed, shapes, case.norm_centre, case.query_share)
    return case, case.config | {"linear_num_value_heads": 2 * values}, tensors


def _grown(name: str, shape: tuple[int, ...], sizes: dict[int, int]) -> tuple[int, ...]:
    """Return the shape of a recurrence tensor, from two key heads of 16 and four value heads of 24 to ``sizes``."""
    if "linear_attn" not in name:
        return shape
    kept = shape[1:] if name.endswith("conv1d.weight") else tuple(sizes.get(size, size) for size in shape[1:])
    return (sizes.get(shape[0], shape[0]), *kept)


@pytest.mark.parametrize("name", EACH)
def test_three_value_heads_of_a_key_head(tmp_path: pathlib.Path, name: str) -> None:
    _, config, tensors = with_values(name, 3)
    same_tensors(open_gguf(write_gguf(tmp_path / "model.gguf", *converted(config, tensors))), tensors)


def rounded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return decays as a file rounds them, to powers of e in float32, which alone moves logits by 3e-6."""
    return {key: np.log(np.exp(tensor)) if key.endswith("A_log") else tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("values", [2, 3])
@pytest.mark.parametrize("name", EACH)
def test_logits_are_those_of_the_checkpoint(tmp_path: pathlib.Path, name: str, values: int) -> None:
    """Logits of the golden file's own heads also match transformers, within twice the bound: a file's rounding moves
    logits, by amounts that depend on the processor's order of sums."""
    case, config, tensors = with_values(name, values)
    metadata, filed = converted(config, tensors)
    path = write_gguf(tmp_path / "model.gguf", metadata | TOKENIZER, filed)
    ids = case.prompt + case.greedy[:-1]
    ours, expected = (logits_of(each, ids) for each in (path, saved(tmp_path, config, rounded(tensors))))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
    if values == case.config["linear_num_value_heads"] // case.config["linear_num_key_heads"]:
        assert logit_faults(case, ours, room=2.0) == []


def test_the_first_files_have_projections_in_one(tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / "qwen3_next-hub")
    metadata, tensors = converted(case.config, case.tensors())
    for layer in range(3):
        del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
        whole = case.tensors()[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        tensors[f"blk.{layer}.ssm_in.weight"] = whole
    same_tensors(open_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors)), case.tensors())


def test_what_predicts_further_tokens_is_passed_over(tmp_path: pathlib.Path) -> None:
    """MTP layers follow the last layer and get names that the family ignores."""
    case = load(GOLDENS / "qwen3_5_text-dense")
    metadata, tensors = converted(case.config, case.tensors())
    metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    tensors |= {"blk.4.attn_norm.weight": np.ones(40, "f4"), "blk.4.nextn.eh_proj.weight": np.ones((40, 80), "f4")}
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors))
    told = dict(checkpoint.config_json)
    assert family_for(told).config(told) == family_for(case.config).config(case.config)
    new = checkpoint.tensors.keys() - case.tensors().keys()
    assert new == {"mtp.layers.4.input_layernorm.weight", "mtp.layers.4.eh_proj.weight"}


def in_blocks(path: pathlib.Path, name: str, value_dim: int) -> tuple[dict[str, np.ndarray], GgufCheckpoint]:
    """Return the dense tensors of a model of hidden size 64, and a file with its recurrence matrices in Q8_0."""
    case = load(GOLDENS / name)
    values = 4 * value_dim
    config = case.config | {"hidden_size": 64, "linear_value_head_dim": value_dim}
    sizes = {40: 64, 24: value_dim, 96: values, 160: 64 + values, 256: 64 + 2 * values}
    kept = {
        key: tuple(sizes.get(size, size) for size in shape)
        for key, shape in case.shapes.items()
        if "layers.0." in key or "layers" not in key
    }
    rng = np.random.default_rng(0)
    plain = {key: rng.standard_normal(shape, np.float32) for key, shape in kept.items()}
    metadata, tensors = converted(config | {"num_hidden_layers": 1}, plain)
    blocks = {
        key: q8_0(tensor) if key.split(".")[2] in ("ssm_out", "attn_qkv", "attn_gate") else tensor
        for key, tensor in tensors.items()
        if key.startswith("blk.")
    }
    return plain, open_gguf(write_gguf(path / "model.gguf", metadata, {**tensors, **blocks}))


@pytest.mark.parametrize("value_dim", [32, 24])
@pytest.mark.parametrize("name", ["qwen3_next-hub", "qwen3_5_text-dense"])
def test_blocks_are_moved_and_not_cut(tmp_path: pathlib.Path, name: str, value_dim: int) -> None:
    """A projection with reordered columns is dequantised where heads are not whole blocks."""
    plain, checkpoint = in_blocks(tmp_path, name, value_dim)
    inner = "model.layers.0.linear_attn."
    names = {inner + "out_proj.weight"} | {
        key for key in plain if key.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight"))
    }
    cut = {inner + "out_proj.weight"} if value_dim == 24 and "next" not in name else set()
    assert checkpoint.weights.keys() == names - cut
    for key in names:
        found = checkpoint.read(key) if key in cut else checkpoint.weights[key].dense()
        assert np.abs(found - plain[key]).max() < np.abs(plain[key]).max() / 120


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.time_step_rank": 3}, "'3' as qwen35.ssm.time_step_rank"),
        ({"ssm.inner_size": 97}, "'97' as qwen35.ssm.inner_size"),
        ({"ssm.group_count": 0}, "as qwen35.ssm.time_step_rank"),
        ({"ssm.state_size": 4096}, "qwen35.ssm.state_size"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    with refused(message):
        _, checkpoint = written(tmp_path, "qwen3_5_text-dense", **changes)
        checkpoint.read("model.layers.0.linear_attn.in_proj_qkv.weight")


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("key", ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"])
def test_what_is_not_given(tmp_path: pathlib.Path, name: str, key: str) -> None:
    with refused(f"lacks the metadata .*ssm.{key}"):
        written(tmp_path, name, without=f"ssm.{key}")


def test_decays_above_zero(tmp_path: pathlib.Path) -> None:
    case = load(GOLDENS / "qwen3_next-hub")
    metadata, tensors = converted(case.config, case.tensors())
    tensors["blk.1.ssm_a"] = -tensors["blk.1.ssm_a"]
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors))
    with refused("'blk.1.ssm_a' .* has decays that are not at most 0"):
        checkpoint.read("model.layers.1.linear_attn.A_log")
