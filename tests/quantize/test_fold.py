"""Folding scales into the preceding layer leaves the layer's output unchanged, in every family."""

import pathlib

import jax
import numpy as np
import pytest

from jaxinfer.opening import open_model
from jaxinfer.quant.make.recipe import Recipe
from jaxinfer.quantize import RecipeError
from jaxinfer.quantize.calibration import Batch, after, observed
from jaxinfer.quantize.fold import Folder
from jaxinfer.quantize.layer import LayerWeights
from jaxinfer.quantize.layerwise import first_batches, require_layers
from jaxinfer.quantize.structure import Norm, Structure, observable, structure_of
from jaxinfer.quantize.work import Work
from tests.quantize.models import folder_of, samples

SLOW = pytest.mark.slow
ATTENTION = Norm(("attention_norm", "scale"), (("attention", "qkv"),))
FEED = Norm(("mlp_norm", "scale"), (("mlp", "gate_up"),))
UP, ONE = Norm(("mlp_norm", "scale"), (("mlp", "up"),)), (("mlp", "gate_up"), ("mlp", "down"))
SHARED = (("mlp", "shared", "gate_up"), ("mlp", "shared", "down"))
ROUTER, SHARED_GATE = ("mlp", "router"), ("mlp", "shared_gate")


def of_experts(*more: tuple[str, ...], offset: float = 0.0) -> Norm:
    return Norm(FEED.scale, (("mlp", "gate_up"), ROUTER, *more), offset)


def both(*norms: Norm) -> tuple[Norm, ...]:
    return tuple(Norm(norm.scale, norm.readers, 1.0) for norm in norms)


def side_by_side(up: str) -> tuple[Norm, ...]:
    return (Norm(("norm", "scale"), (("attention", "qkv"), ("mlp", up))),)


FAMILIES = {
    "qwen2-bias": (1, Structure((ATTENTION, FEED), True, (ONE,))),
    "phi3-partial-hub": (1, Structure((ATTENTION, FEED), True, (ONE,))),
    "gemma2-window": (1, Structure(both(ATTENTION, FEED), True, (ONE,))),
    "nemotron-hub": (1, Structure(both(ATTENTION, UP), True, ())),
    "gpt_neox-hub": (1, Structure((ATTENTION, UP), True, ())),
    "falcon-7b-hub": (1, Structure((Norm(ATTENTION.scale, (("attention", "qkv"), ("mlp", "up"))),), True, ())),
    "phi-hub": (1, Structure(side_by_side("up"), True, ())),
    "cohere-hub": (1, Structure(side_by_side("gate_up"), True, (ONE,))),
    "olmo2-hub": (1, Structure((), True, (ONE,))),
    "mixtral-hub": (1, Structure((ATTENTION, of_experts()), True, (ONE,))),
    "gpt_oss-hub": (1, Structure((ATTENTION, of_experts()), True, ())),
    "qwen2_moe-hub": (1, Structure((ATTENTION, of_experts(SHARED[0], SHARED_GATE)), True, (ONE, SHARED))),
    "deepseek_v3-hub": (
        1,
        Structure(
            (
                Norm(ATTENTION.scale, (("attention", "down"),)),
                Norm(("attention", "q_norm", "scale"), (("attention", "q"),)),
                of_experts(SHARED[0]),
            ),
            False,
            (ONE, SHARED),
        ),
    ),
    "llama4_text-hub": (1, Structure((ATTENTION, of_experts(SHARED[0])), True, (ONE, SHARED))),
    "qwen3_next-hub": (
        0,
        Structure(
            (
                Norm(ATTENTION.scale, (("attention", "ba"), ("attention", "qkvz")), 1.0),
                of_experts(SHARED[0], SHARED_GATE, offset=1.0),
            ),
            False,
            (ONE, SHARED),
        ),
    ),
    "nemotron_h-hub": (
        0,
        Structure((Norm(("norm", "scale"), (*((("mixer", name)) for name in ("bc", "dt", "zx")),)),), False, ()),
    ),
    "gemma3n_text-hub": (0, Structure((FEED,), False, (ONE,))),
    "gemma4_text-effective-hub": (1, Structure((ATTENTION, FEED), False, (ONE,))),
    "glm_moe_dsa-hub": (
        1,
        Structure(
            (
                Norm(ATTENTION.scale, (("attention", "down"),)),
                Norm(("attention", "q_norm", "scale"), (("attention", "q"),)),
                FEED,
            ),
            False,
            (ONE,),
        ),
    ),
}
FAST = ("qwen2-bias", "gemma2-window", "gpt_neox-hub", "qwen2_moe-hub")


def some_layer(name: str, index: int, folder: pathlib.Path) -> tuple[Work, LayerWeights, list[Batch]]:
    """Return a layer and what it reads: of the first layer, with some numbers that are much larger."""
    files, model = open_model(str(folder_of(name, folder)), "float32")
    work = Work(files, model, Recipe("awq", group_size=-1), samples())
    batches = first_batches(work)
    for batch in batches:
        batch.carried = jax.tree.map(_with_large_numbers, batch.carried)
    return work, work.layer(index), batches


def _with_large_numbers(hidden: np.ndarray) -> np.ndarray:
    return hidden * np.exp(np.random.default_rng(0).normal(size=hidden.shape[-1])).astype(hidden.dtype)


def outputs(work: Work, layer: LayerWeights, batches: list[Batch]) -> np.ndarray:
    return np.concatenate([work.module.hidden(after(work.module, layer, batch)[0]) for batch in batches])


def as_sets(structure: Structure) -> tuple[set, bool, set]:
    norms = {(norm.scale, frozenset(norm.readers), norm.offset) for norm in structure.norms}
    return norms, structure.heads, set(structure.pairs)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else SLOW) for name in FAMILIES])
def test_places_of_scales_are_found(name: str, tmp_path: pathlib.Path) -> None:
    index, expected = FAMILIES[name]
    work, layer, batches = some_layer(name, index, tmp_path)
    before = {path: value.copy() for path, value in layer.values.items()}
    assert as_sets(structure_of(work.module, layer, batches[0])) == as_sets(expected)
    assert all(np.array_equal(value, before[path]) for path, value in layer.values.items())


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen2-bias", "awq"),
        ("qwen2-bias", "smoothquant"),
        ("qwen2_moe-hub", "smoothquant"),
        *(pytest.param(name, "awq", marks=SLOW) for name in FAMILIES if name != "qwen2-bias"),
    ],
)
def test_a_folded_layer_computes_the_same(name: str, method: str, tmp_path: pathlib.Path):
    index, structure = FAMILIES[name]
    work, layer, batches = some_layer(name, index, tmp_path)
    before = {path: value.copy() for path, value in layer.values.items()}
    paths = tuple(path for path, spec in layer.specs.items() if observable(path, spec))
    expected = outputs(work, layer, batches)
    seen = observed(work.module, layer, paths, batches, gram=True)
    recipe = Recipe(method, group_size=32)
    Folder(layer, seen, recipe, recipe.grid("float32"), structure).fold()
    assert np.abs(outputs(work, layer, batches) - expected).max() < 2e-4 * np.abs(expected).max()
    changed = {path for path, value in layer.values.items() if not np.allclose(value, before[path], rtol=1e-3)}
    assert {path for norm in structure.norms for path in (norm.scale, *norm.readers)} <= changed
    if method == "awq":
        assert (("attention", "out") in changed) == structure.heads
        assert {down for _, down in structure.pairs} <= changed
    again = observed(work.module, layer, paths, batches, gram=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-3, atol=2e-2), seen, again)


def test_models_without_norms_before_weights_are_refused(tmp_path: pathlib.Path):
    files, model = open_model(str(folder_of("olmo2-hub", tmp_path)), "float32")
    with pytest.raises(RecipeError, match=r"^smoothquant "):
        require_layers(Work(files, model, Recipe("smoothquant"), None))
