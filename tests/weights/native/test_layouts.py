"""Quantised layouts in a manifest: written, read back, and rejected where they are invalid."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.convert import main
from jaxinfer.loading import load_model
from jaxinfer.quant import Quantized, Split, for_kernels
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped, Layout
from jaxinfer.types import ParamSpec, walk_specs
from jaxinfer.weights import load_params
from jaxinfer.weights.native.layouts import describe, described
from jaxinfer.weights.native.manifest import read_manifest
from jaxinfer.weights.native.reader import ConvertedCheckpoint
from jaxinfer.weights.native.writer import save_params
from tests.weights.files import refused

SPECS: dict[str, Any] = {
    "norm": ParamSpec((64,), (None,)),
    "block": {
        "out": ParamSpec((64, 8), ("heads", "embed"), inputs=0),
        "gate_up": ParamSpec((2, 12, 64), (None, "mlp", "embed"), inputs=-1),
        "scale": ParamSpec((64,), (None,)),
    },
}
FIELDS = {"codes": "int4", "group": 32}
GROUPED = {"kind": "quantised", "layout": "Grouped", "fields": FIELDS}
LAYOUTS: dict[str, Layout] = {
    "groups": Grouped("int4", 32, "bfloat16", zeros=True),
    "biases": Grouped("int8", 32, "bfloat16", biased=128),
    "act-order": Grouped("int8", 16, ordered=True),
    "groups first": Grouped("int4", 16, zeros=True, groups_first=True),
    "activations": Grouped("float8_e4m3fn", 64, activations="float8_e4m3fn", static=True, factor=0.5),
    "bounded": Grouped("float8_e4m3fn", 64, activations="float8_e4m3fn", activation_bound=1200.0),
    "codebook": Codebook(tuple(map(float, range(16))), 16, "uint8", nested=32, scale_table=(0.5,) * 256),
    "divided": Codebook(tuple(map(float, range(16))), 16, "float8_e4m3fn", divided=True),
    "ggml": Blocks("Q8_0"),
}


def plain(layout: Layout) -> dict[str, Any]:
    spec = Quantized({}, layout, (), "float32", 64)
    return describe({"a": spec})["a"]


def random_arrays(specs: Any) -> Any:
    rng = np.random.default_rng(0)

    def one(path: tuple[str, ...], spec: ParamSpec) -> np.ndarray:
        del path
        return rng.integers(0, 8, spec.shape).astype(jax.numpy.dtype(spec.dtype or "float32"))

    return {path: one(path, spec) for path, spec in walk_specs(specs)}


def tree_of(specs: Any, arrays: Any, path: tuple[str, ...] = ()) -> Any:
    made = {
        key: arrays[(*path, key)] if isinstance(node, ParamSpec) else tree_of(node, arrays, (*path, key))
        for key, node in specs.items()
    }
    return made if isinstance(specs, dict) else specs.rebuilt(made)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_it_was_described(name: str, tmp_path: pathlib.Path) -> None:
    words = {"block/out": plain(LAYOUTS[name]), "block/gate_up": plain(LAYOUTS[name])}
    specs: Any = described(SPECS, words, "float32")
    assert describe(specs) == words
    assert specs["block"]["out"].layout == LAYOUTS[name]
    assert (specs["block"]["out"].axes, specs["block"]["gate_up"].axes) == (
        ("embed", "heads"),
        SPECS["block"]["gate_up"].axes,
    )
    arrays = random_arrays(specs)
    save_params(tmp_path / "a", tree_of(specs, arrays), specs, {"architectures": ["A"]})
    manifest = read_manifest(tmp_path / "a")
    assert dict(manifest.storages) == jax.tree.map(lambda x: x, _as_json(words))
    again: Any = described(SPECS, manifest.storages, "float32")
    got = load_params(ConvertedCheckpoint(tmp_path / "a", manifest), again, "auto")
    assert jax.tree.structure(got) == jax.tree.structure(tree_of(specs, arrays))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(tree_of(specs, arrays)), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine), theirs)


def _as_json(words: Any) -> Any:
    if isinstance(words, dict):
        return {key: _as_json(value) for key, value in words.items()}
    return [_as_json(value) for value in words] if isinstance(words, list | tuple) else words


def test_scales_that_come_first() -> None:
    """Layouts of parameters that an engine has prepared for GPU kernels have their groups first."""
    last, first = (plain(Grouped("int4", 16, zeros=True, groups_first=value)) for value in (False, True))
    want = for_kernels(described(SPECS, {"block/out": last}, "float32"))
    assert described(SPECS, {"block/out": first}, "float32") == want
    assert want["block"]["out"].arrays["zeros"].shape == (4, 8)


def test_pieces_of_several_kinds() -> None:
    words = {
        "kind": "split",
        "axis": 0,
        "pieces": [{**plain(LAYOUTS["groups"]), "size": 1}, {"kind": "array", "size": 1}],
    }
    specs: Any = described(SPECS, {"block/gate_up": words}, "float32")
    made = specs["block"]["gate_up"]
    assert isinstance(made, Split)
    assert made.pieces[1] == ParamSpec((1, 12, 64), (None, "mlp", "embed"))
    assert describe(specs) == {"block/gate_up": words}


BROKEN: dict[str, tuple[str, Any, str]] = {
    "fields of text": ("block/out", {**GROUPED, "fields": "codes"}, "in a way that cannot be"),
    "no such weight": ("block/more", GROUPED, "a weight that the model does not have: 'block/more'"),
    "a norm": ("norm", GROUPED, "'norm' as quantised, which it cannot be"),
    "a group": ("block", GROUPED, "a weight that the model does not have: 'block'"),
    "a number": ("block/out", 3, "in a way that cannot be"),
    "no kind": ("block/out", {}, "in a way that cannot be"),
    "another kind": ("block/out", {"kind": "pickle"}, "its kind is unknown"),
    "another layout": ("block/out", {**GROUPED, "layout": "object"}, "in a way that cannot be"),
    "groups of nothing": (
        "block/out",
        {**GROUPED, "fields": {**FIELDS, "group": 0}},
        "groups of 0 do not divide 64 inputs",
    ),
    "a group of truth": (
        "block/out",
        {**GROUPED, "fields": {**FIELDS, "group": True}},
        "a field has a value of another type",
    ),
    "codes of a dtype": (
        "block/out",
        {**GROUPED, "fields": {**FIELDS, "codes": "object"}},
        "parts of 'object' are unknown",
    ),
    "a field missing": ("block/out", {**GROUPED, "fields": {}}, "a field has a value of another type"),
    "blocks": ("block/out", {**GROUPED, "layout": "Blocks", "fields": {"kind": "Q9"}}, "in a way that cannot be"),
    "an axis": ("block/out", {"kind": "split", "axis": 5, "pieces": []}, "not split along a dimension"),
    "no pieces": ("block/out", {"kind": "split", "axis": 0, "pieces": []}, "in a way that cannot be"),
    "large pieces": (
        "block/out",
        {"kind": "split", "axis": 0, "pieces": [{"kind": "array", "size": 9}]},
        "its pieces do not make it up",
    ),
    "pieces of pieces": (
        "block/out",
        {"kind": "split", "axis": 0, "pieces": [{"kind": "split", "size": 8}]},
        "its pieces do not make it up",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_words_that_cannot_be(name: str) -> None:
    where, words, sentence = BROKEN[name]
    with refused(sentence):
        described(SPECS, {where: words}, "float32")


FAST = ("gptq-g64-sym-descact", "bnb-nf4-dq", "ct-fp8-static", "gguf-A-Q4_K_M")
OTHERS = (
    *("awq-gemm-g128", "bnb-fp4-dq", "bnb-int8", "bnb-nf4-nodq", "ct-fp8-dynamic", "ct-mxfp4a16", "ct-nvfp4a16"),
    *("ct-w4a16-g128", "ct-w8a8-smoothquant", "fp8-block128-weight_scale_inv", "gguf-A-IQ4_XS", "gguf-A-Q2_K"),
    *("gguf-A-Q3_K_M", "gguf-A1-IQ4_NL", "gguf-A1-Q5_K_M", "gguf-A1-Q6_K", "gguf-A1-ZOO2", "gguf-B-BF16", "gguf-B-F16"),
    *("gguf-B-Q4_0", "gguf-B-Q4_1", "gguf-B-Q5_0", "gguf-B-Q5_1", "gguf-B-Q8_0", "gptq-3bit-g128-asym"),
    *("gptq-8bit-g128-sym", "gptq-g128-sym", "gptq-g64-asym-v2", "mxfp4-gpt-oss"),
)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_quantized_folder_stays_as_it_is(name: str, test_data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every array is bitwise identical in the same tree, so that all results are the same."""
    folder, target = test_data / "models" / "quantised" / name, str(tmp_path / "new")
    source = str(folder / "model.gguf" if name.startswith("gguf") else folder)
    assert main([source, target]) == 0
    want, got = (load_model(each, show_progress=False) for each in (source, target))
    assert got.tokenizer.encode("Once upon a time") == want.tokenizer.encode("Once upon a time")
    assert (got.tokenizer.eos_ids, got.tokenizer.bos_id) == (want.tokenizer.eos_ids, want.tokenizer.bos_id)
    assert jax.tree.structure(got.params) == jax.tree.structure(want.params)
    for mine, theirs in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        assert mine.dtype == theirs.dtype
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
