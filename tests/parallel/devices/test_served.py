"""Weights that change, and memory that sleeps, on several devices: shards, stages, experts, ranks and replicas."""

from typing import Any

import pytest

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights.fit import checksum_of, leaves_of
from tests.engine.test_identity import ROOMY, SETTINGS
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import model_of
from tests.test_served import check_updates, of_version

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "two shards": ("few KV heads", {"tensor_parallel_size": 2}),
    "more shards than KV heads": ("one KV head", {"tensor_parallel_size": 4}),
    "two stages": ("tied", {"pipeline_parallel_size": 2}),
    "experts": ("experts", {"expert_parallel_size": 2}),
    "replicas": ("groups", {"data_parallel_size": 2}),
    "replicas of shards and stages": (
        "groups",
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("kind", SIZES)
def test_each_range_is_its_versions_own_continuation(kind):
    name, sizes = SIZES[kind]
    model = model_of(name)
    check_updates(LLM(model, **SETTINGS, num_pages=ROOMY, **sizes), model)


def test_ranks_of_data_parallel_attention(tmp_path):
    model = load_case(golden("deepseek_v3-hub"), tmp_path)
    check_updates(LLM(model, **SETTINGS, num_pages=ROOMY, expert_parallel_size=2, enable_dp_attention=True), model)


@pytest.mark.parametrize("kind", ["two shards", "two stages", "replicas"])
def test_sleep_and_wake(kind):
    name, sizes = SIZES[kind]
    model = model_of(name)
    llm = LLM(model, **SETTINGS, num_pages=ROOMY, **sizes)
    prompts, params = [list(range(9)), list(range(20, 50))], SamplingParams(temperature=0.0, max_tokens=8)

    def tokens() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = tokens()
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(model.params)
        assert tokens() == expected
    new = of_version(model, 1)
    llm.update_weights(new)
    assert tokens() != expected
    assert llm.weight_checksums() == {path: checksum_of([(path, leaf)]) for path, leaf in leaves_of(new)}
