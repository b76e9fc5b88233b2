"""Tests of the message format between helper processes and the front end: decoding returns the original."""

import json
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.serve.workers.packing import PackError, pack, unpack

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text(min_size=65, max_size=99) | st.lists(st.integers()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(VALUES)
def test_what_goes_in_comes_out(value):
    assert unpack(pack(value)) == value


@patient
@given(st.lists(st.integers() | st.booleans() | st.floats(allow_nan=False), min_size=16))
def test_lists_of_whole_numbers_are_arrays_and_nothing_else_is(numbers):
    found = unpack(pack({"prompt": numbers, "tools": numbers}, ("prompt",)))
    assert list(found["prompt"]) == numbers
    assert found["tools"] == numbers
    assert isinstance(found["tools"], list)
    whole = {type(number) for number in numbers} == {int} and all(abs(number) < 2**63 for number in numbers)
    assert not whole or isinstance(found["prompt"], array)
    assert isinstance(found["prompt"], array) <= ({type(number) for number in numbers} == {int})


def test_texts_are_beside_the_json():
    """Texts are stored outside the JSON, so that parsing cost does not depend on their content."""
    frame = pack({"prompt": "\n" * 1_000_000, "more": ["\ud800" * 100]})
    size = int.from_bytes(frame[:4])
    assert size < 200
    assert len(json.loads(frame[4 : 4 + size])["parts"]) == 2
    assert unpack(frame) == {"prompt": "\n" * 1_000_000, "more": ["\ud800" * 100]}


def test_what_is_counted():
    ids = [[7] * 100] * 3
    assert unpack(pack({"prompt": ids, "n": 1}, ("prompt",), 6)) == {
        "prompt": [array("i", each) for each in ids],
        "n": 1,
    }
    with pytest.raises(PackError, match="more than 5 values"):
        pack({"prompt": ids, "n": 1}, ("prompt",), 5)
    with pytest.raises(PackError, match="a name of 2000 characters"):
        pack({"a": [{"x" * 2000: 1}]})
