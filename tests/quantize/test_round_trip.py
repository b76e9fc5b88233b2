"""Our quantised folders, loaded by third-party readers in the oracle's environment: the same weights and logits.

Two models: one with biases, and stories260K, whose down projections have 172 inputs, which groups and blocks do not
divide. These weights stay unquantised where a format cannot store them.
"""

import dataclasses
import pathlib
import subprocess
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load_model
from jaxinfer.quantize import Calibration, Recipe
from jaxinfer.quantize.driver import quantize
from jaxinfer.weights.formats import quantized_weights
from jaxinfer.weights.safetensors.checkpoint import open_checkpoint, read_json_object
from tests.quantize.models import folder_of

PACKED = "compressed-tensors"
KINDS = {
    "int8": Recipe("int8"),
    "int8-inputs": Recipe("int8", activations=True),
    "fp8": Recipe("fp8"),
    "fp8-inputs": Recipe("fp8", activations=True),
    "fp8-blocks": Recipe("fp8", blocks=True),
    "smoothquant": Recipe("smoothquant"),
    "int4": Recipe("int4", group_size=32),
    "int4-channels": Recipe("int4", group_size=-1),
    "int4-zeros": Recipe("int4", group_size=32, symmetric=False),
    "gptq-packed": Recipe("gptq", group_size=32, act_order=True, static_groups=True, weight_format=PACKED),
    "awq-packed": Recipe("awq", group_size=32, symmetric=True, weight_format=PACKED),
    "awq-packed-zeros": Recipe("awq", group_size=32, weight_format=PACKED),
    "mxfp4": Recipe("mxfp4"),
    "nf4": Recipe("nf4", nested=False),
    "nf4-nested": Recipe("nf4"),
    "fp4-nested": Recipe("fp4"),
    "gptq": Recipe("gptq", group_size=32),
    "gptq-order": Recipe("gptq", group_size=32, symmetric=False, act_order=True),
    "gptq-3": Recipe("gptq", bits=3, group_size=32, symmetric=False),
    "gptq-8": Recipe("gptq", bits=8, group_size=-1),
    "awq": Recipe("awq", group_size=32),
}
MODELS = ("qwen2-bias", "stories260K")
NOT_HELD = {("stories260K", "fp8-blocks")}  # blocks of 128 divide the inputs of none of its weights
MOST = 1e-4  # tolerance of logits: the order of float32 sums differs
IDS = np.random.default_rng(3).integers(3, 60, (2, 24)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A quantised folder and the oracle's results for it."""

    folder: pathlib.Path
    theirs: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=MODELS)
def answered(
    request: pytest.FixtureRequest,
    repo: pathlib.Path,
    oracle_python: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Case]:
    """Return a lookup of cases by kind for one model. One oracle run covers all selected cases."""
    root = tmp_path_factory.mktemp(request.param)
    source = source_of(request.param, root, request)
    text = Calibration(np.random.default_rng(1).integers(3, 60, (8, 64)).astype(np.int32))
    folders = {kind: root / kind for kind in KINDS if kind in selected(request)}
    for kind, folder in folders.items():
        quantize(source, folder, KINDS[kind], text)
    np.save(root / "ids.npy", IDS)
    command = [oracle_python, "-m", "tools.oracle.quantised", root / "ids.npy", root, *folders.values()]
    said = subprocess.run([str(word) for word in command], cwd=repo, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr

    def case(kind: str) -> Case:
        if (request.param, kind) in NOT_HELD:
            pytest.skip("the format can hold no weight of this model")
        return case_of(root / kind)

    return case


def source_of(model: str, root: pathlib.Path, request: pytest.FixtureRequest) -> str:
    if model == "stories260K":
        return str(request.getfixturevalue("test_data") / "models" / "stories260K" / "hf")
    return str(folder_of(model, root / "source"))


def selected(request: pytest.FixtureRequest) -> set[str]:
    """Return the kinds that this run selects for the model."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [item.callspec.params for item in items if "answered" in item.fixturenames]
    asked = {(own["answered"], own["kind"]) for own in params} - NOT_HELD
    return {kind for model, kind in asked if model == request.param}


def case_of(folder: pathlib.Path) -> Case:
    with np.load(f"{folder}.npz", allow_pickle=False) as arrays:
        return Case(folder, dict(arrays))


def ours(folder: pathlib.Path, activations: str) -> np.ndarray:
    model = load_model(str(folder), "float32", show_progress=False).with_activations(activations)
    return np.asarray(jax.jit(model.apply)(model.params, jnp.asarray(IDS)))


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_logits_are_the_same(kind: str, answered: Callable[[str], Case]):
    case = answered(kind)
    weights, _ = quantized_weights(open_checkpoint(case.folder), read_json_object(case.folder / "config.json"))
    assert weights
    for name, weight in weights.items():
        assert np.array_equal(weight.dense(), case.theirs[f"weights/{name}"]), name
    logits, rounded = case.theirs["logits"], case.theirs.get("rounded")
    assert np.abs(ours(case.folder, "none") - logits).max() <= MOST
    if rounded is None:
        return
    found = ours(case.folder, "auto")
    if kind.startswith("fp8"):
        assert np.abs(found - rounded).max() <= MOST
    else:
        assert distance(found, rounded) < 0.75 * distance(logits, rounded)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the RMS distance of logits with int8 inputs: a last bit decides how a token's largest magnitude rounds, so
    two programs differ; but they are nearer to each other than to logits with unquantised inputs."""
    return float(np.sqrt(((a - b) ** 2).mean()))
