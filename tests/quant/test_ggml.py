"""Blocks of ggml against llama.cpp's own package, and against every tensor of files that llama.cpp wrote."""

import collections
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import gguf
from jaxinfer.quant.ggml import KINDS
from jaxinfer.weights.gguf import GgufFile

# No reader in Python knows these two: see below.
WITHOUT_GOLDENS = {"Q1_0", "Q2_0"}


def golden(repo: pathlib.Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(repo / "tests" / "goldens" / "ggml_blocks.npz") as file:
        return file[f"{kind}:blocks"], file[f"{kind}:values"]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WITHOUT_GOLDENS))
def test_the_values_of_llama_cpp_bit_for_bit(repo: pathlib.Path, kind: str) -> None:
    blocks, values = golden(repo, kind)
    assert blocks.shape[-1] == KINDS[kind].bytes
    assert values.shape[-1] == KINDS[kind].elements
    np.testing.assert_array_equal(np.asarray(KINDS[kind].dequantise(jnp.asarray(blocks))), values)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WITHOUT_GOLDENS))
def test_leading_dimensions_and_jit(repo: pathlib.Path, kind: str) -> None:
    blocks, values = golden(repo, kind)
    stacked = jax.jit(KINDS[kind].dequantise)(blocks.reshape(2, 3, 2, -1))
    assert stacked.dtype == jnp.float32
    # XLA may fuse a product and a sum
    np.testing.assert_allclose(stacked, values.reshape(2, 3, 2, -1), rtol=1e-6, atol=1e-6 * np.abs(values).max())


def test_files_have_blocks_of_the_same_sizes() -> None:
    blocks = {kind: size for kind, size in gguf.SIZES.items() if size[0] > 1}
    assert blocks == {kind: (form.elements, form.bytes) for kind, form in KINDS.items()}
    assert blocks.keys() == set(gguf.BLOCKS.values())
    assert gguf.SIZES.keys() - blocks == set(gguf.PLAIN.values())


def test_one_bit_is_a_sign() -> None:
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([1.5], "<f2").view(np.uint8)
    block[2] = 0b0000_0101
    values = np.asarray(KINDS["Q1_0"].dequantise(jnp.asarray(block)))
    expected = np.full(128, -1.5, np.float32)
    expected[[0, 2]] = 1.5
    np.testing.assert_array_equal(values, expected)


def test_two_bits_are_minus_one_to_two() -> None:
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([0.25], "<f2").view(np.uint8)
    block[2] = 0b11_10_01_00
    values = np.asarray(KINDS["Q2_0"].dequantise(jnp.asarray(block)))
    np.testing.assert_array_equal(values[:4], np.array([-0.25, 0.0, 0.25, 0.5], np.float32))
    np.testing.assert_array_equal(values[4:], np.full(60, -0.25, np.float32))


def test_every_block_of_the_files_of_llama_cpp(test_data: pathlib.Path) -> None:
    """By kind, all files at once: an operation is compiled once for each."""
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
    values = np.asarray(KINDS[kind].dequantise(jnp.asarray(np.concatenate(blocks))))
    return np.split(values, np.cumsum([len(part) for part in blocks])[:-1])
