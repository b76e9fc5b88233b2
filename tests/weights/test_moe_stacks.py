"""Experts as separate tensors or one, in both orientations: the same parameters for every checkpoint."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.models.specs import fused_experts, gated_experts
from jaxinfer.quant import dense, with_activations
from jaxinfer.types import walk_specs
from jaxinfer.weights import load_params, open_checkpoint
from jaxinfer.weights.moe_stacks import with_experts
from tests.models.parity import teacher_forced
from tests.models.test_parity import golden
from tests.weights.files import refused, write_tensors
from tests.weights.formats.checkpoints import save

Tensors = Mapping[str, np.ndarray]
EXPERTS = 3
AT = "model.layers.0.mlp"


def weights(d: int, hidden: int) -> dict[str, np.ndarray]:
    """Return gate, up and down weights of all experts, as [experts, out, in]."""
    rng = np.random.default_rng(0)
    forms = {"gate_proj": (hidden, d), "up_proj": (hidden, d), "down_proj": (d, hidden)}
    return {kind: rng.standard_normal((EXPERTS, *form)).astype(np.float32) for kind, form in forms.items()}


def one_by_one(all_of: Tensors, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensors:
    kinds = zip(all_of.items(), names, strict=True)
    return {f"{AT}.experts.{e}.{name}.weight": value[e] for (_, value), name in kinds for e in range(EXPERTS)}


def upright(all_of: Tensors) -> Tensors:
    both = np.concatenate([all_of["gate_proj"], all_of["up_proj"]], axis=1)
    return {f"{AT}.experts.gate_up_proj": both, f"{AT}.experts.down_proj": all_of["down_proj"]}


def turned(all_of: Tensors) -> Tensors:
    return {name: value.swapaxes(1, 2) for name, value in upright(all_of).items()}


def of_mlx(all_of: Tensors) -> Tensors:
    return {f"{AT}.switch_mlp.{kind}.weight": value for kind, value in all_of.items()}


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "one by one": one_by_one,
    "upright": upright,
    "turned": turned,
    "mlx": of_mlx,
}


def loaded(folder: pathlib.Path, tensors: Tensors, specs: Any) -> Any:
    write_tensors(folder / "model.safetensors", tensors)
    shapes = {name: value.shape for name, value in tensors.items()}
    return load_params(open_checkpoint(folder), with_experts(specs, shapes), "float32")


def assert_all(params: Any, all_of: Tensors) -> None:
    np.testing.assert_array_equal(params["gate_up"], np.stack([all_of["gate_proj"], all_of["up_proj"]], axis=1))
    np.testing.assert_array_equal(params["down"], all_of["down_proj"])


@pytest.mark.parametrize(("d", "hidden"), [(6, 4), (8, 4), (4, 4)], ids=["oblong", "2 hidden = d", "hidden = d"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, d: int, hidden: int, tmp_path: pathlib.Path) -> None:
    all_of = weights(d, hidden)
    specs = gated_experts(f"{AT}.experts", EXPERTS, d, hidden)
    assert_all(loaded(tmp_path, FORMS[form](all_of), specs), all_of)


@pytest.mark.parametrize("form", ["upright", "mlx"])
def test_names_of_mixtral(form: str, tmp_path: pathlib.Path) -> None:
    all_of = weights(6, 4)
    specs = gated_experts(f"{AT}.experts", EXPERTS, 6, 4, ("w1", "w3", "w2"))
    assert_all(loaded(tmp_path, FORMS[form](all_of), specs), all_of)


@pytest.mark.parametrize("form", ["one by one", "turned"])
def test_a_family_that_names_one_tensor(form: str, tmp_path: pathlib.Path) -> None:
    """Llama 4, whose experts third-party tools write as separate tensors."""
    all_of, at = weights(6, 4), f"{AT}.experts"
    specs = fused_experts(f"{at}.gate_up_proj", f"{at}.down_proj", EXPERTS, 6, 4)
    assert_all(loaded(tmp_path, FORMS[form](all_of), specs), all_of)


def test_one_source_for_all_experts() -> None:
    """A stored weight is read as a whole: one source avoids a read per expert."""
    specs = gated_experts(f"{AT}.experts", EXPERTS, 6, 4)
    shapes = {name: value.shape for name, value in of_mlx(weights(6, 4)).items()}
    assert [len(spec.sources) for _, spec in walk_specs(with_experts(specs, shapes))] == [2, 1]


@pytest.mark.parametrize("change", ["gate_up_proj", "down_proj"])
def test_what_fits_neither_way_is_refused(change: str, tmp_path: pathlib.Path) -> None:
    tensors = dict(turned(weights(6, 4)))
    name = f"{AT}.experts.{change}"
    tensors[name] = tensors[name][:, :-1]
    with refused(rf"'{name}' of .* has shape .* where config.json asks"):
        loaded(tmp_path, tensors, gated_experts(f"{AT}.experts", EXPERTS, 6, 4))


def test_too_few_experts_are_refused(tmp_path: pathlib.Path) -> None:
    tensors = {name: value[:2] for name, value in upright(weights(6, 4)).items()}
    with refused(r"has shape \[2, 8, 6\] where config.json asks \[3, 8, 6\]"):
        loaded(tmp_path, tensors, gated_experts(f"{AT}.experts", EXPERTS, 6, 4))


def test_one_of_two_tensors_is_missing(tmp_path: pathlib.Path) -> None:
    tensors = {name: value for name, value in turned(weights(6, 4)).items() if "gate_up" in name}
    with refused("lacks .* 'model.layers.0.mlp.experts.0.gate_proj.weight'"):
        loaded(tmp_path, tensors, gated_experts(f"{AT}.experts", EXPERTS, 6, 4))


def test_qwen3_vl_moe_as_it_is_published(tmp_path: pathlib.Path) -> None:
    """Experts on the hub are [in, out]; those saved by transformers, including the goldens, are [out, in]."""
    case = golden("qwen3_vl_moe-hub")
    saved = case.tensors()
    hub = {name: value.swapaxes(1, 2) if value.ndim == 3 else value for name, value in saved.items()}
    assert hub["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 48)
    found = []
    for name, tensors in (("saved", saved), ("hub", hub)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, tensors)
        (tmp_path / name / "config.json").write_text(json.dumps(case.config))
        found.append(load_model(str(tmp_path / name), dtype="float32", show_progress=False).params)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *found))


def test_llama4_in_fp8_expert_by_expert(tmp_path: pathlib.Path) -> None:
    """The published FP8 has linear layers of compressed-tensors where the 16-bit model has one tensor."""
    case = golden("llama4_text-plain-heads-tied")
    tensors, plain = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, value in case.tensors().items():
        plain[name] = value
        at, _, kind = name.rpartition(".experts.")
        if not at:
            tensors[name] = value
            continue
        scales = abs(value).max(1, keepdims=True) / 448
        codes = (value / scales).astype(ml_dtypes.float8_e4m3fn)
        plain[name] = codes.astype(np.float32) * scales
        half = codes.shape[-1] // (2 if kind == "gate_up_proj" else 1)
        for part, own in enumerate(("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)):
            taken = slice(part * half, (part + 1) * half)
            for expert in range(len(value)):
                module = f"{at}.experts.{expert}.{own}"
                tensors[f"{module}.weight"] = codes[expert, :, taken].T
                tensors[f"{module}.weight_scale"] = scales[expert, :, taken].T
    scheme = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}, "targets": ["Linear"]}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": scheme}}
    models = []
    for name, own, config in (("fp8", tensors, {"quantization_config": said}), ("plain", plain, {})):
        (tmp_path / name).mkdir()
        save(tmp_path / name, own)
        (tmp_path / name / "config.json").write_text(json.dumps(case.config | config))
        models.append(load_model(str(tmp_path / name), dtype="float32", show_progress=False))
    fp8, wanted = models
    for kind in ("gate_up", "down"):
        np.testing.assert_array_equal(
            dense(fp8.params["layers_0"]["mlp"][kind]), wanted.params["layers_0"]["mlp"][kind]
        )
    logits = [teacher_forced(model.replace(params=with_activations(model.params, "none")), case) for model in models]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
