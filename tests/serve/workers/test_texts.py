"""Tests of what a worker makes of a long body: token ids become arrays, and the other values are counted."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.workers.texts import body_parser


def parsed(value: Any, values: int = 10**6) -> Any:
    return body_parser(values)(json.dumps(value).encode())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False), min_size=16))
def test_lists_of_integers_become_arrays_only_in_fields_of_token_ids(numbers):
    found = parsed({"prompt": numbers, "tools": numbers})
    assert list(found["prompt"]) == found["tools"] == numbers
    assert isinstance(found["tools"], list)
    whole = {type(number) for number in numbers} == {int} and all(-(2**63) <= number < 2**63 for number in numbers)
    assert isinstance(found["prompt"], array) == whole


def test_token_ids_are_not_counted():
    body = {"prompt": [[7] * 100] * 3, "n": 1}
    assert parsed(body, 6) == {"prompt": [array("i", each) for each in body["prompt"]], "n": 1}
    with pytest.raises(RequestError) as refused:
        parsed(body, 5)
    assert (str(refused.value), refused.value.field) == ("n holds more than 5 values (limits.values)", "n")


@pytest.mark.parametrize(
    ("body", "field"),
    [({"a": [{"x" * 2000: 1}]}, "a"), ({"x" * 2000: 1}, None), ([{"x" * 2000: 1}], None)],
)
def test_long_names_are_refused(body: Any, field: str | None):
    with pytest.raises(RequestError, match="a name of 2000 characters") as refused:
        parsed(body)
    assert refused.value.field == field


def test_a_list_is_counted_too():
    assert parsed([1] * 5, 6) == [1] * 5
    with pytest.raises(RequestError, match="the body holds more than 5 values"):
        parsed([1] * 5, 5)
