"""Tests of the tokenizer archive: files that it contains, and files that it never contains."""

import asyncio
import hashlib
import io
import os
import pathlib
import zipfile

import grpc
import pytest

from jaxinfer.serve.grpc.vllm import tokenizer
from jaxinfer.serve.grpc.vllm.messages import common
from jaxinfer.serve.grpc.vllm.tokenizer import CHUNK_BYTES, bundle, chunks
from jaxinfer.text.load import load_tokenizer
from jaxinfer.text.pieces import TokenizerError
from tests.serve.fake_engine import write_fake_folder
from tests.serve.grpc.running import failure
from tests.serve.grpc.vllm.serving import serving
from tests.weights.gguf.files import TINY, tiny_tensors, write_gguf


def unpacked(data: bytes) -> dict[str, bytes]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    return {name: archive.read(name) for name in archive.namelist()}


def test_a_client_can_load_what_it_gets(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with serving() as (_, stub, state):
            (state.folder / "large.tiktoken").write_bytes(os.urandom(3 * CHUNK_BYTES))
            parts = [part async for part in stub.GetTokenizer(common.GetTokenizerRequest())]
            again = [part async for part in stub.GetTokenizer(common.GetTokenizerRequest())]
            assert parts == again
            assert len(parts) > 3
            data = b"".join(part.data for part in parts)
            assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
            assert all(0 < len(part.data) <= CHUNK_BYTES for part in parts)
            for name, content in unpacked(data).items():
                assert content == (state.folder / name).read_bytes()
                (tmp_path / name).write_bytes(content)
            ids = load_tokenizer(tmp_path).encode("naïve")
            assert ids == load_tokenizer(state.folder).encode("naïve")

    asyncio.run(story())


def test_nothing_but_the_tokenizers_files_is_sent(tmp_path: pathlib.Path) -> None:
    folder = write_fake_folder(tmp_path / "model")
    for name in ("config.json", "generation_config.json", "x.model", "y.tiktoken", "z.jinja"):
        (folder / name).write_text("{}")
    expected = {path.name for path in folder.iterdir()}
    for name in ("model.safetensors", "secret.txt", ".env", "adapter.json", "code.py"):
        (folder / name).write_text("secret")
    (folder / "inner").mkdir()
    (folder / "inner/tokenizer.json").write_text("secret")
    assert set(unpacked(bundle(folder).data)) == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "more.jinja"])
@pytest.mark.parametrize("kind", ["out", "nowhere", "folder", "loop"])
def test_links_out_of_the_folder_are_not_followed(tmp_path: pathlib.Path, name: str, kind: str) -> None:
    folder = write_fake_folder(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to({"out": tmp_path / "secret", "nowhere": "gone", "loop": name}[kind])
    with pytest.raises(TokenizerError, match=f"^{name} is no regular file") as refusal:
        bundle(folder)
    assert str(tmp_path) not in str(refusal.value)


def test_a_snapshot_of_the_hubs_cache_is_of_links_to_its_blobs(tmp_path: pathlib.Path) -> None:
    folder, blobs = tmp_path / "models--a--b/snapshots/123", tmp_path / "models--a--b/blobs"
    plain = write_fake_folder(tmp_path / "plain")
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        path.rename(blobs / path.name)
        (folder / path.name).symlink_to(f"../../blobs/{path.name}")
    assert bundle(folder) == bundle(blobs)
    (folder / "more.jinja").symlink_to("../other")
    (folder.parent / "other").write_text("secret")
    with pytest.raises(TokenizerError, match=r"more\.jinja"):
        bundle(folder)


def test_the_sum_does_not_depend_on_where_and_when(tmp_path: pathlib.Path) -> None:
    one, two = (write_fake_folder(tmp_path / name) for name in ("one", "two"))
    for path in two.iterdir():
        os.utime(path, (1, 1))
    assert bundle(one) == bundle(two)
    (two / "chat_template.jinja").write_text("other")
    assert bundle(one).sha256 != bundle(two).sha256


def test_a_gguf_file_stands_for_a_folder(tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", TINY, tiny_tensors())
    found = unpacked(bundle(path).data)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(found)


def test_there_are_bounds(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_fake_folder(tmp_path / "model")
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(tokenizer, "MAX_BYTES", size)
    assert len(list(chunks(bundle(folder)))) >= 1
    monkeypatch.setattr(tokenizer, "MAX_BYTES", size - 1)
    with pytest.raises(TokenizerError, match=f"more than the {size - 1} bytes"):
        bundle(folder)
    monkeypatch.setattr(tokenizer, "MAX_FILES", 2)
    with pytest.raises(TokenizerError, match="it has 3 files, and at most 2"):
        bundle(folder)


def test_a_model_without_one_says_so() -> None:
    async def story() -> None:
        async with serving() as (_, stub, state):
            for path in state.folder.iterdir():
                path.unlink()
            found = await failure(stub.GetTokenizer(common.GetTokenizerRequest()))
            assert found.code is grpc.StatusCode.FAILED_PRECONDITION
            assert found.message == "the tokenizer cannot be sent: the model's folder has no files of a tokenizer"

    asyncio.run(story())
