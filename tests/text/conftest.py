"""A fixture that runs a test on each tokenizer: the built ones, and the real ones if the test data is present."""

import json
import pathlib

import pytest
from tokenizers import Tokenizer as Library

from jaxinfer.text import Tokenizer
from tests.text.build import MAKERS, write_folder

REAL = {
    "gpt2": "tokenizers/gpt2",
    "llama-2": "tokenizers/llama-2",
    "llama-3": "tokenizers/llama-3",
    "stories260K": "models/stories260K/hf",
}


@pytest.fixture(scope="session", params=[*MAKERS, *REAL])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Library]:
    """Return jaxinfer's tokenizer and the library's for the same file."""
    folder = _folder(request, tmp_path_factory)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        # A normalised special token is not found within a text, see `LibraryBackend`.
        token["normalized"] = token["normalized"] and not token["special"]
    library = Library.from_str(json.dumps(content))
    library.no_truncation()
    return Tokenizer.load(folder), library


def _folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if request.param in REAL:
        return request.getfixturevalue("test_data") / REAL[request.param]
    return write_folder(tmp_path_factory.mktemp("tokenizer"), MAKERS[request.param]())
