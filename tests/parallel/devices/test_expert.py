"""Expert parallelism: logits, tokens and the memory of each device."""

import collections
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import EngineConfigError
from jaxinfer.llm import LLM
from jaxinfer.parallel.mesh import make_mesh
from tests.engine.test_identity import ROOMY, SETTINGS, TIGHT
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tests.parallel.devices.test_tensor import COLLECTIVES, generate, greedy, model_of, same_logits

# Gated shared experts; latents, expert groups and a dense layer; norms over all heads; scaled inputs.
KINDS = (
    "deepseek_v3-hub",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *("qwen2_moe-hub", "deepseek_v2-lite-hub", "glm4_moe-hub", "minimax_m2-hub", "llama4_text-hub"),
            *("olmoe-hub", "phimoe-hub", "ernie4_5_moe-hub"),
        )
    ),
)


@pytest.mark.parametrize(
    ("expert", "tensor"),
    [(4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(2, 1), (4, 1), (2, 4)])],
)
def test_logits_are_those_of_one_device(expert, tensor):
    same_logits(model_of("experts"), make_mesh(tensor, expert=expert))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_logits_of_every_kind_of_expert(name, tensor, tmp_path):
    same_logits(load_case(golden(name), tmp_path), make_mesh(tensor, expert=2))


@pytest.mark.slow
@pytest.mark.parametrize(("expert", "tensor"), [(2, 1), (2, 2)])
def test_biases_count_once(expert, tensor):
    oss = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16}
    model = model_of("experts", **oss)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), model.params)
    same_logits(model.replace(params=noisy), make_mesh(tensor, expert=expert))


@pytest.fixture(scope="module")
def four() -> LLM:
    sizes = {"expert_parallel_size": 2, "tensor_parallel_size": 2}
    return LLM(model_of("experts"), **SETTINGS, num_pages=TIGHT, **sizes)


@pytest.mark.slow
def test_tokens_are_those_of_one_device(four):
    requests = greedy(24, four.model)
    want = generate(LLM(four.model, **SETTINGS, num_pages=ROOMY), requests)
    assert generate(four, requests) == want
    assert generate(four, requests[::-1])[::-1] == want
    assert four.engine.stats().preemptions


@pytest.mark.slow
def test_each_device_holds_its_experts_and_its_heads(four):
    params = four.engine._executor.runtimes[-1].params["layers_0"]
    layer = model_of("experts").params["layers_0"]
    parts = {shard.data.shape for shard in params["mlp"]["gate_up"].addressable_shards}
    experts, two, hidden, d = layer["mlp"]["gate_up"].shape
    assert parts == {(experts // 2, two, hidden // 2, d)}
    assert len({str(shard.index) for shard in params["mlp"]["gate_up"].addressable_shards}) == 4
    d, kv_heads, *rest = layer["attention"]["qkv"].shape
    assert {shard.data.shape for shard in params["attention"]["qkv"].addressable_shards} == {(d, kv_heads // 4, *rest)}
    assert params["mlp"]["router"].sharding.is_fully_replicated


@pytest.mark.slow
def test_a_decode_step_has_two_sums_a_layer(four):
    found = collections.Counter(re.findall(COLLECTIVES, four.engine._executor.runtimes[-1].run.widest_decode.as_text()))
    assert found == {"all-reduce": 2 * 2 + 1, "all-gather": 1}


@pytest.mark.parametrize(
    ("name", "sizes", "sentence"),
    [
        ("groups", {"expert_parallel_size": 2}, "expert_parallel_size = 2 cannot be: the model has no experts"),
        (
            "experts",
            {"expert_parallel_size": 8},
            "8 x 1 cannot be: 8 devices do not divide the 4 expert of layers_0",
        ),
        (
            "experts",
            {"expert_parallel_size": 4, "tensor_parallel_size": 4},
            "expert_parallel_size x tensor_parallel_size = 4 x 4 needs 16 devices, and there are 8",
        ),
    ],
)
def test_impossible_sums_are_refused_with_the_arithmetic(name, sizes, sentence):
    with pytest.raises(EngineConfigError, match=sentence):
        LLM(model_of(name), **SETTINGS, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("expert", "tensor"), [(2, 1), (4, 1), (4, 2)])
def test_200_requests_have_the_tokens_of_one_device(expert, tensor):
    model = model_of("experts")
    requests = greedy(200, model)
    want = generate(LLM(model, **SETTINGS, num_pages=ROOMY), requests)
    sizes: dict[str, Any] = {"expert_parallel_size": expert, "tensor_parallel_size": tensor}
    llm = LLM(model, **SETTINGS, num_pages=TIGHT, **sizes)
    assert generate(llm, requests) == want
    assert generate(llm, requests[::-1])[::-1] == want
    assert llm.engine.stats().prefix_hits > 0
