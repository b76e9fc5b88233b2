"""Images on several devices: tokens are those of one device, bits those of each request alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.types import Request
from tests.engine.test_images import TIGHT, alone, make_engine_of, make_requests, run
from tests.fake_vision import vision_model
from tests.parallel.devices.test_tensor import SHAPES

EXPERTS = SHAPES["experts"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"axes": True, "deep": 1}, {"tensor_parallel_size": 2}),
    "tokens shared": ({"axes": True, "deep": 1}, {"tensor_parallel_size": 2, "sequence_parallel_norms": True}),
    "pipeline": ({"axes": True, "deep": 1}, {"pipeline_parallel_size": 2}),
    "replicas": ({"bidirectional": True}, {"data_parallel_size": 2}),
    "ranks": ({"axes": True, **EXPERTS}, {"expert_parallel_size": 2, "enable_dp_attention": True}),
    "ranks, both directions": (
        {"bidirectional": True, **EXPERTS},
        {"expert_parallel_size": 2, "enable_dp_attention": True},
    ),
}


def greedy(requests: list[Request]) -> list[Request]:
    return [
        dataclasses.replace(each, params=dataclasses.replace(each.params, temperature=0.0, logprobs=None, n=1))
        for each in requests
    ]


@pytest.mark.parametrize("case", CASES)
def test_several_devices_serve_the_bits_of_each_request_alone(case):
    kind, spread = CASES[case]
    model, requests = vision_model(**kind), make_requests(9)
    engine = make_engine_of(model, num_pages=TIGHT, swap_space_gib=0.1, **spread)
    want = alone(engine, requests)
    with count_compilations() as compilations:
        assert run(engine, requests) == want
        assert run(engine, requests[::-1]) == want
    assert compilations.count == 0
    assert engine.stats().encoder_queries > 0
    one, plain = make_engine_of(model, max_prefill_rows=1, prefill_sizes=(64,)), greedy(requests)
    engine.reset_prefix_cache()
    tokens = {key: found[0] for key, found in run(engine, plain).items()}
    assert tokens == {key: found[0] for key, found in run(one, plain).items()}
