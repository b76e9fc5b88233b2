"""Fixtures of the engine's tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run-time checks of signatures, for tests of very many steps: they take nine tenths of the time."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
