"""Folders in formats that no installed library writes: loaded and served as their dequantised weights are."""

import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import LLM, load_model
from jaxinfer.models.model import Model
from jaxinfer.quant import dense, is_stored, with_activations
from jaxinfer.types import walk_specs
from tests.engine.test_quantised import assert_logprobs
from tests.models.test_parity import golden
from tests.weights.formats.checkpoints import pack, save
from tests.weights.formats.test_mlx import packed

Tensors = dict[str, np.ndarray]
GROUP = 32
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mlx(tensors: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Convert to mlx-lm's format: experts in one tensor, 4 bits for whole groups, 8 for routers, 6 for v_proj."""
    stored, plain, others = Tensors(), Tensors(), dict[str, Any]()
    for name, tensor in stacked(tensors).items():
        module, bits = name.removesuffix(".weight"), 4
        if tensor.ndim < 2 or tensor.shape[-1] % GROUP:
            stored[name] = plain[name] = tensor
            continue
        if name.endswith((".gate.weight", "v_proj.weight")):
            bits = 8 if ".gate." in name else 6
            others[module] = {"group_size": GROUP, "bits": bits}
        codes, scales, biases = affine(tensor, bits)
        stored |= {name: packed(codes, bits), f"{module}.scales": scales, f"{module}.biases": biases}
        wide = [np.repeat(each.astype(np.float32), GROUP, axis=-1) for each in (scales, biases)]
        plain[name] = codes.astype(np.float32) * wide[0] + wide[1]
    return stored, unstacked(plain, tensors), {"quantization": {"group_size": GROUP, "bits": 4, **others}}


def affine(tensor: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = tensor.reshape(*tensor.shape[:-1], -1, GROUP)
    least, most = groups.min(-1), groups.max(-1)
    scales, biases = ((most - least) / ((1 << bits) - 1)).astype(np.float16), least.astype(np.float16)
    codes = (groups - biases[..., None].astype(np.float32)) / scales[..., None].astype(np.float32)
    return np.clip(np.rint(codes), 0, (1 << bits) - 1).astype(int).reshape(tensor.shape), scales, biases


def stacked(tensors: Tensors) -> Tensors:
    result, experts = Tensors(), dict[str, list[np.ndarray]]()
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            result[name] = tensor
        else:
            kind = _OF_MIXTRAL.get(match[3], match[3])
            experts.setdefault(f"{match[1]}.switch_mlp.{kind}.weight", []).append(tensor)
    return result | {name: np.stack(each) for name, each in experts.items()}


def unstacked(stacks: Tensors, names: Mapping[str, Any]) -> Tensors:
    def one(name: str) -> np.ndarray:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return stacks[name]
        return stacks[f"{match[1]}.switch_mlp.{_OF_MIXTRAL.get(match[3], match[3])}.weight"][int(match[2])]

    return {name: one(name) for name in names}


def fbgemm(tensors: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name and "lm_head" not in name:
            scales = (abs(tensor).max(-1, keepdims=True) / 448).astype(np.float32)
            codes = (tensor / scales).astype(ml_dtypes.float8_e4m3fn)
            stored |= {name: codes, f"{name}_scale": scales}
            plain[name] = codes.astype(np.float32) * scales
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 3.0, "modules_to_not_convert": ["lm_head"]}
    return stored, plain, {"quantization_config": config}


def dynamic(tensors: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Convert to GPTQModel's format: projections of a fused parameter in 8 bits, 4 bits, and unquantized."""
    stored, plain = Tensors(), Tensors()
    for name, tensor in tensors.items():
        module, bits = name.removesuffix(".weight"), 8 if name.endswith(("q_proj.weight", "up_proj.weight")) else 4
        if tensor.ndim != 2 or "_proj" not in name or "v_proj" in name or tensor.shape[1] % GROUP:
            stored[name] = plain[name] = tensor
            continue
        codes, scales, biases = affine(tensor, bits)
        zeros = np.clip(np.rint(-biases.astype(np.float32) / scales.astype(np.float32)), 0, (1 << bits) - 1).astype(int)
        stored |= {
            f"{module}.qweight": pack(codes, bits).T,
            f"{module}.qzeros": pack(zeros.T, bits),
            f"{module}.scales": np.ascontiguousarray(scales.T),
            f"{module}.g_idx": np.arange(tensor.shape[1], dtype=np.int32) // GROUP,
        }
        wide = [np.repeat(each.astype(np.float32), GROUP, axis=-1) for each in (scales, zeros)]
        plain[name] = (codes - wide[1]) * wide[0]
    rules = {r"-:.*v_proj": {}, r".*\.(?:q|up)_proj$": {"bits": 8}}
    said = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"}
    return stored, plain, {"quantization_config": {**said, "dynamic": rules}}


def folders(
    folder: pathlib.Path, case: str, convert: Callable[[Tensors], tuple[Tensors, Tensors, dict[str, Any]]]
) -> tuple[Model, Model]:
    """Return the model of the quantised folder and that of its dequantised weights."""
    model = golden(case)
    stored, plain, said = convert(model.tensors())
    for name, tensors, config in (("stored", stored, model.config | said), ("plain", plain, model.config)):
        (folder / name).mkdir()
        save(folder / name, tensors)
        (folder / name / "config.json").write_text(json.dumps(config))
    one, other = (load_model(str(folder / name), dtype="float32", show_progress=False) for name in ("stored", "plain"))
    return one, other


def assert_same_numbers(stored: Model, plain: Model) -> None:
    kept = 0
    for path, spec in walk_specs(plain.specs):
        own, wanted = stored.params, plain.params
        for key in path:
            own, wanted = own[key], wanted[key]
        kept += is_stored(own)
        wanted = jnp.moveaxis(wanted, 0, -1) if spec.inputs == 0 and is_stored(own) else wanted
        np.testing.assert_array_equal(dense(own), wanted, err_msg="/".join(path))
    assert kept > 4


CASES = [
    pytest.param("qwen3-tied-hub", mlx, id="mlx, tied embeddings"),
    pytest.param("qwen3_moe-many-experts", mlx, id="mlx, experts"),
    pytest.param("qwen3-tied-hub", fbgemm, id="fbgemm"),
    pytest.param("qwen3-tied-hub", dynamic, id="gptq, modules that differ"),
]


@pytest.mark.parametrize(("case", "convert"), CASES)
def test_a_folder_is_the_model_of_its_numbers(case: str, convert: Any, tmp_path: pathlib.Path) -> None:
    stored, plain = folders(tmp_path, case, convert)
    assert_same_numbers(stored, plain)
    tokens = jnp.asarray([golden(case).prompt])
    expected = jax.jit(plain.apply)(plain.params, tokens)
    found = jax.jit(stored.apply)(with_activations(stored.params, "none"), tokens)
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(jnp.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "convert"), CASES)
def test_a_folder_is_served(case: str, convert: Any, tmp_path: pathlib.Path) -> None:
    stored, _ = folders(tmp_path, case, convert)
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 64, "page_size": 16, "prefill_sizes": (32,)}
    llm, prompt = LLM(stored, num_pages=8, **settings), golden(case).prompt
    assert_logprobs(llm, prompt, np.asarray(llm.model.apply(llm.model.params, jnp.asarray([prompt]))[0]))


def test_fbgemm_rounds_inputs_up_to_its_bound(tmp_path: pathlib.Path) -> None:
    stored, _ = folders(tmp_path, "qwen3-tied-hub", fbgemm)
    tokens = jnp.asarray([golden("qwen3-tied-hub").prompt])
    plain, bounded = (
        stored.apply(params, tokens) for params in (with_activations(stored.params, "none"), stored.params)
    )
    layouts = {leaf.layout for leaf in jax.tree.leaves(stored.params, is_leaf=is_stored) if is_stored(leaf)}
    assert {(layout.activations, layout.activation_bound) for layout in layouts} == {("float8_e4m3fn", 3.0)}
    assert 1e-3 < float(jnp.abs(plain - bounded).max()) < 1.0
