"""Weights in host memory over several devices, and a tensor-parallel size chosen from the devices."""

import jax
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.placement import with_tensor_size
from jaxinfer.llm import LLM
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.sampling_params import SamplingParams
from tests.fakes import random_model
from tests.models.test_sparse import FAMILIES

SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "prefill_sizes": (16,), "num_pages": 16}
PROMPTS = [[(7 * number + place * place) % 97 for place in range(5 + 20 * number)] for number in range(2)]


def generated(llm):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(PROMPTS, params)]


def runtimes(llm):
    engines = getattr(llm.engine, "_engines", [llm.engine])
    return [runtime for engine in engines for runtime in engine._executor.runtimes]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (None, {"tensor_parallel_size": 2}),
        (None, {"pipeline_parallel_size": 2}),
        (None, {"data_parallel_size": 2}),
        ("mixtral", {"expert_parallel_size": 2, "tensor_parallel_size": 2}),
        (None, {"tensor_parallel_size": 2, "sequence_parallel_norms": True}),
    ],
    ids=str,
)
def test_results_have_the_bits_of_weights_on_the_devices(family, sizes):
    model = random_model(**FAMILIES.get(family, {}), num_hidden_layers=4)
    llm = LLM(model, **SETTINGS, **sizes, weight_offload_gib=100.0)
    for runtime in runtimes(llm):
        assert device_bytes(runtime.params, page_locked=True) > device_bytes(runtime.params) / 2
    assert generated(llm) == generated(LLM(model, **SETTINGS, **sizes))


@pytest.mark.parametrize(
    ("changes", "heads", "count", "size"),
    [
        ({}, (4, 2), 8, 4),
        ({}, (4, 2), 6, 2),
        ({}, (4, 2), 3, 1),
        ({}, (8, 8), 8, 8),
        ({"pipeline_parallel_size": 2}, (8, 8), 8, 4),
        ({"data_parallel_size": 4}, (8, 8), 8, 2),
        ({"tensor_parallel_size": 2}, (8, 8), 8, 2),
    ],
)
def test_a_size_is_chosen_from_the_devices(changes, heads, count, size):
    config = EngineConfig(**{"tensor_parallel_size": 0, **changes})
    model = random_model(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    assert with_tensor_size(config, model, jax.devices()[:count]).tensor_parallel_size == size


def test_an_engine_takes_the_devices_present():
    llm = LLM(random_model(), **SETTINGS, tensor_parallel_size="auto")
    assert llm.engine.config.tensor_parallel_size == 4
