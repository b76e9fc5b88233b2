"""Summary of a quantisation: kinds, counts, errors, and suggestions for unquantised weights."""

import numpy as np
import pytest

from jaxinfer.quantize import Recipe
from jaxinfer.quantize.layer import Linear
from jaxinfer.quantize.summary import Summary, kind_name


def linear(name: str, shape: tuple[int, int]) -> Linear:
    return Linear(f"{name}.weight", shape, (), None)


def layers() -> list[list[Linear]]:
    return [
        [linear(f"model.layers.{index}.self_attn.q_proj", (8, 128)), linear(f"model.layers.{index}.mlp.down", (8, 96))]
        for index in range(3)
    ]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("model.layers.11.self_attn.q_proj", "self_attn.q_proj"),
        ("model.layers.3.mlp.experts.17.up_proj", "mlp.experts.*.up_proj"),
        ("h.0.attn.c_attn", "attn.c_attn"),
    ],
)
def test_layers_and_experts_are_one_kind(module: str, kind: str) -> None:
    assert kind_name(module) == kind


def test_what_is_kept_is_told_once_a_kind_with_the_way_out() -> None:
    shown = "\n".join(Summary(Recipe("int4"), layers()).lines())
    assert "quantised (int4): 3 weights of 1 kind\n" in shown
    assert "  self_attn.q_proj  3 of 8 x 128: made by an earlier run\n" in shown
    assert "kept: 3 weights of 1 kind, and what lies outside of the layers\n" in shown
    assert "  mlp.down          3 of 8 x 96: groups of 128 do not divide its 96 inputs\n" in shown
    assert shown.endswith("to quantise these, too: --group-size 32 or --short-groups")


def test_nothing_is_advised_where_nothing_is_kept() -> None:
    summary = Summary(Recipe("int8"), layers())
    assert not summary.kept
    assert "to quantise these" not in "\n".join(summary.lines())


def test_an_error_is_over_all_weights_of_a_kind() -> None:
    found = layers()
    summary, generator = Summary(Recipe("int8"), found), np.random.default_rng(0)
    weights = generator.standard_normal((3, 8, 128)).astype(np.float32)
    apart = 0.01 * generator.standard_normal((3, 8, 128)).astype(np.float32)
    for index, layer in enumerate(found):
        summary.kind(layer[0]).add(weights[index], weights[index] + apart[index])
    want = np.linalg.norm(apart.astype(np.float64)) / np.linalg.norm(weights.astype(np.float64))
    assert summary.kind(found[0][0]).error == pytest.approx(want, rel=1e-6)
    assert "  self_attn.q_proj  3 of 8 x 128: relative error 0.997 %" in summary.lines()


@pytest.mark.parametrize(
    ("recipe", "inputs", "advice"),
    [
        (Recipe("int4"), [256, 64], "--group-size 64 or --short-groups"),
        (Recipe("int4"), [256, 100], "--short-groups"),
        (Recipe("int4"), [256, 128], ""),
        (Recipe("int4", short_groups=True), [256, 100], ""),
        (Recipe("gptq"), [256, 64], ""),
        (Recipe("mxfp4"), [100], ""),
    ],
)
def test_advice(recipe: Recipe, inputs: list[int], advice: str) -> None:
    assert recipe.advice(inputs) == advice
