"""Tests with third-party routers, proxies and orchestrators in front of replicas, run by `make test-fleet`."""

import pytest

pytest.register_assert_rewrite("tests.fleet.gates", "tests.fleet.rolling", "tests.fleet.tls")
