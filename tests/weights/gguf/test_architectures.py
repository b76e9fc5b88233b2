"""The table of GGUF architectures."""

import pathlib

from jaxinfer.weights.gguf.architectures import ARCHITECTURES
from tests.weights.gguf import convert, hybrid_files, test_hybrids, test_models
from tools.oracle.gguf_cases import CASES, PER_LAYER, read_converted
from tools.oracle.golden import load


def test_every_architecture_has_a_case(repo: pathlib.Path) -> None:
    goldens = repo / "tests" / "goldens"
    converted = (read_converted(goldens / "gguf" / f"{name}.json") for name in (*CASES, *PER_LAYER))
    early = (load(goldens / "models" / name).config["model_type"] for name in test_models.CASES)
    hybrids = (load(goldens / "models" / name).config["model_type"] for name in test_hybrids.CASES)
    assert ARCHITECTURES.keys() == {
        *(case.metadata["general.architecture"] for case in converted),
        *map(convert.architecture, early),
        *(hybrid_files.ARCHITECTURES[model_type] for model_type in hybrids),
    }
