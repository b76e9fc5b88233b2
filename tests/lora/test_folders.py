"""Adapter folders named by requests must be inside the adapter root, whatever their names and links."""

import os
import pathlib

import pytest

from jaxinfer.lora.errors import AdapterError
from jaxinfer.lora.folders import CONFIG_FILE, TENSORS_FILE, adapter_folder


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    for folder in (tmp_path / "root" / "a" / "b", tmp_path / "outside", tmp_path / "root-beside"):
        folder.mkdir(parents=True)
        for name in (CONFIG_FILE, TENSORS_FILE):
            (folder / name).write_text("{}")
    return tmp_path / "root"


def test_folders_below_are_found(root: pathlib.Path):
    assert adapter_folder(root, "a/b") == root / "a" / "b"
    assert adapter_folder(root, str(root / "a" / "b")) == root / "a" / "b"
    (root / "link").symlink_to("a/b")
    assert adapter_folder(root, "link") == root / "a" / "b"


def test_files_that_link_to_others_below_are_read(root: pathlib.Path):
    (root / "a" / CONFIG_FILE).symlink_to("b/" + CONFIG_FILE)
    assert adapter_folder(root, "a") == root / "a"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "..",
        "../outside",
        "a/../../outside",
        "a/../a/b",
        "/",
        "/etc",
        "a/c",
        "a/b/" + CONFIG_FILE,
        "a\0b",
        "x" * 5000,
    ],
)
def test_others_are_refused(root: pathlib.Path, path: str):
    with pytest.raises(AdapterError, match="lora_path"):
        adapter_folder(root, path)


def test_a_neighbour_whose_name_begins_alike_is_outside(root: pathlib.Path):
    with pytest.raises(AdapterError, match="lora_path"):
        adapter_folder(root, str(root) + "-beside")


def test_links_out_of_it_are_refused(root: pathlib.Path):
    (root / "link").symlink_to("../outside")
    with pytest.raises(AdapterError, match="lora_path"):
        adapter_folder(root, "link")
    (root / "loop").symlink_to("loop")
    with pytest.raises(AdapterError, match="lora_path"):
        adapter_folder(root, "loop")


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
def test_files_that_link_out_of_it_are_refused(root: pathlib.Path, name: str):
    (root / "a" / "b" / name).unlink()
    (root / "a" / "b" / name).symlink_to(root.parent / "outside" / name)
    with pytest.raises(AdapterError, match=name):
        adapter_folder(root, "a/b")


def test_pipes_are_refused(root: pathlib.Path):
    (root / "a" / "b" / TENSORS_FILE).unlink()
    os.mkfifo(root / "a" / "b" / TENSORS_FILE)
    with pytest.raises(AdapterError, match=TENSORS_FILE):
        adapter_folder(root, "a/b")
