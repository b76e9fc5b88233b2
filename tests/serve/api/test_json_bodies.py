"""Tests that ambiguous or disproportionately expensive JSON is rejected."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.json_bodies import MAX_DEPTH, parse
from tests.yardstick import slowness

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_json_says_is_what_comes_out(value, ascii_only):
    try:
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ServeError, match="surrogate"):
            parse(data)
        return
    assert parse(data) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b'{"a": "\xc3"}', "not UTF-8 at byte 7"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"n": 1, "m": 2, "n": 3}', "'n' twice"),
        (b'{"a": [{"b": 1, "b": 1}]}', "'b' twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e400}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": [' + b"9" * 401 + b"," + b"1," * 40_000 + b"1]}", "too many digits"),
        (rb'{"a": "\ud800"}', "surrogate"),
        (rb'{"\uDFFF": 1}', "surrogate"),
        (b"[" * 100_000, "nested deeper"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested deeper"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else None,
)
def test_refused(data, message):
    with pytest.raises(ServeError, match=message) as refused:
        parse(data)
    assert refused.value.kind is Kind.INVALID
    assert len(refused.value.message) < 200


def test_depth_is_that_of_brackets_outside_of_strings():
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse(deep) is not None
    with pytest.raises(ServeError, match="nested"):
        parse(b"[" + deep + b"]")
    assert parse(b'["' + b"[{" * 1000 + rb"\"[[" + b'"]') == ["[{" * 1000 + '"[[']
    assert parse(b"[" + b"[]," * 1000 + b"1]")[-1] == 1
    assert parse(rb'["\ud83e\udd8a"]') == ["🦊"]


@pytest.mark.parametrize("data", [b'["' + rb"\"" * 500_000 + b"[" * 100, b'"' * 500_000 + b"[" * 100])
def test_strings_without_an_end_cost_no_more_than_their_length(data):
    start = time.process_time()
    with pytest.raises(ServeError):
        parse(data)
    assert time.process_time() - start < 2.0 * slowness()
