"""Tests of the conditions under which a replica is declared unhealthy."""

import pytest

from jaxinfer.integrations.replicas.health import Patience, UnhealthyError
from jaxinfer.serve.core.supervisor import DEAD, READY, STARTING, STOPPED


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_has_time_to_come_back_each_time() -> None:
    clock = Clock()
    patience = Patience(10.0, clock)
    for _ in range(3):
        patience.look(READY, None)
        patience.look(DEAD, None)
        clock.now += 9.0
        patience.look(STARTING, None)
    patience.look(READY, None)


def test_one_that_does_not_come_back_is_given_up() -> None:
    clock = Clock()
    patience = Patience(10.0, clock)
    patience.look(DEAD, None)
    clock.now = 10.0
    patience.look(STARTING, None)
    clock.now = 10.1
    with pytest.raises(UnhealthyError, match="the engine is starting, and was not ready for 10 s"):
        patience.look(STARTING, None)


def test_what_no_restart_mends_is_given_up_at_once() -> None:
    with pytest.raises(UnhealthyError, match="process 1: it is gone"):
        Patience(10.0, Clock()).look(READY, "process 1: it is gone")
    with pytest.raises(UnhealthyError, match="no memory"):
        Patience(10.0, Clock()).look(STOPPED, "no memory")
