"""Fixtures of the whole suite."""

import os
import pathlib

import pytest

import tests.typecheck  # noqa: F401  jaxtyping imports `tests` alone and then looks the checker up in it

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    """The root of the source tree."""
    return REPO


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """The folder of real inputs: ``$JAXINFER_TEST_DATA``, else ``../shared/data``. Skips where it is absent."""
    asked = os.environ.get("JAXINFER_TEST_DATA")
    folder = pathlib.Path(asked) if asked else REPO.parent / "shared" / "data"
    if asked and not folder.is_dir():
        pytest.fail(f"JAXINFER_TEST_DATA={asked} is not a folder")
    if not folder.is_dir():
        pytest.skip("no test data: put it at ../shared/data or set JAXINFER_TEST_DATA")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_gpu():
        pytest.skip("needs an NVIDIA GPU that jax can use")


def _has_gpu() -> bool:
    import jax  # the host-only tests run without it

    return jax.default_backend() == "gpu"
