"""ggml blocks against llama.cpp's own code, and against every tensor of files written by llama.cpp."""

import collections
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.formats import gguf
from jaxinfer.quant import codebooks
from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.gguf.checkpoint import GgufFile

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "ggml_blocks.npz"
OF_CODEBOOKS = ("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS")
READERS_DISAGREE = ("MXFP4", "NVFP4")  # on the sign of zero


@functools.cache
def goldens() -> Mapping[str, np.ndarray]:
    with np.load(GOLDENS) as file:
        return {name: file[name] for name in file.files}


def bits(kind: str, values: np.ndarray) -> np.ndarray:
    """Return float32 bit patterns, with the sign of zero only for kinds on which readers agree."""
    exact = np.asarray(values, np.float32)
    return (exact + np.float32(0) if kind in READERS_DISAGREE else exact).view(np.uint32)


def test_there_are_goldens_of_every_kind() -> None:
    assert KINDS.keys() == {name.split(":")[0] for name in goldens()}
    assert set(OF_CODEBOOKS) == {name.split(":")[0] for name in goldens() if name.endswith(":entries")}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_values_of_llama_cpp_bit_for_bit(kind: str) -> None:
    blocks, values = goldens()[f"{kind}:blocks"], goldens()[f"{kind}:values"]
    assert blocks.shape[-1] == KINDS[kind].bytes
    assert values.shape[-1] == KINDS[kind].elements
    ours = np.asarray(KINDS[kind].dequantize(jnp.asarray(blocks)))
    np.testing.assert_array_equal(bits(kind, ours), bits(kind, values))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_leading_dimensions_and_jit(kind: str) -> None:
    blocks, values = goldens()[f"{kind}:blocks"], goldens()[f"{kind}:values"]
    stacked = jax.jit(KINDS[kind].dequantize)(blocks.reshape(2, 3, 2, -1))
    assert stacked.dtype == jnp.float32
    # XLA may fuse a product and a sum
    np.testing.assert_allclose(stacked, values.reshape(2, 3, 2, -1), rtol=1e-6, atol=1e-6 * np.abs(values).max())


# --------------------------------------------------------------------------------------------------------------
# Codebooks


@pytest.mark.parametrize("kind", OF_CODEBOOKS)
def test_all_entries_and_signs_bit_for_bit(kind: str) -> None:
    """Compiled: no product of a scale and an entry is rounded, so fusion changes nothing."""
    for blocks, values in (("entries", "entry_values"), ("blocks", "values")):
        ours = np.asarray(jax.jit(KINDS[kind].dequantize)(goldens()[f"{kind}:{blocks}"]))
        np.testing.assert_array_equal(bits(kind, ours), bits(kind, goldens()[f"{kind}:{values}"]))


@pytest.mark.parametrize("kind", OF_CODEBOOKS)
def test_the_goldens_name_every_entry(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The goldens cover all entries: with each entry replaced by its index, all indices are in the result."""
    book = codebooks.entries(kind)
    numbered = np.broadcast_to(np.arange(len(book), dtype=np.float32)[:, None], book.shape)
    monkeypatch.setattr(codebooks, "entries", lambda _: numbered)
    blocks = jnp.asarray(goldens()[f"{kind}:entries"])
    found = np.abs(np.asarray(KINDS[kind].dequantize(blocks))).reshape(-1, book.shape[1])
    if kind in ("IQ1_S", "IQ1_M"):  # an offset of 1/8 is added or subtracted
        found = np.round(found)
    else:
        found = found / found[1].max()
    np.testing.assert_array_equal(found, numbered)


@pytest.mark.parametrize("kind", OF_CODEBOOKS)
def test_a_wrong_entry_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    book, rng = codebooks.entries(kind), np.random.default_rng(0)
    for entry in (0, len(book) - 1, *rng.integers(0, len(book), 3)):
        wrong = book.copy()
        wrong[entry, rng.integers(book.shape[1])] += 1
        monkeypatch.setattr(codebooks, "entries", lambda _, wrong=wrong: wrong)
        ours = np.asarray(KINDS[kind].dequantize(jnp.asarray(goldens()[f"{kind}:entries"])))
        assert (bits(kind, ours) != bits(kind, goldens()[f"{kind}:entry_values"])).sum() == 1


@pytest.mark.parametrize(
    ("kind", "size", "values"),
    [
        ("IQ2_XXS", 256, {8, 25, 43}),
        ("IQ2_XS", 512, {8, 25, 43}),
        ("IQ2_S", 1024, {8, 25, 43}),
        ("IQ3_XXS", 256, {4, 12, 20, 28, 36, 44, 52, 62}),
        ("IQ3_S", 512, set(range(1, 16, 2))),
        ("IQ1_S", 2048, {-1, 0, 1}),
        ("IQ1_M", 2048, {-1, 0, 1}),
    ],
)
def test_a_codebook_has_so_many_different_entries(kind: str, size: int, values: set[int]) -> None:
    book = codebooks.entries(kind)
    assert book.shape == (size, 4 if kind.startswith("IQ3") else 8)
    assert set(np.unique(book).tolist()) == values
    assert len(np.unique(book, axis=0)) == size
    assert not book.flags.writeable


# --------------------------------------------------------------------------------------------------------------
# All kinds


def test_files_have_blocks_of_the_same_sizes() -> None:
    blocks = {kind: size for kind, size in gguf.SIZES.items() if size[0] > 1}
    assert blocks == {kind: (form.elements, form.bytes) for kind, form in KINDS.items()}
    assert blocks.keys() == set(gguf.BLOCKS.values())
    assert gguf.SIZES.keys() - blocks == set(gguf.PLAIN.values())


def test_one_bit_is_a_sign() -> None:
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([1.5], "<f2").view(np.uint8)
    block[2] = 0b0000_0101
    values = np.asarray(KINDS["Q1_0"].dequantize(jnp.asarray(block)))
    expected = np.full(128, -1.5, np.float32)
    expected[[0, 2]] = 1.5
    np.testing.assert_array_equal(values, expected)


def test_two_bits_are_minus_one_to_two() -> None:
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([0.25], "<f2").view(np.uint8)
    block[2] = 0b11_10_01_00
    values = np.asarray(KINDS["Q2_0"].dequantize(jnp.asarray(block)))
    np.testing.assert_array_equal(values[:4], np.array([-0.25, 0.0, 0.25, 0.5], np.float32))
    np.testing.assert_array_equal(values[4:], np.full(60, -0.25, np.float32))


def test_every_block_of_the_files_of_llama_cpp(test_data: pathlib.Path) -> None:
    """All files at once, grouped by kind: each operation compiles once."""
    wanted: dict[str, list[tuple[str, str, np.ndarray]]] = collections.defaultdict(list)
    for folder in sorted((test_data / "models" / "quantised").glob("gguf-*")):
        sums = json.loads((folder / "MADE_BY.json").read_text())["sha256_of_dequantised_f32_le_bytes"]
        file = GgufFile(folder / "model.gguf")
        assert file.tensors.keys() == sums.keys()
        for name, info in file.tensors.items():
            assert list(info.shape) == sums[name]["shape"]
            wanted[info.kind].append((f"{folder.name} {name}", sums[name]["sha256"], file.read(name)))
    assert len(wanted) >= 16
    for kind, tensors in wanted.items():
        for (label, expected, _), values in zip(
            tensors, numbers(kind, [stored for *_, stored in tensors]), strict=True
        ):
            # readers of E2M1 disagree on the sign of zero
            assert hashlib.sha256((values + np.float32(0)).tobytes()).hexdigest() == expected, f"{label} ({kind})"


def numbers(kind: str, tensors: list[np.ndarray]) -> list[np.ndarray]:
    if kind not in KINDS:
        return [tensor.astype(np.float32) for tensor in tensors]
    blocks = [tensor.reshape(-1, KINDS[kind].bytes) for tensor in tensors]
    values = np.asarray(KINDS[kind].dequantize(jnp.asarray(np.concatenate(blocks))))
    return np.split(values, np.cumsum([len(part) for part in blocks])[:-1])
