"""`TinkerClient`: samples, log-probabilities and weights, in Tinker's terms."""

import types
from collections.abc import Iterator

import numpy as np
import pytest

from jaxinfer.integrations.tinker import TinkerClient
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.weights import WeightsError, named_parameters
from tests.fakes import llama_json
from tests.integrations.rollout_llm import RolloutLLM
from tests.weights.trainers.models import assert_equal, random_model


@pytest.fixture(scope="module")
def llm() -> Iterator[RolloutLLM]:
    with RolloutLLM(random_model(llama_json())) as made:
        yield made


@pytest.fixture(scope="module")
def client(llm: RolloutLLM) -> TinkerClient:
    return TinkerClient(llm)


class ModelInput:
    def to_ints(self) -> list[int]:
        return [3, 4, 5]


def test_samples_have_tokens_and_log_probabilities(client: TinkerClient, llm: RolloutLLM):
    params = types.SimpleNamespace(max_tokens=5, temperature=1.0, top_k=-1, top_p=1.0, seed=3, stop=None)
    response = client.sample(ModelInput(), num_samples=3, sampling_params=params, include_prompt_logprobs=True)
    assert [(len(each.tokens), each.stop_reason) for each in response.sequences] == [(5, "length")] * 3
    assert len({tuple(each.tokens) for each in response.sequences}) > 1
    for each in response.sequences:
        np.testing.assert_allclose(each.logprobs, llm.logprobs([[3, 4, 5]], [each.tokens])[0], atol=1e-5)
    assert response.prompt_logprobs == client.compute_logprobs([3, 4, 5])


def test_stop_tokens_end_a_sample(client: TinkerClient):
    whole = client.sample([3, 4], sampling_params=SamplingParams(max_tokens=6, temperature=0.0)).sequences[0].tokens
    params = types.SimpleNamespace(max_tokens=6, temperature=0.0, stop=[whole[2]])
    found = client.sample([3, 4], sampling_params=params).sequences[0]
    assert (found.tokens, found.stop_reason) == (whole[: whole.index(whole[2]) + 1], "stop")


def test_log_probabilities_of_a_prompt(client: TinkerClient, llm: RolloutLLM):
    first, *others = client.compute_logprobs([3, 4, 5, 6])
    assert first is None
    assert others == llm.logprobs([[3]], [[4, 5, 6]])[0].tolist()
    assert client.compute_logprobs([3]) == [None]


def test_weights_are_served(client: TinkerClient, llm: RolloutLLM):
    other = random_model(llama_json(), seed=1)
    saved = client.save_weights_for_sampler(named_parameters(other), "step-1", version=4)
    assert (saved.path.rpartition("/")[2], saved.version, llm.weight_version) == ("step-1", 4, 4)
    assert_equal(llm.updates[-1].params, other.params)
    assert client.save_weights_for_sampler(other).path.endswith("/5")


def test_weights_that_do_not_fit_are_named(client: TinkerClient, llm: RolloutLLM):
    before = list(llm.updates)
    with pytest.raises(WeightsError) as error:
        client.save_weights_for_sampler({"model.norm.weight": np.ones(3, np.float32)})
    assert error.value.name == "model.norm.weight"
    assert llm.updates == before


def test_bad_parameters_are_named(client: TinkerClient):
    with pytest.raises(RequestError) as error:
        client.sample([3], sampling_params=types.SimpleNamespace(top_p=3.0))
    assert error.value.field == "top_p"
