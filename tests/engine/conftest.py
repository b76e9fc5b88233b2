"""Fixtures of the engine tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable run-time checks of signatures for tests of many steps: they take nine tenths of the time."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
