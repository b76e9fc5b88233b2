"""Kernel trials in child processes: right, wrong, hanging, crashing and rejected kernels, in real processes."""

import os

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.launches import Launch
from pallas_kernels.trial import run as trials
from pallas_kernels.trial.program import exported
from pallas_kernels.trial.run import Patience, run

SHAPE = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def plain(x):
    return x * 2.0


def a_little_off(x):
    return x * 2.001


def wrong(x):
    return jnp.where(jnp.arange(64) == 3, 0.0, plain(x)).at[5].multiply(1.5)


def none(x):
    return plain(x).at[7, 7].set(jnp.nan)


def hanging(x):
    """Run an endless loop, which no thread can interrupt."""
    turns = jax.lax.while_loop(lambda turn: x[0, 0] < turn + 1e30, lambda turn: turn * 0.5, x[0, 0])
    return plain(x) + turns


def programs(*kernels):
    launches = {kernel.__name__: Launch("token_quant", kernel, plain, (SHAPE,), {}) for kernel in kernels}
    return {name: exported(launch, "cpu") for name, launch in launches.items()}


def test_each_kernel_has_a_verdict_of_its_own():
    """Two kernels hang: each costs its process, and the remaining ones run in another."""
    given = programs(plain, hanging, wrong, none, a_little_off)
    given = {"first": given["plain"], **given, "again": given["hanging"], "last": given["plain"]}
    verdicts = run(given, "cpu", Patience(run=5.0))
    assert verdicts.keys() == given.keys()
    assert {name for name, verdict in verdicts.items() if verdict.fault} == {"hanging", "wrong", "none", "again"}
    assert verdicts["hanging"].fault == verdicts["again"].fault == "did not come back within 5 s"
    assert "times the error" in verdicts["wrong"].fault
    assert "inf" in verdicts["none"].fault
    assert not any(verdict.untried for verdict in verdicts.values())


def test_a_program_that_is_none_is_refused_and_the_rest_goes_on():
    verdicts = run({"broken": b"nonsense", **programs(plain)}, "cpu")
    assert verdicts["broken"].fault
    assert not verdicts["plain"].fault


CHILD = """
import json, os, sys
_, platform, folder, jobs, *names = sys.argv
def say(state, name, **more): print(json.dumps({"state": state, "name": name, **more}), flush=True)
print("noise of a library")
say("started", "")
if int(jobs) > 1 and "aborts" in names: # while several compile: nobody knows which it was
    say("compiling", names[0])
    os.abort()
for name in names:
    say("compiling", name)
    if name == "aborts": os.abort()
    if name == "large": say("refused", name, why="RESOURCE_EXHAUSTED: out of memory"); continue
    say("running", name)
    if name == "illegal": say("failed", name, why="CUDA_ERROR_ILLEGAL_ADDRESS"); sys.exit(1)
    if name == "dies": os.kill(os.getpid(), 9)
    say("done", name, error=0.5)
"""


@pytest.fixture
def stand_in(monkeypatch):
    class Popen(trials.subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([command[0], "-c", CHILD, *command[3:]], **options)

    monkeypatch.setattr(trials.subprocess, "Popen", Popen)


@pytest.mark.usefixtures("stand_in")
def test_a_process_that_dies_costs_one_program():
    names = ["a", "aborts", "b", "illegal", "c", "dies", "large", "d"]
    verdicts = run(dict.fromkeys(names, b""), "gpu")
    assert {name for name, verdict in verdicts.items() if verdict.fault} == {"aborts", "illegal", "dies"}
    assert "exit code -6" in verdicts["aborts"].fault
    assert "ILLEGAL_ADDRESS" in verdicts["illegal"].fault
    assert "exit code -9" in verdicts["dies"].fault
    assert "RESOURCE_EXHAUSTED" in verdicts["large"].untried
    assert verdicts.keys() == {*names}


def test_where_no_process_can_start_nothing_is_tried():
    """No kernel is tried where another process owns the GPU, since JAX would run on the CPU there."""
    (verdict,) = run(programs(plain), "gpu").values()
    assert verdict.fault is None
    assert "are for gpu" in verdict.untried


def test_no_process_is_left_behind():
    before = set(os.listdir("/proc"))
    run(programs(hanging), "cpu", Patience(run=1.0))
    left = [name for name in set(os.listdir("/proc")) - before if name.isdigit()]
    assert not any(b"pallas_kernels.trial" in _command(name) for name in left)


def _command(process):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
