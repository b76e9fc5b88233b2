"""Handmade MXFP4 experts of gpt-oss."""

import pathlib

import ml_dtypes
import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, weights_of

CONFIG = {"quant_method": "mxfp4"}
BLOCKS = np.random.default_rng(0).integers(0, 256, (2, 3, 2, 16), np.uint8)
SCALES = np.random.default_rng(1).integers(100, 140, (2, 3, 2), np.uint8)


def test_experts(tmp_path: pathlib.Path) -> None:
    weights, consumed = weights_of(tmp_path, {"a.up_blocks": BLOCKS, "a.up_scales": SCALES}, CONFIG)
    assert consumed == {"a.up_blocks", "a.up_scales"}
    found = numbers(weights["a.up"])
    for expert, out, i in np.ndindex(2, 3, 64):
        byte = BLOCKS[expert, out, i // 32, i % 32 // 2]
        code = np.array([byte >> 4 if i % 2 else byte & 15], np.uint8).view(ml_dtypes.float4_e2m1fn)[0]
        assert found[expert, out, i] == float(code) * 2.0 ** (int(SCALES[expert, out, i // 32]) - 127)


@pytest.mark.parametrize(
    ("blocks", "scales", "sentence"),
    [
        (BLOCKS[..., :8], SCALES, r"has shape \[2, 3, 2, 8\] where its format asks \[\*, \*, \*, 16\]"),
        (BLOCKS, SCALES[:1], r"'a.up_scales' .* has shape \[1, 3, 2\] where its format asks \[2, 3, 2\]"),
        (BLOCKS.astype(np.int16), SCALES, "is stored as I16 where its format has U8"),
        (BLOCKS, np.full_like(SCALES, 255), "'a.up_scales' .* NaN or infinite"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, blocks: np.ndarray, scales: np.ndarray, sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, {"a.up_blocks": blocks, "a.up_scales": scales}, CONFIG)[0]["a.up"].read("scales")
