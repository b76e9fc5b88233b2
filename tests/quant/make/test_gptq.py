"""GPTQ against the paper's equations in float64, and its invariants for any numbers."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.quant.make import IntegerGrid, Made, gptq, integers, reconstruction_error
from jaxinfer.quantize.calibration import Calibration, entered, observed
from jaxinfer.quantize.layer import LayerWeights, linears
from jaxinfer.types import walk_specs
from jaxinfer.weights.tree import Path
from tests.quant.make.references import Paper, correlated, optimal_brain, output_error

BORDER = 1e-3  # steps: rounding error in float32 of a weight after hundreds of corrections


def problem(out: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(out, inputs)) * 0.1, correlated(4 * inputs, inputs, seed)


def solved(weight: np.ndarray, x: np.ndarray, grid: IntegerGrid, **options: bool) -> Made:
    return gptq(jnp.asarray(weight, jnp.float32), jnp.asarray(x.T @ x, jnp.float32), grid, **options)


def plain_codes(made: Made) -> np.ndarray:
    codes = np.asarray(made.parts["codes"]).astype(np.float64)
    if "order" not in made.parts:
        return codes
    plain = np.zeros_like(codes)
    plain[:, np.asarray(made.parts["order"])] = codes
    return plain


def agree(made: Made, paper: Paper, weight: np.ndarray, gram: np.ndarray) -> None:
    """Check for the same codes and output error. Corrections are summed in float32: where codes of
    a row differ, the first one was near a tie of two codes, and the error is no longer the same, but near."""
    margins = paper.differing(plain_codes(made))
    assert len(margins) <= 2
    assert (margins < BORDER).all()
    error, expected = (energy(weight - values, gram) for values in (np.asarray(made.dequantize()), paper.values))
    assert error == pytest.approx(expected, rel=2e-3 if len(margins) else 1e-5)


def energy(weight: np.ndarray, gram: np.ndarray) -> float:
    """Return the squared norm of a weight's outputs."""
    return float((weight.astype(np.float64) @ gram * weight).sum())


@pytest.mark.parametrize(
    ("inputs", "group", "symmetric", "act_order", "static"),
    [
        (256, 128, True, False, False),
        (256, 64, False, False, False),
        (192, 64, True, True, False),  # blocks as wide as a group
        (256, 32, False, True, True),
        (172, 0, True, False, False),  # one group; 128 does not divide 172
        (256, 256, True, True, False),  # a group of two blocks
    ],
)
def test_it_is_the_paper_in_float64(inputs: int, group: int, symmetric: bool, act_order: bool, static: bool):
    weight, x = problem(24, inputs)
    grid = IntegerGrid(4, group, symmetric, "float16")
    paper = optimal_brain(weight, x.T @ x, grid, 0.01, act_order, static)
    made = solved(weight, x, grid, act_order=act_order, static_groups=static)
    agree(made, paper, weight, x.T @ x)
    assert ("order" in made.parts) == (act_order and not static)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_larger_ones_are_the_papers(seed: int):
    weight, x = problem(96, 384, seed)
    grid = IntegerGrid(3 + seed % 2, 64, symmetric=seed % 4 < 2, scale_dtype="float16")
    paper = optimal_brain(weight, x.T @ x, grid, 0.01, seed % 3 == 0, static=seed % 5 == 0)
    made = solved(weight, x, grid, act_order=seed % 3 == 0, static_groups=seed % 5 == 0)
    agree(made, paper, weight, x.T @ x)


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 32])
def test_the_weights_of_a_trained_layer_are_the_papers(group: int, test_data: pathlib.Path):
    """stories260K's first layer, with the Gram matrices of its inputs."""
    layer, grams = first_layer(test_data / "models" / "stories260K" / "hf")
    found = linears(layer.specs)
    assert len(found) == 7
    for linear in found:
        weight, gram = layer.weight(linear), grams[linear.path]
        grid = IntegerGrid(4, group if weight.shape[1] == 64 else 0, scale_dtype="float16")
        paper = optimal_brain(weight.astype(np.float64), gram.astype(np.float64), grid, 0.01, True, False)
        made = gptq(jnp.asarray(weight), jnp.asarray(gram), grid, act_order=True)
        agree(made, paper, weight, gram)


def first_layer(folder: pathlib.Path) -> tuple[LayerWeights, dict[Path, np.ndarray]]:
    """Return the layer and the Gram matrices of the inputs of its weights."""
    model = load_model(str(folder), "float32", show_progress=False)
    specs = dict(walk_specs(model.specs["layers_0"]))
    values = {path: np.array(model.params["layers_0"][path[0]][path[1]]) for path in specs}
    layer = LayerWeights(0, model.module.block(0, None), specs, values)
    text = Calibration(np.random.default_rng(5).integers(3, 500, (8, 64)).astype(np.int32))
    batches = entered(model.module, model.params, text, "float32")
    paths = tuple(path for path, spec in specs.items() if spec.inputs is not None)
    seen = observed(model.module, layer, paths, batches, gram=True)
    return layer, {path: np.asarray(own.gram) for path, own in seen.items()}


@pytest.mark.parametrize("bits", [3, 8])
def test_outputs_are_nearer_than_rounded_ones(bits: int):
    weight, x = problem(32, 256, seed=bits)
    grid = IntegerGrid(bits, 64)
    rounded = np.asarray(integers(jnp.asarray(weight, jnp.float32), grid).dequantize())
    made = solved(weight, x, grid)
    codes = np.asarray(made.parts["codes"]).astype(int)
    assert codes.min() >= grid.low
    assert codes.max() <= grid.high
    assert output_error(weight, np.asarray(made.dequantize()), x) < 0.8 * output_error(weight, rounded, x)


def test_inputs_that_do_not_correlate_are_rounded_to_nearest():
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(16, 128)), jnp.float32)
    grid = IntegerGrid(4, 32, symmetric=False)
    made, rounded = gptq(weight, jnp.eye(128), grid), integers(weight, grid)
    for name, part in rounded.parts.items():
        assert np.array_equal(np.asarray(made.parts[name], np.float32), np.asarray(part, np.float32)), name


def test_an_input_that_is_always_zero_spoils_nothing():
    weight, x = problem(16, 128)
    x[:, [3, 77]] = 0
    made = solved(weight, x, IntegerGrid(4, 64), act_order=True)
    values = np.asarray(made.dequantize())
    assert np.isfinite(values).all()
    assert np.abs(values - weight).max() < 0.2


def test_a_singular_matrix_is_damped():
    weight, x = problem(16, 128)
    one = np.repeat(x[:4], 3, axis=0)  # four different vectors for 128 inputs
    grid = IntegerGrid(4, 128)
    made = solved(weight, one, grid)
    assert output_error(weight, np.asarray(made.dequantize()), one) < 5e-3
    singular = gptq(jnp.asarray(weight, jnp.float32), jnp.ones((128, 128)), grid, damp=1e-6)
    assert np.isfinite(np.asarray(singular.dequantize())).all()


def test_inputs_that_are_not_finite_are_refused():
    gram = jnp.eye(64).at[3, 3].set(jnp.nan)
    with pytest.raises(ValueError, match="are all inputs finite"):
        gptq(jnp.ones((4, 64)), gram, IntegerGrid(4, 32))


def test_the_error_by_the_gram_matrix_is_that_of_the_outputs():
    weight, x = problem(16, 64)
    values = np.round(weight * 20) / 20
    gram = jnp.asarray(x.T @ x, jnp.float32)
    error = reconstruction_error(jnp.asarray(weight, jnp.float32), jnp.asarray(values, jnp.float32), gram)
    assert float(error) == pytest.approx(output_error(weight, values, x), rel=1e-4)
