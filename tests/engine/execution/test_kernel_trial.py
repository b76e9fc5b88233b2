"""Trials of kernels before the programs that launch them are compiled: on a fake GPU, in real processes."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.compilations import Fingerprints
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution import kernel_trial
from jaxinfer.engine.execution.kernel_trial import try_kernels
from jaxinfer.engine.execution.prepare import resolve_for
from jaxinfer.parallel.mesh import make_mesh
from pallas_kernels import token_quant
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.launches import excluded, note, readmit
from pallas_kernels.token_quant import Rule
from pallas_kernels.trial import run as trials
from tests.fakes import random_model
from tests.kernels.trial.test_run import hanging, plain, wrong

SHAPE = jax.ShapeDtypeStruct((8, 64), jnp.float32)


@pytest.fixture
def gpu(monkeypatch):
    """A fake device of platform gpu; launches are tried on the CPU."""
    client = types.SimpleNamespace(platform_version="cuda 13")
    device = types.SimpleNamespace(platform="gpu", process_index=0, device_kind="NVIDIA H200", client=client)
    monkeypatch.setattr(kernel_trial, "own_devices", lambda mesh: [device])
    monkeypatch.setattr(kernel_trial.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(Fingerprints, "of", lambda self, device, function, *parts: function.__qualname__)
    patience = trials.Patience(run=3.0)
    monkeypatch.setattr(kernel_trial, "faults_of", functools.partial(trials.faults_of, patience=patience))
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield device
    jax.config.update("jax_compilation_cache_dir", kept)
    readmit()
    trials._KNOWN.clear()


@functools.cache
def engine(**settings):
    return resolve_for(random_model("float32"), EngineConfig(max_model_len=64, **settings), "cpu")


def launching(kernel):
    def program(x):
        note("token_quant", kernel, plain, x)
        return x

    program.__qualname__ = kernel.__name__
    return make_mesh(1), program, (SHAPE,)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("kernel", "why"), [(hanging, "did not come back"), (wrong, "is wrong")])
def test_a_kernel_that_fails_is_named_and_excluded(caplog, kernel, why):
    assert try_kernels([launching(plain), launching(kernel)], engine())
    assert why in excluded("token_quant")
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert warning.args[0] == "token_quant"
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    chosen = token_quant.explain(tokens, Rule("int8", 127.0), target=Target("gpu", HOPPER))
    assert (chosen.path, chosen.why) == ("xla", excluded("token_quant"))


@pytest.mark.usefixtures("gpu")
def test_kernels_that_are_right_stay():
    assert not try_kernels([launching(plain)], engine())
    assert excluded("token_quant") is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("settings", "op"), [({"kernel_trial": "error"}, "token_quant"), ({"attention_backend": "mosaic"}, "kv_write")]
)
def test_the_start_ends_where_that_is_asked_for(monkeypatch, settings, op):
    """Startup fails if ``kernel_trial`` requires it, or because the failing backend was requested by name."""
    monkeypatch.setattr(kernel_trial, "_tried", lambda programs: {op: "it hung"})
    with pytest.raises(EngineConfigError, match=f"{op} was tried on this GPU and fails: it hung"):
        try_kernels([launching(wrong)], dataclasses.replace(engine(), **settings))


@pytest.mark.usefixtures("gpu")
def test_nothing_is_tried_where_it_is_off(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_tried", lambda programs: pytest.fail("tried"))
    assert not try_kernels([launching(wrong)], engine(kernel_trial="off"))
    assert not try_kernels([], engine())


def test_nothing_is_tried_on_a_cpu(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_tried", lambda programs: pytest.fail("tried"))
    assert not try_kernels([launching(wrong)], engine())


def test_what_was_found_is_kept_between_starts(gpu, monkeypatch, tmp_path):
    """Verdicts are kept by programs and device: another program, or another GPU, is tried again."""
    tried = []
    monkeypatch.setattr(kernel_trial, "_tried", lambda programs: tried.append(programs) or {"token_quant": "it hung"})
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert all(try_kernels([launching(wrong)], engine()) for _ in range(3))
    assert len(tried) == 1
    try_kernels([launching(wrong), launching(plain)], engine())
    gpu.device_kind = "NVIDIA H100"
    try_kernels([launching(wrong)], engine())
    assert len(tried) == 3
