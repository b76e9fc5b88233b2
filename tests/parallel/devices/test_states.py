"""Layers with states over devices: heads are dealt out, and what groups of heads share lies whole on each."""

import pathlib
from typing import Any

import pytest

from jaxinfer import LLM
from jaxinfer.engine.execution.placement import device_bytes
from jaxinfer.kv.pool import StatePool
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling_params import SamplingParams
from tests.models.parity import TOP, load_case, served_faults
from tests.models.test_parity import golden
from tests.parallel.devices.test_families import cases
from tests.parallel.devices.test_tensor import same_logits

MAMBA = ("granitemoehybrid-hub", "nemotron_h-hub", "falcon_h1-hub")


@pytest.mark.parametrize("name", cases(*MAMBA, "granitemoehybrid-dense-rope-biases-groups", fast="falcon_h1-hub"))
def test_heads_of_mamba(name: str, tmp_path: pathlib.Path):
    """Over more devices than there are groups."""
    same_logits(load_case(golden(name), tmp_path), make_mesh(2))


@pytest.mark.parametrize("name", cases(*MAMBA, fast="nemotron_h-hub"))
def test_served_over_devices(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 256, "page_size": 16, "prefill_sizes": (32,)}
    llm = LLM(load_case(case, tmp_path), tensor_parallel_size=4, **settings)
    (part,) = llm.engine._executor.runtimes
    held = device_bytes([pool.states for pool in part.pools if isinstance(pool, StatePool)])
    cache, engine = llm.model.cache_spec, llm.engine._executor._engine
    assert held == cache.bytes_per_state(4, 4) * engine.num_states
    params = SamplingParams(
        temperature=0.0, max_tokens=len(case.greedy), logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True
    )
    assert served_faults(case, llm.generate([case.prompt], params)[0]) == []
