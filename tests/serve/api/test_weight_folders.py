"""Tests of the folders of weights that operators may name."""

import os

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.weight_folders import weights_folder
from tests.serve.fake_weights import write_fake_weights


@pytest.fixture
def root(tmp_path):
    for name in ("a", "b"):
        write_fake_weights(tmp_path / "root" / name, name)
    return tmp_path / "root"


def test_a_folder_below_the_root(root):
    (root / "link").symlink_to(root / "a")
    (root / "blobs").mkdir()
    (root / "cached").mkdir()
    (root / "blobs" / "1").write_text("")
    (root / "cached" / "model.safetensors").symlink_to("../blobs/1")
    for path, name in (("a", "a"), (str(root / "b"), "b"), ("link", "a"), ("./a/.", "a"), ("cached", "cached")):
        assert weights_folder(root, path) == (root / name).resolve()
    (root.parent / "other").symlink_to(root)
    assert weights_folder(root.parent / "other", "a") == (root / "a").resolve()


def test_what_is_not_below_the_root_is_not_read(root):
    outside = write_fake_weights(root.parent / "outside", "secret")
    (root / "out").symlink_to(outside)
    for name, target in (("linked", outside / "model.safetensors"), ("broken", root / "nothing"), ("pipe", None)):
        folder = write_fake_weights(root / name, "x")
        (folder / "config.json").symlink_to(target) if target is not None else os.mkfifo(folder / "config.json")
    (root / "pickled").mkdir()
    (root / "pickled" / "pytorch_model.bin").write_bytes(b"")
    paths = ["../outside", "a/../../outside", str(outside), "out", "linked", "broken", "pipe", "pickled", "nothing"]
    paths += ["a/model.safetensors", "https://example.com/a", "file://" + str(root / "a"), "a\0", "~/a"]
    for path in paths:
        with pytest.raises(RequestError) as refused:
            weights_folder(root, path)
        assert refused.value.field == "path"
