"""Adapters that do not fit their configuration or the model are rejected with an error that names the mismatch."""

import json
import logging
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.peft.read import Base, read_adapter
from jaxinfer.models.model import abstract
from jaxinfer.types import EMBEDDING, HEAD, walk_specs
from jaxinfer.weights import load_params
from jaxinfer.weights.memory import InMemoryCheckpoint
from tests.lora.goldens import GOLDENS, copy_adapter, golden
from tools.oracle.golden import make_tensors, uniform

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, np.ndarray]], object]


def specs_of(name: str) -> Any:
    return abstract(golden(name).config, "float32").specs


def read(
    name: str, folder: pathlib.Path, max_rank: int = 8, has_base: bool = True, base: Base | None = None
) -> Adapter:
    """Read an adapter, with random base parameters if ``base`` is None."""
    specs = specs_of(name)
    shapes = {path: spec.shape for path, spec in walk_specs(specs)}
    random = (lambda path: uniform(7, "/".join(path), shapes[path])) if has_base else None
    return read_adapter(folder, specs, max_rank=max_rank, base=base or random)


def own_base(name: str) -> Base:
    """Return the base model's own parameters."""
    case = golden(name)
    tensors = InMemoryCheckpoint(pathlib.Path(name), make_tensors(case.seed, case.shapes, case.norm_centre))
    specs = specs_of(name)
    params = load_params(tensors, specs, "float32", lambda path, spec, fill: np.array(fill(())))

    def base(path: tuple[str, ...]) -> np.ndarray:
        value: Any = params
        for key in path:
            value = value[key]
        return np.asarray(value)

    return base


def changed(
    name: str, folder: pathlib.Path, edit: Edit = lambda _: None, config: Mapping[str, Any] | None = None
) -> pathlib.Path:
    copy_adapter(name, folder, config)
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def put(name: str, value: np.ndarray) -> Edit:
    return lambda tensors: tensors.update({name: value})


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), "layers.0.self_attn.q_proj.lora_B.weight"),
        (lambda t: t.pop(f"{Q0}.lora_A.weight"), "layers.0.self_attn.q_proj.lora_A.weight"),
        (put(f"{Q0}.lora_C.weight", zeros(4, 32)), "lora_C.weight"),
        (put(f"{Q0}.lora_A.extra", zeros(4, 32)), "lora_A.extra"),
        (put("base_model.model.lm_head.weight", zeros(64, 32)), "lm_head.weight"),
        (put("model.layers.0.self_attn.q_proj.lora_A.weight", zeros(4, 32)), "model.layers.0"),
        (put(f"{Q0}.lora_magnitude_vector", zeros(32)), "lora_magnitude_vector"),
        (put(f"{Q0}.lora_B.bias", zeros(32)), "lora_B.bias"),
        (put(f"{Q0}.base_layer.bias", zeros(32)), "q_proj.base_layer.bias"),
        (put(f"{Q0}.base_layer.weight", zeros(32, 32)), "q_proj.base_layer.weight"),
        (put(f"{Q0}.lora_embedding_A", zeros(4, 32)), "lora_embedding_A"),
        (put(f"{Q0}.lora_A.weight", zeros(3, 32)), r"\[3, 32\], not \[4, 32\]"),
        (put(f"{Q0}.lora_A.weight", zeros(4, 31)), r"\[4, 31\], not \[4, 32\]"),
        (put(f"{Q0}.lora_B.weight", zeros(33, 4)), r"\[33, 4\], not \[32, 4\]"),
        (put(f"{Q0}.lora_A.weight", zeros(4, 32, 1)), "lora_A.weight"),
        (put(f"{Q0}.lora_A.weight", np.zeros((4, 32), np.int32)), "I32"),
        (put(f"{Q0}.lora_A.weight", np.full((4, 32), np.nan, np.float32)), "NaN"),
        (put(f"{Q0}.lora_B.weight", np.full((32, 4), np.inf, np.float32)), "infinite"),
        (put(f"{Q0}.lora_A.weight", np.full((4, 32), 1e300, np.float64)), "infinite"),
        (put(f"{Q0}.lora_B.weight", np.full((32, 4), 3e38, np.float32)), "layers_0/attention/qkv is too large"),
        (put("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", zeros(4, 32)), "layers.2"),
        (put("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", zeros(4, 32)), "k_proj.lora_A"),
        (put("base_model.model.model.layers.0.input_layernorm.lora_A.weight", zeros(4, 32)), "input_layernorm"),
        (put(f"{Q0}.base_layer.lora_A.weight", zeros(4, 32)), "q_proj.base_layer.lora_A"),
        (lambda t: t.clear(), "adapts nothing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(edit: Edit, named: str, tmp_path: pathlib.Path):
    with pytest.raises(AdapterError, match=named):
        read("llama-qv", changed("llama-qv", tmp_path, edit))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"target_modules": ["c_attn"]}, "target_modules: .* is called 'c_attn'.*'q_proj'"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight.*does not target"),
        ({"exclude_modules": ["v_proj"]}, "does not target"),
        ({"layers_to_transform": [0]}, "does not target"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters: .* is called 'mlp.experts.down_proj'"),
        ({"r": 3}, r"\[4, 32\], not \[3, 32\]"),
        ({"rank_pattern": {"q_proj": 2}}, r"\[4, 32\], not \[2, 32\]"),
        ({"use_dora": True}, "lacks 'model.layers.0.self_attn.q_proj.lora_magnitude_vector'"),
        ({"lora_bias": True}, "lacks 'model.layers.0.self_attn.q_proj.lora_B.bias'"),
    ],
)
def test_configurations_that_do_not_fit_are_named(config: Mapping[str, Any], named: str, tmp_path: pathlib.Path):
    with pytest.raises(AdapterError, match=named):
        read("llama-qv", copy_adapter("llama-qv", tmp_path, config))


def test_a_rank_beyond_the_largest_is_refused_with_both():
    with pytest.raises(AdapterError, match=r"rank 4 .* the 3 of max_lora_rank"):
        read("llama-qv", GOLDENS / "llama-qv", max_rank=3)
    assert read("llama-qv", GOLDENS / "llama-qv", max_rank=4).rank == 4


@pytest.mark.parametrize(
    ("name", "why"), [("llama-dora", "use_dora"), ("qwen2-bias-all", "bias"), ("llama-vocabulary", "base_layer.weight")]
)
def test_what_needs_the_models_own_weights_says_so(name: str, why: str):
    with pytest.raises(AdapterError, match=f"{why}.* needs the model's own"):
        read(name, GOLDENS / name, has_base=False)


def test_embeddings_that_are_not_the_models_own_are_refused():
    with pytest.raises(AdapterError, match=r"base_layer.weight.* is not the model's own"):
        read("llama-vocabulary", GOLDENS / "llama-vocabulary")


def test_biases_of_what_is_no_product_are_refused(tmp_path: pathlib.Path):
    norm = "base_model.model.transformer.h.0.ln_1.bias"
    with pytest.raises(AdapterError, match=r"ln_1\.bias"):
        read("gpt2-all", changed("gpt2-all", tmp_path, put(norm, np.ones(24, np.float32))))


def test_one_tensor_for_all_experts_twice_is_refused(tmp_path: pathlib.Path):
    def again(tensors: dict[str, np.ndarray]) -> None:
        for which in "AB":
            name = f"base_model.model.model.layers.0.mlp.experts.{{}}lora_{which}.weight"
            tensors[name.format("base_layer.base_layer.")] = tensors[name.format("")].copy()

    with pytest.raises(AdapterError, match=r"adapts twice: 'model.layers.0.mlp.experts.\w+_proj'"):
        read("mixtral-experts", changed("mixtral-experts", tmp_path, again))


def test_weights_that_are_to_be_tied_again_are_refused(tmp_path: pathlib.Path):
    copy_adapter("llama-tied-embeddings", tmp_path, {"ensure_weight_tying": True})
    with pytest.raises(AdapterError, match="ensure_weight_tying is True"):
        read("llama-tied-embeddings", tmp_path)


def test_pickles_are_refused_with_what_converts_them(tmp_path: pathlib.Path):
    copy_adapter("llama-qv", tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model.bin, a pickle.*weights_only=True"):
        read("llama-qv", tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_not_there_are_named(name: str, tmp_path: pathlib.Path):
    (copy_adapter("llama-qv", tmp_path) / name).unlink()
    with pytest.raises(AdapterError, match=re.escape(name)):
        read("llama-qv", tmp_path)


def test_files_that_are_too_large_are_not_read(tmp_path: pathlib.Path):
    copy_adapter("llama-qv", tmp_path)
    tensors = (tmp_path / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes((2**25).to_bytes(8, "little") + tensors)
    with pytest.raises(AdapterError, match="header of 33554432 bytes"):
        read("llama-qv", tmp_path)
    (tmp_path / "adapter_config.json").write_text(" " * (2**20 + 1))
    with pytest.raises(AdapterError, match="larger than 1048576 bytes"):
        read("llama-qv", tmp_path)


def test_identity_is_content(tmp_path: pathlib.Path):
    first = read("llama-qv", GOLDENS / "llama-qv").identity

    def of(folder: str, edit: Edit = lambda _: None, config: Mapping[str, Any] | None = None) -> str:
        return read("llama-qv", changed("llama-qv", tmp_path / folder, edit, config)).identity

    def one_bit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q0}.lora_A.weight"].view(np.uint32)[1, 2] ^= 1

    def other_dtype(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].astype(np.float64)

    assert len(first) == 64
    assert of("renamed") == first
    assert (
        of("described", config={"lora_dropout": 0.5, "task_type": None, "target_modules": ["q_proj", "v_proj"]})
        == first
    )
    others = [
        of("bit", one_bit),
        of("dtype", other_dtype),
        of("alpha", config={"lora_alpha": 9}),
        of("rslora", config={"use_rslora": True}),
    ]
    assert len({first, *others}) == 5


def test_parts_of_a_fused_parameter_lie_below_one_another():
    delta = read("llama-qv", GOLDENS / "llama-qv").deltas["layers_0", "attention", "qkv"]
    tensors = load_file(GOLDENS / "llama-qv" / "adapter_model.safetensors")
    assert delta.a.shape == (8, 32)
    assert delta.b.shape == (2, 4, 8, 8)  # KV heads; queries of a group, key and value; head_dim; ranks
    np.testing.assert_array_equal(delta.a[:4], tensors[f"{Q0}.lora_A.weight"])
    np.testing.assert_array_equal(delta.a[4:], tensors[f"{Q0.replace('q_proj', 'v_proj')}.lora_A.weight"])
    assert not delta.b[:, :2, :, 4:].any()  # queries do not use the ranks of the values
    assert not delta.b[:, 3, :, :4].any()
    assert not delta.b[:, 2].any()  # keys are not adapted
    b = tensors[f"{Q0}.lora_B.weight"].reshape(2, 2, 8, 4)
    np.testing.assert_array_equal(delta.b[:, :2, :, :4], 2.0 * b)  # alpha / r


def test_experts_one_by_one_are_read(tmp_path: pathlib.Path):
    """Experts as separate modules, named as by older writers, read the same as the tensor of all experts."""
    both = read("mixtral-experts", GOLDENS / "mixtral-experts")
    source = load_file(GOLDENS / "mixtral-experts" / "adapter_model.safetensors")
    single = {name: tensor for name, tensor in source.items() if "experts" not in name}
    for layer in range(2):
        delta = both.deltas[f"layers_{layer}", "mlp", "down"]
        for expert in range(3):
            prefix = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w2"
            single[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(delta.a[expert])
            single[f"{prefix}.lora_B.weight"] = delta.b[expert] / np.float32(3.0)
    config = json.loads((GOLDENS / "mixtral-experts" / "adapter_config.json").read_text())
    config |= {"target_modules": ["q_proj", "w2"], "target_parameters": None, "rank_pattern": {"w2": 1}}
    save_file(single, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = read("mixtral-experts", tmp_path).deltas
    for layer in range(2):
        path = (f"layers_{layer}", "mlp", "down")
        np.testing.assert_array_equal(found[path].a, both.deltas[path].a)
        np.testing.assert_allclose(found[path].b, both.deltas[path].b, rtol=1e-6)
        assert (f"layers_{layer}", "mlp", "gate_up") not in found


# Missing tensors, and modules saved whole.


def without(*parts: str) -> Edit:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if any(part in name for part in parts)]


def test_modules_without_tensors_stay_as_they_are(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    """Modules without tensors are unchanged, as in PEFT, where their deltas are zero."""
    folder = changed("llama-qv", tmp_path, without("layers.0", "v_proj"), {"target_modules": ["q_proj", "v_proj", "x"]})
    with caplog.at_level(logging.WARNING, logger="jaxinfer"):
        deltas = read("llama-qv", folder).deltas
    delta, whole = deltas[QKV_1], read("llama-qv", GOLDENS / "llama-qv").deltas[QKV_1]
    assert deltas.keys() == {QKV_1}
    np.testing.assert_array_equal(delta.a, whole.a[:4])
    np.testing.assert_array_equal(delta.b, whole.b[..., :4])
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "'x'" in said
    assert "layers.0.self_attn.q_proj" in said


QKV_1 = ("layers_1", "attention", "qkv")
WHOLE = {
    "base_model.model.lm_head": "lm_head.weight",
    "base_model.model.model.norm": "model.norm.weight",
    "base_model.model.model.layers.1.self_attn.k_proj": "model.layers.1.self_attn.k_proj.weight",
}


def tensors_of(name: str) -> dict[str, np.ndarray]:
    case = golden(name)
    return make_tensors(case.seed, case.shapes, case.norm_centre)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(("module", "tensor"), WHOLE.items())
def test_a_module_that_is_saved_whole_may_be_the_models_own(
    module: str, tensor: str, dtype: Any, tmp_path: pathlib.Path
):
    """Copies of base parameters are accepted, e.g. of vocabularies resized and back (``save_embedding_layers``)."""
    own = put(f"{module}.weight", tensors_of("llama-qv")[tensor].astype(dtype))
    folder = changed("llama-qv", tmp_path, own, {"modules_to_save": [module.rpartition(".")[2]]})
    found = read("llama-qv", folder, base=own_base("llama-qv")).deltas
    assert found.keys() == read("llama-qv", GOLDENS / "llama-qv").deltas.keys()


def trained(name: str, tensor: str, rows: Sequence[int]) -> np.ndarray:
    """Return a base tensor whose ``rows`` were trained by a small amount."""
    value = tensors_of(name)[tensor].copy()
    value[[*rows]] *= np.float32(1.001)
    return value


@pytest.mark.parametrize("said", [{}, {"modules_to_save": ["lm_head", "norm", "k_proj"]}])
@pytest.mark.parametrize(("module", "tensor"), [one for one in WHOLE.items() if "lm_head" not in one[0]])
def test_a_module_that_was_trained_whole_is_refused(
    module: str, tensor: str, said: dict[str, Any], tmp_path: pathlib.Path
):
    """Trained norms and linear weights cannot be expressed as deltas of the base model."""
    wholes = {f"{one}.weight": tensors_of("llama-qv")[name] for one, name in WHOLE.items()} if said else {}
    wholes |= {f"{module}.weight": trained("llama-qv", tensor, [-1])}
    folder = changed("llama-qv", tmp_path, lambda t: t.update(wholes), said)
    with pytest.raises(AdapterError, match=rf"modules_to_save: tensor '{re.escape(module)}.weight'.*merge_and_unload"):
        read("llama-qv", folder, base=own_base("llama-qv"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("module", "path"), [("lm_head", HEAD), ("model.embed_tokens", EMBEDDING)])
def test_rows_of_a_table_that_was_trained(module: str, path: tuple[str, ...], dtype: Any, tmp_path: pathlib.Path):
    value = trained("llama-qv", f"{module}.weight", [5, 9]).astype(dtype)
    edit = put(f"base_model.model.{module}.weight", value)
    folder = changed("llama-qv", tmp_path, edit, {"modules_to_save": [module.rpartition(".")[2]]})
    delta = read("llama-qv", folder, base=own_base("llama-qv")).deltas[path]
    change = delta.b @ delta.a
    change = change if module == "lm_head" else change.T
    expected = value.astype(np.float32) - tensors_of("llama-qv")[f"{module}.weight"]
    assert delta.a.shape[0] == 2
    np.testing.assert_allclose(change, expected, atol=1e-9)
    value[:5] *= 2.0
    many = changed("llama-qv", tmp_path / "many", put(f"base_model.model.{module}.weight", value))
    with pytest.raises(AdapterError, match=r"7 rows, a rank each, more than the 6 of max_lora_rank; merge"):
        read("llama-qv", many, max_rank=6, base=own_base("llama-qv"))


def test_a_vocabulary_that_was_resized_is_refused(tmp_path: pathlib.Path):
    folder = changed("llama-qv", tmp_path, put("base_model.model.model.embed_tokens.weight", zeros(65, 32)))
    with pytest.raises(AdapterError, match=r"it is \[65, 32\], not \[64, 32\]; merge"):
        read("llama-qv", folder)


def test_a_table_that_has_lora_besides_is_refused(tmp_path: pathlib.Path):
    folder = changed("llama-vocabulary", tmp_path, put("base_model.model.lm_head.weight", zeros(64, 32)))
    with pytest.raises(AdapterError, match="it has LoRA besides"):
        read("llama-vocabulary", folder)


def test_biases_of_modules_that_are_saved_whole(tmp_path: pathlib.Path):
    """A norm's unchanged bias is accepted; a changed one is rejected."""
    name, norm = "gpt2-attention", "base_model.model.transformer.ln_f"
    own, base = tensors_of(name), own_base(name)
    wholes = {f"{norm}.{kind}": own[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    said = {"modules_to_save": ["ln_f"], "bias": "none"}
    read(name, changed(name, tmp_path / "own", lambda t: t.update(wholes), said), base=base)
    wholes[f"{norm}.bias"] = wholes[f"{norm}.bias"] + np.float32(0.5)
    other = changed(name, tmp_path / "other", lambda t: t.update(wholes), said)
    with pytest.raises(AdapterError, match=r"ln_f.bias' changes a bias that is not served"):
        read(name, other, base=base)


def test_a_head_of_classes_is_refused(tmp_path: pathlib.Path):
    head = put("base_model.model.score.weight", zeros(2, 32))
    with pytest.raises(AdapterError, match=r"modules_to_save: tensor '.*\.score\.weight'"):
        read("llama-qv", changed("llama-qv", tmp_path, head, {"modules_to_save": ["classifier", "score"]}))


def test_modules_to_save_that_are_not_there(tmp_path: pathlib.Path):
    with pytest.raises(AdapterError, match="lacks tensors of modules_to_save: 'lm_head'"):
        read("llama-qv", copy_adapter("llama-qv", tmp_path, {"modules_to_save": ["lm_head"]}))


ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("edit", "config", "named"),
    [
        (without("token_adapter"), {}, "lacks the rows of trainable_token_indices ''"),
        (lambda _: 0, {"trainable_token_indices": None}, "rows of which trainable_token_indices says nothing"),
        (lambda _: 0, {"trainable_token_indices": {"lm_head": [1]}}, "lacks the rows of .* 'lm_head'"),
        (lambda _: 0, {"trainable_token_indices": [1, 2]}, r"\[3, 32\], not \[2, 32\]"),
        (lambda _: 0, {"trainable_token_indices": [1, 2, 64]}, "has 64, and the model has 64 tokens"),
        (put(ROWS.replace("model.embed_tokens", "lm.wte"), zeros(3, 32)), {}, "no such table of tokens"),
        (
            put(ROWS.replace("token_adapter.trainable_tokens_delta", "lora_embedding_A"), zeros(2, 64)),
            {},
            "embed_tokens",
        ),
    ],
)
def test_rows_that_do_not_fit(edit: Edit, config: dict[str, Any], named: str, tmp_path: pathlib.Path):
    with pytest.raises(AdapterError, match=named):
        read("llama-tokens", changed("llama-tokens", tmp_path, edit, config))


def test_rows_take_a_rank_each():
    with pytest.raises(AdapterError, match="has 3 tokens, a rank each, more than the 2 of max_lora_rank"):
        read("llama-tokens", GOLDENS / "llama-tokens", max_rank=2)
