"""Unwraps the shape checks of tests before fingerprinting: they wrap functions but are not part of programs."""

import types
from typing import Any

import pytest

from jaxinfer.compilations import fingerprints


@pytest.fixture(autouse=True)
def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fingerprints._Reader.read
    monkeypatch.setattr(fingerprints._Reader, "read", lambda self, value: real(self, unchecked(value)))


def unchecked(value: Any) -> Any:
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__") and is_check(value):
        value = value.__wrapped__
    return value


def is_check(function: types.FunctionType) -> bool:
    home = function.__globals__.get("__name__")
    return home is None or home.startswith(("jaxtyping", "beartype"))
