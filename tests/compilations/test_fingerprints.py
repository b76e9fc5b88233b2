"""Digests of programs: equal in every process, and different for every change that changes the program."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import Fingerprints, fingerprints
from jaxinfer.layers import norm
from jaxinfer.models.families import llama
from jaxinfer.models.model import abstract
from jaxinfer.quant import dispatch
from tests.compilations import functions
from tests.compilations.functions import Layer, Shift, scaled
from tests.compilations.jobs import digest, jobs_of
from tests.compilations.variants import llama as small
from tests.models.test_families import ROWS
from tests.models.test_parity import golden

X = jax.ShapeDtypeStruct((2, 3), np.float32)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the module `functions` as jaxinfer's own code."""
    monkeypatch.setattr(fingerprints, "_OWN", ("jaxinfer", "pallas_kernels", "tests"))


def of(function: Callable[..., Any], *parts: Any) -> str | None:
    return Fingerprints().of(jax.devices()[0], function, *(parts or (X,)))


# In a separate process, because the shape checks of tests are code, too.
SCRIPT = """
import hashlib, json
from jaxinfer.compilations import Fingerprints
from tests.compilations.jobs import digest, jobs_of, program
from tests.compilations.variants import VARIANTS

prints = Fingerprints()
print(json.dumps([
    [variant, name, digest(job, prints), hashlib.sha256(program(job).encode()).hexdigest() if TRACE else None]
    for variant, (make, settings) in VARIANTS.items()
    for name, job in jobs_of(make(), **settings).items()
]))
"""


def told(repo: pathlib.Path, seed: str, trace: bool) -> list[tuple[str, str, str | None, str]]:
    """Return variant, name, digest and (if ``trace``) jaxpr hash of each program."""
    command = [sys.executable, "-c", SCRIPT.replace("TRACE", str(trace))]
    variables = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(command, cwd=repo, env=variables, capture_output=True, text=True, check=True)
    return [tuple(row) for row in json.loads(done.stdout)]


def test_equal_digests_are_of_equal_programs_in_every_process(repo: pathlib.Path) -> None:
    found, programs = told(repo, "1", trace=True), dict[str, str]()
    for variant, name, known, program in found:
        assert known is not None, (variant, name)
        assert programs.setdefault(known, program) == program, (variant, name)
    assert len(programs) > 60
    assert [row[:3] for row in told(repo, "2", trace=False)] == [row[:3] for row in found]


def test_code_of_every_family_is_known() -> None:
    prints = Fingerprints()
    for kind, case in ROWS.items():
        for name, job in jobs_of(abstract(golden(case).config, "float32"), num_pages=64).items():
            assert digest(job, prints) is not None, (kind, name)


CHANGED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a constant of a module": lambda patch: patch.setattr(functions, "FACTOR", 3.0),
    "a function of a module": lambda patch: patch.setattr(functions, "helper", functions.other_helper),
    "code": lambda patch: patch.setattr(functions.helper, "__code__", functions.other_helper.__code__),
    "an entry of a table": lambda patch: patch.setitem(functions.BY_NAME, "up", jnp.subtract),
    "a method": lambda patch: patch.setattr(Shift, "__call__", lambda self, x: x - self.by),
    "a property": lambda patch: patch.setattr(Shift, "twice", functools.cached_property(lambda self: 3 * self.by)),
    "what a decorator holds": lambda patch: patch.setattr(functions, "jitted", jax.jit(functions.other_helper)),
    "a default": lambda patch: patch.setattr(functions.scaled, "__defaults__", (1, 2, 3)),
    "a layer's code": lambda patch: patch.setattr(Layer, "__call__", lambda self, x: x),
    "a setting of JAX": lambda patch: patch.setenv("XLA_FLAGS_OF_TESTS", "1"),
    "files": lambda patch: patch.setattr(fingerprints, "sources", lambda: "other files"),
}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("change", CHANGED)
def test_what_is_changed_in_place_is_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    function = scaled()
    before = of(function)
    assert of(function) == before is not None
    with monkeypatch.context() as patch:
        CHANGED[change](patch)
        assert of(function) != before
    assert of(function) == before


def test_programs_of_another_kind_of_device_are_others() -> None:
    """An H100 and an H200 have the same machine code and driver, but kernels have different tiles."""

    def digest_for(kind: str) -> str | None:
        client = types.SimpleNamespace(platform_version="cuda 13000")
        device: Any = types.SimpleNamespace(client=client, device_kind=kind, platform="gpu")
        return Fingerprints().of(device, norm.RMSNorm(3).apply, X)

    first, second, again = map(digest_for, ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    assert first == again != second
    assert None not in (first, second)


@pytest.mark.usefixtures("own")
def test_what_a_function_closes_over_is_seen() -> None:
    table = np.zeros((2, 3), np.float32)
    others = [
        scaled(),
        scaled(table),
        scaled(table.astype(np.float16)),
        scaled(factor=3),
        scaled(factor=3.0),
        scaled(factor=np.float32(3)),
        scaled(shift=Shift(2.0)),
        scaled(shift=functions.helper),
        scaled(shift=functools.partial(jnp.add, 1)),
        scaled(shift=functools.partial(jnp.add, 2)),
        scaled(shift=Layer(3).apply),
        scaled(shift=Layer(4).apply),
    ]
    digests = [of(function) for function in others]
    assert None not in digests
    assert len(set(digests)) == len(others)


@pytest.mark.usefixtures("own")
def test_arguments_and_the_context_are_seen() -> None:
    function, wide = scaled(), jax.ShapeDtypeStruct((2, 4), np.float32)
    digests = [of(function), of(function, wide), of(function, X, 0), of(function, [X]), of(function, {"a": X})]
    digests.append(of(function, jax.ShapeDtypeStruct((2, 3), np.float16)))
    digests.append(of(function, jax.ShapeDtypeStruct((2, 3), np.float32, weak_type=True)))
    with jax.default_matmul_precision("float32"):
        digests.append(of(function))
    assert None not in digests
    assert len(set(digests)) == 8


def test_what_is_somebody_elses_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of this test file counts as user code."""
    job = jobs_of(small())["decode"]
    known = digest(job, Fingerprints())
    assert known is not None

    class Mine(llama.Llama):
        pass

    model = small()
    mine = model.replace(module=Mine(model.module.config))
    assert digest(jobs_of(mine)["decode"], Fingerprints()) is None
    with monkeypatch.context() as patch:
        patch.setattr(norm, "unit_rms", lambda x, eps: x)
        assert digest(job, Fingerprints()) is None
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "matmul", dispatch.matmul_transposed)
        assert digest(job, Fingerprints()) not in (known, None)
    assert digest(job, Fingerprints()) == known
