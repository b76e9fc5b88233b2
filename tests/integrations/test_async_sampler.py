"""`JaxinferAsyncSampler`: requests served together, and rounds of weight synchronisation. Needs no tunix."""

import asyncio
import types
from collections.abc import Coroutine, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.integrations.async_sampler import JaxinferAsyncSampler, LoadInfo, SamplingResponse
from jaxinfer.integrations.rounds import StaleRoundError
from jaxinfer.weights import WeightsError, named_parameters
from tests.fakes import llama_json
from tests.integrations.rollout_llm import RolloutLLM
from tests.weights.trainers.models import assert_equal, random_model


@pytest.fixture(scope="module")
def served() -> Iterator[RolloutLLM]:
    with RolloutLLM(random_model(llama_json())) as made:
        yield made


@pytest.fixture
def llm(served: RolloutLLM) -> RolloutLLM:
    served.updates.clear()
    served.resume()
    served.engine.weight_version = 0
    return served


@pytest.fixture
def sampler(llm: RolloutLLM) -> JaxinferAsyncSampler:
    return JaxinferAsyncSampler(llm)


def run(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines one after another."""

    async def all_of_them() -> list[Any]:
        return [await each for each in work]

    return asyncio.run(all_of_them())


def request(prompt: Any, **params: Any) -> Any:
    """Return a request as tunix makes one."""
    given = types.SimpleNamespace(max_tokens=4, temperature=0.0, **params)
    return types.SimpleNamespace(request_id="r", metadata={"a": 1}, prompt=prompt, sampling_params=given)


def sync(uuid: int, weights: Any = None, version: int = 1) -> Any:
    """Return a request of a round of synchronisation."""
    extra = {"req_id": f"round {uuid}", "uuid": uuid}
    return types.SimpleNamespace(policy_version=version, source_metadata=weights, extra_config=extra)


def test_a_response_has_arrays_of_tokens_and_log_probabilities(sampler: JaxinferAsyncSampler, llm: RolloutLLM):
    before, response = run(sampler.sample(request([6, 7])), sampler.sample(request([3, 4, 5])))
    assert before.prompt_token_ids.tolist() == [6, 7]
    assert isinstance(response, SamplingResponse)
    assert (response.request_id, response.metadata, response.finish_reason) == ("r", {"a": 1}, "length")
    assert response.prompt_token_ids.tolist() == [3, 4, 5]
    assert (response.token_ids.dtype, response.token_ids.shape) == (np.int32, (4,))
    (expected,) = llm.logprobs([[3, 4, 5]], [response.token_ids.tolist()])
    np.testing.assert_allclose(response.logprobs, expected, atol=1e-5)


def test_calls_that_come_together_are_one_batch(
    sampler: JaxinferAsyncSampler, llm: RolloutLLM, monkeypatch: pytest.MonkeyPatch
):
    batches: list[int] = []
    generate = llm.generate

    def counted(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(len(prompts))
        return generate(prompts, *args, **kwargs)

    monkeypatch.setattr(llm, "generate", counted)

    async def together() -> list[Any]:
        calls = [sampler.sample([request([3, 4]), request([5])]), sampler.sample(request([6, 7]))]
        return await asyncio.gather(*calls)

    several, one = asyncio.run(together())
    assert batches == [3]
    assert [each.prompt_token_ids.tolist() for each in (*several, one)] == [[3, 4], [5], [6, 7]]


def test_a_request_that_is_rejected_has_its_error_alone(sampler: JaxinferAsyncSampler):
    requests = [request([3]), request([10_000]), request([3], beam_size=4), request("text"), request([4], top_p=7.0)]
    ((*found,),) = run(sampler.sample(requests))
    assert [each.finish_reason for each in found] == ["length", "error", "error", "error", "error"]
    fields = [each.error.field for each in found[2:]]
    assert fields == ["beam_size", "prompt", "top_p"]


def test_a_round_publishes_once(sampler: JaxinferAsyncSampler, llm: RolloutLLM):
    other = random_model(llama_json(), seed=1)
    one = sync(1, dict(named_parameters(other)), version=7)

    async def whole() -> None:
        await sampler.bind_weight_sync()
        for _ in range(2):  # every call may be repeated
            await sampler.pre_weight_sync(one)
        assert llm.paused == "wait"
        for _ in range(2):
            await sampler.weight_sync(one)
        assert not llm.updates
        status = await sampler.get_weight_sync_status()
        assert (status["phase"], status["policy_version"], status["serving_version"]) == ("h2d_done", 7, 0)
        for _ in range(2):
            await sampler.post_weight_sync(one)

    run(whole())
    assert [update.version for update in llm.updates] == [7]
    assert_equal(llm.updates[0].params, other.params)
    assert llm.paused is None
    (status,) = run(sampler.get_weight_sync_status())
    expected = {"req_id": "round 1", "uuid": 1, "phase": "committed", "policy_version": 7, "serving_version": 7}
    assert status == expected
    run(sampler.abort_weight_sync(one))  # comes too late
    assert run(sampler.get_weight_sync_status())[0]["phase"] == "committed"


def test_a_failure_between_publishing_and_resuming_is_repaired(
    sampler: JaxinferAsyncSampler, llm: RolloutLLM, monkeypatch: pytest.MonkeyPatch
):
    one = sync(1, llm.model)
    run(sampler.pre_weight_sync(one), sampler.weight_sync(one))
    with monkeypatch.context() as broken:
        broken.setattr(llm, "resume", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(sampler.post_weight_sync(one))
    run(sampler.post_weight_sync(one))
    assert (len(llm.updates), llm.paused) == (1, None)


def test_an_aborted_round_changes_nothing(sampler: JaxinferAsyncSampler, llm: RolloutLLM):
    one = sync(1, random_model(llama_json(), seed=1))
    run(sampler.pre_weight_sync(one), sampler.weight_sync(one))
    run(sampler.abort_weight_sync(one), sampler.abort_weight_sync(one))
    assert (llm.updates, llm.paused) == ([], None)
    with pytest.raises(StaleRoundError):
        run(sampler.post_weight_sync(one))
    two = sync(2, llm.model)
    run(sampler.pre_weight_sync(two), sampler.weight_sync(two), sampler.post_weight_sync(two))
    assert len(llm.updates) == 1


def test_weights_that_do_not_fit_leave_the_round_open(sampler: JaxinferAsyncSampler, llm: RolloutLLM):
    tensors = dict(named_parameters(llm.model))
    one = sync(1, {**tensors, "more": tensors["model.norm.weight"]})
    with pytest.raises(WeightsError) as error:
        run(sampler.pre_weight_sync(one), sampler.weight_sync(one))
    assert error.value.name == "more"
    with pytest.raises(StaleRoundError):
        run(sampler.post_weight_sync(one))
    run(sampler.abort_weight_sync(one))
    assert (llm.updates, llm.paused) == ([], None)


def test_weights_may_come_from_a_function(llm: RolloutLLM):
    asked: list[Any] = []

    def weights(given: Any) -> Any:
        asked.append(given)
        return llm.model.params

    sampler = JaxinferAsyncSampler(llm, weights, mode="keep")
    for version in (1, 2):  # without a key of its own, the version is that of the round
        one = types.SimpleNamespace(policy_version=version)
        run(sampler.pre_weight_sync(one))
        assert llm.paused == "keep"
        run(sampler.weight_sync(one), sampler.post_weight_sync(one))
        assert asked[-1] is one
    assert [update.version for update in llm.updates] == [1, 2]


def test_pause_resume_and_load(sampler: JaxinferAsyncSampler, llm: RolloutLLM):
    run(sampler.pause())
    assert llm.paused == "wait"
    run(sampler.resume())
    assert llm.paused is None
    load, metadata, mesh = run(sampler.get_load_info(), sampler.get_weight_sync_metadata(), sampler.get_mesh())
    assert isinstance(load, LoadInfo)
    assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)
    assert metadata["model.layers.0.self_attn.k_proj.weight"] == (16, 32)
    assert mesh is None or isinstance(mesh, jax.sharding.Mesh)
