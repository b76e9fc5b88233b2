"""Conversion of numbers and flags given as another JSON type."""

import math
from typing import Any

import pytest

from jaxinfer.formats.json_values import flag, real, whole

NOTHING = [None, "", "a", "nan", "inf", "1_0", "٣", "1" * 41, [], [1], {}, {"a": 1}, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [20, 20.0, "20", "20.0", " 20 ", "2e1"])
def test_whole_numbers(value: Any) -> None:
    found = whole(value)
    assert (found, type(found)) == (20, int)


@pytest.mark.parametrize("value", [*NOTHING, True, False, 0.5, "0.5", "-1e-3"])
def test_what_is_no_whole_number(value: Any) -> None:
    assert whole(value) is None


def test_large_whole_numbers_keep_their_digits() -> None:
    assert whole(2**64 + 1) == whole(str(2**64 + 1)) == 2**64 + 1


@pytest.mark.parametrize(("value", "meant"), [(1, 1.0), (0.5, 0.5), ("1e-6", 1e-6), ("-3", -3.0), (10**30, 1e30)])
def test_real_numbers(value: Any, meant: float) -> None:
    found = real(value)
    assert (found, type(found)) == (meant, float)


@pytest.mark.parametrize("value", [*NOTHING, True, 10**400, "1e999"])
def test_what_is_no_real_number(value: Any) -> None:
    assert real(value) is None


@pytest.mark.parametrize(("value", "meant"), [(True, True), (False, False), (1, True), (0, False), (1.0, True)])
def test_flags(value: Any, meant: bool) -> None:
    assert flag(value) is meant


@pytest.mark.parametrize("value", [*NOTHING, "true", "false", "1", 2, 0.5])
def test_what_is_no_flag(value: Any) -> None:
    assert flag(value) is None
