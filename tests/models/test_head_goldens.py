"""The golden files of draft heads: complete, small, and of the weights that are derived here."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from tools.oracle.cases.heads import CHAIN, HEADS, PAIRS
from tools.oracle.golden import names
from tools.oracle.heads_golden import TREE, HeadGolden, read_head, write_head_checkpoint

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "goldens" / "heads"
CASES = {case.name: case for case in HEADS}


def golden(name: str) -> HeadGolden:
    return read_head(GOLDENS / name)


def test_golden_files_are_those_of_the_cases():
    assert names(GOLDENS) == sorted(CASES)
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*")) < 2_000_000


@pytest.mark.parametrize("name", CASES)
def test_a_head_is_read_and_written(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    (file,) = write_head_checkpoint(tmp_path, case).glob("*.safetensors")
    written = load_file(file)
    assert {key: tensor.shape for key, tensor in written.items() if key in case.shapes} == case.shapes
    assert written.keys() - case.shapes.keys() == case.integers.keys()
    assert json.loads((tmp_path / "config.json").read_text()) == case.config
    assert set(case.target_shapes) == set(CASES[name].borrows.values())


@pytest.mark.parametrize("name", CASES)
def test_answers_have_their_shapes(name: str):
    case = golden(name)
    assert case.features.shape[0] == len(case.tokens) == PAIRS
    np.testing.assert_array_equal(case.features, np.float32(case.features))
    assert all(array.dtype == np.float64 for array in case.answers.values())
    if case.method == "medusa":
        assert case.answers["logits"].shape[:2] == (case.config["medusa_num_heads"], PAIRS)
        return
    for width in ("hidden", "logits"):
        first, chain = case.answers[width], case.answers[f"chain_{width}"]
        assert (first.shape[0], *chain.shape) == (PAIRS, CHAIN, first.shape[1])
        assert case.error[f"chain_{width}"].shape == (CHAIN,)
    assert len(case.chain_tokens) == CHAIN


@pytest.mark.parametrize("name", CASES)
def test_an_error_beyond_the_rule_is_noticed(name: str):
    case = golden(name)
    assert case.faults(**case.answers) == []
    for answer, exact in case.answers.items():
        for share, faults in ((0.99, 0), (1.01, 1)):
            ours = exact.copy()
            ours[(-1,) * ours.ndim] += share * np.ravel(case.limit(answer))[-1]
            assert len(case.faults(**{answer: ours})) == faults
        assert len(case.faults(**{answer: np.full_like(exact, np.nan)})) == 1
        assert len(case.faults(**{answer: exact[:-1]})) == 1


@pytest.mark.parametrize("name", [case.name for case in HEADS if case.tree])
def test_a_tree_is_one(name: str):
    case = golden(name)
    assert case.tree is not None
    tokens, paths, mask, depth = (case.tree_answers[key] for key in TREE)
    assert len(tokens) == len(mask) == case.tree["total_tokens"]
    assert tokens[0] == case.tokens[-1]
    np.testing.assert_array_equal(mask.sum(-1), depth + 1)
    for path in paths:
        nodes = path[path >= 0]
        np.testing.assert_array_equal(np.flatnonzero(mask[nodes[-1]]), nodes)
        np.testing.assert_array_equal(depth[nodes], np.arange(len(nodes)))


@pytest.mark.parametrize("name", [case.name for case in HEADS if case.method == "mtp"])
def test_a_folder_of_mtp_holds_its_target(name: str):
    case = golden(name)
    layers = {int(key.split(".")[2]) for key in case.shapes if key.startswith("model.layers.")}
    assert layers == set(range(case.config["num_hidden_layers"] + case.config["num_nextn_predict_layers"]))
    tensors = case.tensors()
    for copy, original in case.copies.items():
        np.testing.assert_array_equal(tensors[copy], tensors[original])


def test_typical_acceptance_is_that_of_the_paper():
    """Cai et al. 2024: p > min(epsilon, delta * exp(-entropy)); the 1e-5 in the logarithm is from their code."""
    with np.load(GOLDENS / "typical.npz", allow_pickle=False) as file:
        held = dict(file)

    def accepted(logits: np.ndarray, tokens: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
        scaled = np.exp(np.float64(logits) / held["temperature"])
        p = scaled / scaled.sum(-1, keepdims=True)
        entropy = -(p * np.log(p + 1e-5)).sum(-1)
        chosen = np.take_along_axis(p, tokens[..., None], -1)[..., 0]
        return chosen > np.minimum(epsilon, delta * np.exp(-entropy))

    for row, (epsilon, delta) in enumerate(held["thresholds"]):
        ours = accepted(held["logits"], held["tokens"], epsilon, delta)
        np.testing.assert_array_equal(ours, held["accepted"][row])
        paths = accepted(held["path_logits"][:, :, :-1], held["path_tokens"][:, :, 1:], epsilon, delta)
        lengths = np.cumprod(paths, -1).sum(-1)
        np.testing.assert_array_equal(lengths.max(-1), held["length"][row])
        best = held["best"][row]
        np.testing.assert_array_equal(lengths[np.arange(len(best)), best], held["length"][row])


def test_other_weights_than_the_oracles_are_refused(tmp_path: pathlib.Path):
    case = dataclasses.replace(golden("eagle3-original"), seed=0)
    with pytest.raises(ValueError, match="not those of the oracle"):
        write_head_checkpoint(tmp_path, case)
