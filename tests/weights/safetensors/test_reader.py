"""Reading of one safetensors file: equal to the library's results, and clear errors for malformed files."""

import json
import mmap
import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxinfer.weights import CheckpointError
from jaxinfer.weights.safetensors.reader import DTYPES, MAX_HEADER_BYTES, SafetensorsFile
from tests.weights.files import entry, refused, tiny_tensors, write_raw, write_tensors


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "model.safetensors"


def test_reads_what_the_library_reads(test_data: pathlib.Path) -> None:
    published = test_data / "models" / "stories260K" / "hf" / "model.safetensors"
    expected = safetensors.numpy.load_file(published)
    file = SafetensorsFile(published)
    assert file.tensors.keys() == expected.keys()
    assert len(expected) == 47
    for name, value in expected.items():
        ours = file.read(name)
        assert ours.dtype == value.dtype
        np.testing.assert_array_equal(ours, value)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype(path: pathlib.Path, code: str) -> None:
    values = np.arange(1, 7).reshape(2, 3).astype(DTYPES[code])
    write_raw(path, {"x": entry(0, values.nbytes, [2, 3], code)}, values.tobytes())
    with safetensors.safe_open(path, "np") as library:
        assert library.get_slice("x").get_dtype() == code
    np.testing.assert_array_equal(SafetensorsFile(path).read("x"), values)


def test_unaligned_scalar_and_empty_tensors(path: pathlib.Path) -> None:
    header = {
        "byte": entry(0, 1, [1], "U8"),
        "odd": entry(1, 9, [2]),
        "scalar": entry(9, 13, []),
        "empty": entry(13, 13, [0, 5]),
    }
    write_raw(path, header, b"\x07" + np.array([1.5, -2, 9], np.float32).tobytes())
    file = SafetensorsFile(path)
    assert file.read("odd").tolist() == [1.5, -2]
    assert file.read("scalar").shape == ()
    assert file.read("scalar") == 9
    assert file.read("empty").shape == (0, 5)
    file.release("empty")


def test_only_an_empty_tensor(path: pathlib.Path) -> None:
    write_raw(path, {"x": entry(0, 0, [3, 0], "BF16")})
    assert SafetensorsFile(path).read("x").shape == (3, 0)


def test_tensors_are_read_only_views_of_the_mapping(path: pathlib.Path) -> None:
    write_tensors(path, {"x": np.arange(100_000, dtype=np.float32)})
    file = SafetensorsFile(path)
    tensor = file.read("x")
    assert not tensor.flags.writeable
    assert isinstance(tensor.base, mmap.mmap)
    file.release("x")
    del file
    assert tensor[-1] == 99_999


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 20, 100, 400, 900])
def test_truncated(path: pathlib.Path, size: int) -> None:
    write_tensors(path, tiny_tensors())
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with refused(r"not a valid safetensors file: .*(bytes long|file ends after|truncated)"):
        SafetensorsFile(path)


def test_truncated_anywhere(path: pathlib.Path) -> None:
    write_tensors(path, {"x": np.ones(5, np.float32), "y": np.ones((2, 2), np.float16)})
    whole = path.read_bytes()
    SafetensorsFile(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with refused("not a valid safetensors file"):
            SafetensorsFile(path)


GOOD = {"a": entry(0, 8), "b": entry(8, 16)}
HUGE = 2**64

LIES: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{oops", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "an array": ([], "not a JSON object"),
    "deep nesting": (b"[" * 200_000, "not valid JSON"),
    "digits without end": (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "a name twice": (b'{"a": 1, "a": 2}', "names 'a' twice"),
    "entry not an object": ({"a": 3}, "'a' lacks a proper dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, "'a' lacks a proper"),
    "shape not a list": ({"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}, "'a' lacks a proper"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, "'a' lacks a proper"),
    "unknown dtype": ({"a": entry(0, 16, [4], "F31")}, "unknown dtype 'F31'"),
    "negative size": ({"a": entry(0, 16, [-2, -2])}, "non-negative integers"),
    "float size": ({"a": entry(0, 16, [4.0])}, "non-negative integers"),
    "boolean size": ({"a": entry(0, 4, [True])}, "non-negative integers"),
    "size as text": ({"a": entry(0, 16, ["4"])}, "non-negative integers"),
    "too many dimensions": ({"a": entry(0, 16, [1] * 40 + [4])}, "non-negative integers"),
    "negative offset": ({"a": entry(-4, 12, [4])}, "non-negative integers"),
    "offsets reversed": ({"a": entry(16, 0, [4])}, "needs 16 bytes .* span -16"),
    "shape larger than the span": ({"a": entry(0, 16, [5])}, "needs 20 bytes for F32 .* span 16"),
    "product wraps around": ({"a": entry(0, 16, [2**32, 2**32, 4])}, "no memory could hold"),
    "one size wraps around": ({"a": entry(0, 16, [HUGE + 4])}, "non-negative integers"),
    "zero times too much": ({"z": entry(0, 0, [0, 2**40, 2**40]), **GOOD}, "no memory could hold"),
    "past the end": ({"a": entry(0, 8), "b": entry(8, 24)}, "'b' ends at byte .*: is it truncated"),
    "far past the end": ({"a": entry(2**60, 2**60 + 16, [4])}, "'a' ends at byte .*: is it truncated"),
    "overlap": ({"a": entry(0, 12), "b": entry(8, 16)}, "'b' overlaps tensor 'a'"),
    "same place": ({"a": entry(0, 16), "b": entry(0, 16)}, "overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(8, 16)}, "4 bytes before tensor 'b'"),
    "hole at the start": ({"b": entry(8, 16)}, "8 bytes before tensor 'b'"),
    "trailing bytes": ({"a": entry(0, 8)}, "8 bytes at its end"),
    "control characters": ({"a\x1b[2J\n": 3}, r"'a\\x1b\[2J\\n' lacks"),
    "lone surrogate": (b'{"\\ud800": 3}', r"'\\ud800' lacks"),
    "endless name": ({"n" * 10_000: 3}, r"'n{120}\.\.\.' lacks"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_lying_headers(path: pathlib.Path, lie: str) -> None:
    header, pattern = LIES[lie]
    write_raw(path, header, bytes(16))
    with refused(pattern):
        SafetensorsFile(path)


def test_the_lies_are_about_a_good_file(path: pathlib.Path) -> None:
    write_raw(path, GOOD, bytes(16))
    assert SafetensorsFile(path).tensors.keys() == {"a", "b"}


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, MAX_HEADER_BYTES + 1])
def test_header_length_is_bounded(path: pathlib.Path, length: int) -> None:
    write_raw(path, {}, bytes(100), length=length)
    with refused(f"claims {length} bytes, more than the allowed"):
        SafetensorsFile(path)


def test_header_longer_than_the_file(path: pathlib.Path) -> None:
    write_raw(path, GOOD, bytes(16), length=1000)
    with refused("claims 1000 bytes but the file ends after"):
        SafetensorsFile(path)


def test_missing_file_and_folder(tmp_path: pathlib.Path) -> None:
    with refused("does not exist or is not a file"):
        SafetensorsFile(tmp_path / "absent.safetensors")
    with refused("does not exist or is not a file"):
        SafetensorsFile(tmp_path)


def _fuzzed_file() -> bytes:
    values = {"a": np.ones((2, 3), np.float32), "b": np.zeros((4,), ml_dtypes.bfloat16), "c": np.ones((0, 2), np.int8)}
    return safetensors.numpy.save(values, {"format": "pt"})


WHOLE = _fuzzed_file()
HEADER_END = 8 + int.from_bytes(WHOLE[:8], "little")
INTERESTING = st.sampled_from(
    [b"0", b"9", b"-", b"]", b"[", b"{", b'"', b",", b"1e9", b"F64", b"null", b"\x00", b"\xff"]
)


@hypothesis.settings(
    max_examples=400, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    edits=st.lists(
        st.tuples(st.integers(0, HEADER_END - 1), st.one_of(INTERESTING, st.binary(max_size=3)), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_mutated_headers_load_or_are_refused(tmp_path: pathlib.Path, edits: list[tuple[int, bytes, int]]) -> None:
    mutant = bytearray(WHOLE)
    for at, new, removed in edits:
        mutant[at : at + removed] = new
    _load_or_refuse(tmp_path / "mutant.safetensors", bytes(mutant))


NUMBERS = st.one_of(st.integers(-1, 30), st.integers(), st.sampled_from([2**31, 2**62, 2**63, 2**64]), st.booleans())
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", ""]),
        "shape": st.lists(NUMBERS, max_size=4),
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2),
    }
)


@hypothesis.settings(
    max_examples=300, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(header=st.dictionaries(st.sampled_from(["a", "b", "c"]), ENTRIES), size=st.integers(0, 64))
def test_random_headers_load_or_are_refused(tmp_path: pathlib.Path, header: dict[str, Any], size: int) -> None:
    text = json.dumps(header).encode()
    _load_or_refuse(tmp_path / "made.safetensors", len(text).to_bytes(8, "little") + text + bytes(size))


def _load_or_refuse(path: pathlib.Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name, info in file.tensors.items():
        assert file.read(name).tobytes() == content[info.start : info.start + info.nbytes]
