"""Tests of the log line of an engine that is ready."""

import dataclasses

import jax
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.prepare import resolve_for
from jaxinfer.loading import abstract_model
from jaxinfer.serve.core.summary import summary


@pytest.fixture(scope="module")
def model():
    return abstract_model("demo")


def told(model, **settings) -> str:
    return summary(model, resolve_for(model, EngineConfig(**settings), "cpu"))


def test_device_weights_room_and_kernels_are_told(model, monkeypatch):
    line = told(model, max_num_seqs=4, max_model_len=1000, num_pages=100)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params))
    assert f"engine: 1 x cpu, weights {weights / 2**20:.1f} MiB, KV cache " in line
    # 16 pages of 64 tokens hold 1000: six such sequences fit into 100 pages.
    assert " for 6400 tokens: room for 6 sequences of 1000 (4 run at once), attention by xla, " in line
    assert line.endswith(f"kept in {jax.config.jax_compilation_cache_dir}")
    pages = model.cache_spec.bytes_per_page(64, model.dtype.itemsize) * 100
    assert f"KV cache {pages / 2**20:.1f} MiB" in line
    assert f"KV cache {model.cache_spec.stored_as('int8').bytes_per_page(64, 2) * 100 / 2**20:.1f} MiB" in told(
        model, num_pages=100, kv_cache_dtype="int8"
    )


def test_replicas_have_their_pools_together(model):
    config = dataclasses.replace(
        resolve_for(model, EngineConfig(max_model_len=640, num_pages=100), "cpu"),
        data_parallel_size=3,
        tensor_parallel_size=2,
    )
    assert "engine: 6 x cpu, " in summary(model, config)
    assert "for 19200 tokens: room for 30 sequences of 640" in summary(model, config)


def test_a_cache_that_is_none_and_a_backend_that_was_asked_for(model):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        line = told(model, attention_backend="xla")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert line.endswith("attention by xla, compiled programs are not kept")
