"""8-bit KV caches on several devices: scales are sharded with their heads."""

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.parallel.arrays import device_bytes
from tests.engine.test_identity import ROOMY, SETTINGS, TIGHT
from tests.parallel.devices.test_pipeline import spread_llm
from tests.parallel.devices.test_tensor import generate, greedy, model_of

DP_ATTENTION = {"expert_parallel_size": 2, "enable_dp_attention": True}
TENSOR, STAGE, DATA = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "pipeline", "data"))
SLOW = [
    ("fp8", {**TENSOR, **STAGE}),
    ("int8", {**TENSOR, **STAGE, **DATA}),
    ("fp8", {"tensor_parallel_size": 4}),  # copies of KV heads
    ("int8", DP_ATTENTION),
]


@pytest.mark.parametrize(
    ("kind", "sizes"), [pytest.param(*each, marks=pytest.mark.slow) for each in (("int8", TENSOR), *SLOW)]
)
def test_tokens_are_those_of_one_device(kind, sizes, monkeypatch):
    """Few pages force swaps."""
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    model = model_of("experts" if sizes == DP_ATTENTION else "few KV heads")
    requests = greedy(20, model)
    want = generate(spread_llm(model, num_pages=ROOMY, kv_cache_dtype=kind), requests)
    llm = spread_llm(model, kv_cache_dtype=kind, **sizes)
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    stats = llm.engine.stats()
    assert stats.preemptions.get("swap", 0) > 0
    assert stats.prefix_hits > 0
    assert not stats.compilations
    if sizes == TENSOR:
        (part,) = llm.engine._executor.runtimes
        assert {shard.data.shape for shard in part.pools[0].scales.addressable_shards} == {(TIGHT, 2, 1, 16)}
        config = EngineConfig(**SETTINGS, **sizes, num_pages=TIGHT, kv_cache_dtype=kind)
        assert plan_engine(model, config, "cpu").needs.page * TIGHT == device_bytes(part.pools)
