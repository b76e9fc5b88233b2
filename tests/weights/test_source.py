"""Values of ``--model``: a folder, a hub id, or an error that names the remedy."""

import pathlib
import socket
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.native.manifest import MANIFEST
from jaxinfer.weights.open import open_model_files
from jaxinfer.weights.source import locate
from tests.weights.files import refused


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)


@pytest.mark.usefixtures("no_hub")
def test_an_existing_folder_is_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate(str(tmp_path)) == tmp_path
    assert locate("org/name") == pathlib.Path("org/name")


@pytest.mark.usefixtures("no_hub")
def test_a_file_is_not_a_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with refused("is a file: pass the folder"):
        locate(str(tmp_path / "model.safetensors"))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["absent", "/absent/folder", "./a/b", "../a/b", "a/b/c", "a//b", "a/b\n", "~/m"])
def test_neither_folder_nor_hub_id(model: str) -> None:
    with refused("no folder .*, and it is not a hub id of the form org/name either"):
        locate(model)


def test_a_hub_id_fetches_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    calls: list[dict[str, Any]] = []

    def fake(repo_id: str, **kwargs: Any) -> str:
        calls.append(kwargs | {"repo_id": repo_id})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert locate("org/name-1.5_b") == tmp_path
    assert [call["repo_id"] for call in calls] == ["org/name-1.5_b"] * 2
    assert (calls[0].get("revision"), calls[1]["revision"]) == (None, tmp_path.name)
    repo = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "tiktoken.model",
        "chat_template.jinja",
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "modeling_custom.py",
        "original/params.json",
        "original/chat_template.jinja",
        "consolidated.safetensors",
        "model.gguf",
        "additional_chat_templates/tool_use.jinja",
    ]
    first, second = (
        list(
            huggingface_hub.utils.filter_repo_objects(
                repo, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
            )
        )
        for call in calls
    )
    assert first == repo[:6]
    assert second == ["additional_chat_templates/tool_use.jinja"]


def test_of_a_converted_folder_the_arrays_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Only arrays of the manifest's commit are fetched, no other files of subfolders."""
    calls: list[dict[str, Any]] = []
    snapshot = tmp_path / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (snapshot / MANIFEST).touch()

    def fake(repo_id: str, **kwargs: Any) -> str:
        calls.append(kwargs)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert locate("org/name") == snapshot
    first, second = calls
    assert (first.get("revision"), second["revision"]) == (None, snapshot.name)
    arrays = ["params/layers_0/mlp.down/c/0/3", "params/layers_0/mlp.down/zarr.json", "params/embed/_METADATA"]
    others = ["config.json", "compiled/program-cache", "original/params/a.json", "params/layers_0/weights.pkl"]
    patterns = {key: second[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects([*arrays, *others], **patterns)) == arrays


CLIENT_ERROR = HfHubHTTPError.__mro__[1]


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no network\nsecond line."),
        ConnectionError(-2, "no network"),
        ValueError("no network"),
        RuntimeError("no network"),
        CLIENT_ERROR("no network"),
    ],
)
def test_any_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with refused(
        r"no folder 'org/name', .* hub \(no network\): run `hf download org/name --local-dir DIR`.*--model DIR"
    ):
        locate("org/name")


def test_without_a_network_the_real_library_fails_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with refused("could not be fetched from the Hugging Face hub"):
        locate("jaxinfer-tests/does-not-exist")


def test_a_folder_with_nothing_but_a_gguf_file_is_told_to_name_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"holds a GGUF file and no config\.json: pass '.*/model\.gguf'"):
        open_model_files(tmp_path)
