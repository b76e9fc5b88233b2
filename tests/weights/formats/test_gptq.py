"""GPTQ: handmade checkpoints of every width and version, and each kind of invalid file."""

import pathlib
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.weights.files import refused
from tests.weights.formats.checkpoints import numbers, pack, weights_of

OUT = 32


def made(
    bits: int, inputs: int = 96, size: int = 32, index: np.ndarray | None = None, symmetric: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return tensors of version 2, and the weight [out, in] by definition, value by value."""
    rng = np.random.default_rng(bits)
    groups = -(-inputs // size)
    group_of = np.arange(inputs) // size if index is None else index
    codes = rng.integers(0, 2**bits, (inputs, OUT))
    zeros = np.full((groups, OUT), 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, (groups, OUT))
    scales = rng.uniform(0.01, 0.1, (groups, OUT)).astype(np.float16)
    weight = np.empty((OUT, inputs), np.float32)
    for i in range(inputs):
        for o in range(OUT):
            g = group_of[i]
            weight[o, i] = np.float32(scales[g, o]) * np.float32(codes[i, o] - zeros[g, o])
    tensors = {
        "a.qweight": pack(codes.T, bits).T,
        "a.qzeros": pack(zeros, bits),
        "a.scales": scales,
        "a.g_idx": group_of.astype(np.int32),
    }
    return tensors, weight


def config(bits: int, size: int = 32, **more: Any) -> dict[str, Any]:
    given = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False, "checkpoint_format": "gptq_v2"}
    return {**given, **more}


def as_version_1(zeros: np.ndarray, bits: int, out: int) -> np.ndarray:
    """Subtract one from each zero point, as version 1 stores them: per word, or per field where fields cross words."""
    if 32 % bits:
        rows, most = [int.from_bytes(row.tobytes(), "little") for row in zeros], 2**bits
        return pack(np.array([[((row >> bits * at) % most - 1) % most for at in range(out)] for row in rows]), bits)
    one = sum(1 << place for place in range(0, 32, bits))
    words = [[(int(word) - one) % 2**32 for word in row] for row in zeros]
    return np.array(words, np.uint32).view(np.int32)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_widths_and_versions(tmp_path: pathlib.Path, bits: int, version: int) -> None:
    tensors, expected = made(bits)
    if version == 1:
        tensors["a.qzeros"] = as_version_1(tensors["a.qzeros"], bits, OUT)
    form = {} if version == 2 else {"checkpoint_format": None}  # no checkpoint_format: version 1
    weights, consumed = weights_of(tmp_path, tensors, config(bits, **form))
    assert consumed == tensors.keys()
    np.testing.assert_array_equal(numbers(weights["a.weight"]), expected)
    assert weights["a.weight"].layout.codes == ("int8" if bits == 8 else "int4")


@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_ones_have_no_zeros(tmp_path: pathlib.Path, bits: int, said: str, stored: int) -> None:
    """Symmetric weights read the same in either stored version, and with either version in the config."""
    tensors, expected = made(bits, symmetric=True)
    if stored == 1:
        tensors["a.qzeros"] = as_version_1(tensors["a.qzeros"], bits, OUT)
    weight = weights_of(tmp_path, tensors, config(bits, sym=True, checkpoint_format=said))[0]["a.weight"]
    assert not weight.layout.zeros
    np.testing.assert_array_equal(numbers(weight), expected)


def test_columns_in_another_order(tmp_path: pathlib.Path) -> None:
    index = np.random.default_rng(0).permutation(np.arange(96) // 32)
    tensors, expected = made(4, index=index)
    weight = weights_of(tmp_path, tensors, config(4, desc_act=True))[0]["a.weight"]
    assert weight.layout.ordered
    assert weight.inputs_digest
    np.testing.assert_array_equal(numbers(weight), expected)
    # groups are contiguous, with columns in input order within each group
    order = weight.read("order")
    np.testing.assert_array_equal(order, [i for g in range(3) for i in range(96) if index[i] == g])


def test_two_orders_are_told_apart(tmp_path: pathlib.Path) -> None:
    digests = set()
    for seed in (0, 1):
        index = np.random.default_rng(seed).permutation(np.arange(96) // 32)
        weight = weights_of(tmp_path, made(4, index=index)[0], config(4, desc_act=True))[0]["a.weight"]
        digests.add(weight.inputs_digest)
    assert len(digests) == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_a_shorter_last_group(tmp_path: pathlib.Path, ordered: bool) -> None:
    index = np.random.default_rng(0).permutation(np.arange(96) // 64) if ordered else None
    tensors, expected = made(4, size=64, index=index)
    weight = weights_of(tmp_path, tensors, config(4, 64))[0]["a.weight"]
    assert weight.layout.group == 32
    np.testing.assert_array_equal(numbers(weight), expected)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("bits", "group_size"), {"wbits": 4, "groupsize": 32}),
        (("bits", "group_size"), {"w_bit": "4", "q_group_size": 32.0}),
        (("checkpoint_format",), {"format": "GPTQ_V2"}),
        (("quant_method",), {"method": "GPTQ"}),
        (("sym",), {"sym": 0}),
        (("group_size",), {}),
        (("group_size",), {"group_size": None}),
    ],
)
def test_spellings(tmp_path: pathlib.Path, names: tuple[str, ...], said: Mapping[str, Any]) -> None:
    tensors, expected = made(4)
    given = {name: value for name, value in config(4).items() if name not in names}
    np.testing.assert_array_equal(numbers(weights_of(tmp_path, tensors, {**given, **said})[0]["a.weight"]), expected)


def test_two_spellings_that_differ(tmp_path: pathlib.Path) -> None:
    with refused("quantization_config.bits of config.json is 4, but w_bit is 8"):
        weights_of(tmp_path, made(4)[0], {**config(4), "w_bit": 8})


def test_an_index_of_zeros_is_of_neighbours(tmp_path: pathlib.Path) -> None:
    tensors, expected = made(4)
    weight = weights_of(tmp_path, {**tensors, "a.g_idx": np.zeros(96, np.int32)}, config(4))[0]["a.weight"]
    assert not weight.layout.ordered
    np.testing.assert_array_equal(numbers(weight), expected)


@pytest.mark.parametrize(
    "said", [{"desc_act": True}, {"act_order": 1}, {"desc_act": False, "dynamic": {"a": {"desc_act": True}}}]
)
def test_another_order_needs_an_index(tmp_path: pathlib.Path, said: Mapping[str, Any]) -> None:
    tensors, _ = made(4)
    del tensors["a.g_idx"]
    assert weights_of(tmp_path, tensors, config(4))[0]
    with refused("lacks tensor 'a.g_idx'"):
        weights_of(tmp_path, tensors, {**config(4), **said})


def test_one_group_and_no_index(tmp_path: pathlib.Path) -> None:
    tensors, expected = made(4, size=96)
    del tensors["a.g_idx"]
    weight = weights_of(tmp_path, tensors, config(4, -1))[0]["a.weight"]
    assert weight.layout.group == 96
    np.testing.assert_array_equal(numbers(weight), expected)


def test_nothing_of_the_size_of_the_codes_is_made_beside_them(tmp_path: pathlib.Path) -> None:
    tensors = {
        "a.qweight": np.zeros((256, 1024), np.int32),
        "a.qzeros": np.zeros((1, 128), np.int32),
        "a.scales": np.ones((1, 1024), np.float16),
    }
    weight = weights_of(tmp_path, tensors, config(4, -1))[0]["a.weight"]
    tracemalloc.start()
    codes = weight.read("codes")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * codes.nbytes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bits": 5}, "quantization_config.bits of config.json is 5: known are 2, 3, 4, 8"),
        ({"bits": True}, "bits of config.json is True"),
        ({"bits": None}, "bits of config.json is absent"),
        ({"group_size": 0}, "group_size of config.json is 0"),
        ({"group_size": 2**70}, "group_size of config.json is 1180"),
        ({"group_size": "128x"}, "group_size of config.json is '128x'"),
        ({"bits": 4.5}, "bits of config.json is 4.5"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format of config.json is 'marlin': known are gptq, gptq_v2"),
        ({"pack_dtype": "int64"}, "pack_dtype of config.json is 'int64': known are int32"),
        ({"sym": "yes"}, "sym of config.json is 'yes': known are true, false"),
        ({"checkpoint_format": "marlin"}, "quantise the original again"),
        ({"is_marlin_format": True}, "is_marlin_format of config.json is True.* quantise the original again"),
        ({"sym": True}, "qzeros.* holds zero points other than 8, .* although"),
    ],
)
def test_configurations(tmp_path: pathlib.Path, change: Mapping[str, Any], sentence: str) -> None:
    with refused(sentence):
        weights_of(tmp_path, made(4)[0], {**config(4), **change})[0]["a.weight"].read("scales")


def wrong_index(place: int, value: int) -> np.ndarray:
    index = (np.arange(96) // 32).astype(np.int32)
    index[place] = value
    return index


NOT_A_NUMBER = np.full((3, OUT), np.nan, np.float16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"a.qzeros": None}, "lacks tensor 'a.qzeros'"),
        ({"a.scales": None}, "lacks tensor 'a.scales'"),
        ({"a.qweight": np.zeros((12,), np.int32)}, r"'a.qweight' .* has shape \[12\] where its format asks \[\*, \*\]"),
        ({"a.qweight": np.zeros((0, OUT), np.int32)}, r"has shape \[0, 32\]"),
        ({"a.qweight": np.zeros((12, OUT), np.int64)}, "is stored as I64 where its format has I32"),
        ({"a.qzeros": np.zeros((3, 5), np.int32)}, r"'a.qzeros' .* has shape \[3, 5\] where its format asks \[3, 4\]"),
        ({"a.scales": np.ones((3, 31), np.float16)}, r"'a.scales' .* asks \[3, 32\]"),
        ({"a.scales": np.ones((2, OUT), np.float16)}, r"'a.scales' .* asks \[3, 32\]"),
        ({"a.scales": np.ones((3, OUT), np.int8)}, "is stored as I8"),
        ({"a.scales": np.ones((0, OUT), np.float16)}, r"'a.scales' .* asks \[3, 32\]"),
        ({"a.scales": NOT_A_NUMBER}, "'a.scales' .* NaN or infinite"),
        ({"a.g_idx": np.zeros(95, np.int32)}, r"'a.g_idx' .* asks \[96\]"),
        ({"a.g_idx": wrong_index(0, 3)}, "'a.g_idx' .* names groups 0 to 3 where there are 0 to 2"),
        ({"a.g_idx": wrong_index(0, -1)}, "'a.g_idx' .* names groups -1 to 2"),
        ({"a.g_idx": wrong_index(0, 1)}, "'a.g_idx' .* does not give 32 inputs to each group"),
        ({"a.g_idx": np.ones(96, np.int32)}, "does not give 32 inputs"),
    ],
)
def test_tensors(tmp_path: pathlib.Path, change: Mapping[str, Any], sentence: str) -> None:
    tensors = {name: value for name, value in {**made(4)[0], **change}.items() if value is not None}
    with refused(sentence):
        weights_of(tmp_path, tensors, config(4))[0]["a.weight"].read("scales")


def test_rows_that_hold_no_whole_fields(tmp_path: pathlib.Path) -> None:
    with refused("has 10 rows, which do not hold whole fields of 3 bits"):
        weights_of(tmp_path, {**made(3)[0], "a.qweight": np.zeros((10, OUT), np.int32)}, config(3))
