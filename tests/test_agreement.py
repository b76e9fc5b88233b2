"""Requests whose log-probabilities are compared, and differences."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.agreement import Sample, Sequences, requests
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.sampling_params import RequestError
from tests.fakes import random_model

ENGINE = EngineConfig(max_num_seqs=4, max_model_len=128, num_pages=64, page_size=16, prefill_sizes=(16, 32))


def test_samples_are_padded_on_the_right_and_taken_apart_again():
    samples = [Sample([5, 6], [7, 8], [-1.0, -2.0]), Sample([9], [4], [-3.0])]
    found = Sequences.of(samples)
    np.testing.assert_array_equal(found.tokens, [[5, 6, 7, 8], [9, 4, 0, 0]])
    np.testing.assert_array_equal(found.served, [[0, -1, -2], [-3, 0, 0]])
    assert found.parts == [(sample.prompt, sample.token_ids) for sample in samples]
    assert found.difference_from([np.array([-1.0]), np.array([-2.0, -2.5])]).largest == 0.5


def test_differences_are_those_of_generated_tokens():
    served = np.array([[0, -1.0, -2.0], [-3.0, 0, 0]], np.float32)
    sequences = Sequences(np.ones((2, 4), np.int32), np.array([2, 1]), np.array([4, 2]), served)
    shift = np.array([[9, 0.5, 0], [-0.25, 9, 9]])
    found = sequences.difference(lambda tokens, *_: np.pad(served + shift, ((0, len(tokens) - 2), (0, 0))))
    differences = np.array([0.5, 0, -0.25])
    assert (found.tokens, found.largest) == (3, 0.5)
    assert found.kl == pytest.approx(np.mean(np.exp(differences) - 1 - differences))
    assert sequences.difference(lambda tokens, *_: jnp.full((len(tokens), 3), jnp.nan)).largest == np.inf


def test_prompts_share_prefixes_and_samples_are_as_many_as_asked():
    engine, vocab = prepare(random_model(), ENGINE, "cpu").config, 97
    prompts, params = requests(engine, vocab, sequences=40, max_tokens=8, seed=1)
    assert 40 <= sum(each.n for each in params) <= 41
    assert len({prompt[0] for prompt in prompts[::3] if len(prompt) > 9}) < len(prompts[::3]) // 2
    assert {len(prompt) < 16 for prompt in prompts} == {True, False}
    with pytest.raises(RequestError) as error:
        requests(engine, vocab, sequences=1, max_tokens=128, seed=0)
    assert error.value.field == "max_tokens"
