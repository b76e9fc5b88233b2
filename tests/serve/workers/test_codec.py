"""Tests of the messages between the front end and its workers: decoding returns the original."""

from array import array

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.serve.workers.codec import decode, encode

TEXTS = st.text() | st.text(st.characters(categories=["Cs"]))  # with lone surrogates
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.lists(st.integers()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
EDGES = [edge + step for bits in (63, 64, 71, 72) for edge in (2**bits, -(2**bits)) for step in (-1, 0, 1)]

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(VALUES)
def test_a_decoded_value_equals_the_original(value):
    assert decode(encode(value)) == value


@pytest.mark.parametrize("value", EDGES)
def test_integers_have_any_size(value):
    assert decode(encode([value])) == [value]


@pytest.mark.parametrize("kind", ["i", "q"])
def test_arrays_stay_arrays(kind):
    numbers = array(kind, [1, -2, 2**31 - 1])
    found = decode(encode({"prompt": numbers, "text": "\ud800"}))["prompt"]
    assert (found, found.typecode) == (numbers, kind)


def test_values_have_the_type_that_is_asked_for():
    assert decode(encode((True, "a")), tuple[bool, str]) == (True, "a")
    with pytest.raises(msgspec.ValidationError):
        decode(encode((True, 1)), tuple[bool, str])


def test_other_values_are_refused():
    with pytest.raises(TypeError):
        encode([object()])
