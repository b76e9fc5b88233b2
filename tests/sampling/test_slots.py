"""The host's copy of the slots, and admission."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.engine.scheduling.sequence import needs_sampler_state
from jaxinfer.sampling import HostSlots, SamplingLimits, admit, neutral_slots, new_state
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

LIMITS = SamplingLimits(max_stop_ids=4, max_bad_words=3, max_bad_word_tokens=3, max_logprobs=5)
FULL = Request(
    "full",
    (1, 2, 2),
    SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        top_n_sigma=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=2.0,
        seed=(3 << 32) + 4,
        logit_bias={5: 2.0, 6: -1.0},
        allowed_token_ids=[5, 8],
        min_tokens=2,
        logprobs=0,
        speculation={"acceptance": "typical"},
        structured_outputs={"regex": "a"},
    ),
    stop_token_ids=frozenset({9, 3}),
    bad_words_ids=((4,), (1, 2, 3)),
)
PLAIN = Request("plain", (1,), SamplingParams(seed=1))


def test_set_writes_one_slot() -> None:
    host = HostSlots(3, LIMITS)
    host.set(1, FULL, sample_index=6)
    got, neutral = host.snapshot(), neutral_slots(3, LIMITS)
    for have, untouched in zip(got, neutral, strict=True):
        np.testing.assert_array_equal(have[[0, 2]], untouched[[0, 2]])
        assert (have.shape, have.dtype) == (untouched.shape, untouched.dtype)
    assert {name: array[1].tolist() for name, array in got._asdict().items()} == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "top_n_sigma": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 2.0,
        "seed": [3, 4],
        "sample_index": 6,
        "has_bias": True,
        "stop_ids": [3, 9, -1, -1],
        "min_tokens": 2,
        "bad_words": [[-1, -1, 4], [1, 2, 3], [-1, -1, -1]],
        "logprobs": True,
        "typical": True,
        "constrained": True,
    }


def test_a_new_request_leaves_nothing_of_the_old_one() -> None:
    used, fresh = HostSlots(2, LIMITS), HostSlots(2, LIMITS)
    used.set(0, FULL)
    used.set(0, PLAIN)
    fresh.set(0, PLAIN)
    for have, want in zip(used.snapshot(), fresh.snapshot(), strict=True):
        np.testing.assert_array_equal(have, want)
    used.clear(0)
    for have, want in zip(used.snapshot(), neutral_slots(2, LIMITS), strict=True):
        np.testing.assert_array_equal(have, want)


def test_a_snapshot_stays_as_it_was() -> None:
    host = HostSlots(2, LIMITS)
    host.set(0, FULL)
    first = host.snapshot()
    assert host.snapshot() is first
    host.set(0, PLAIN)
    assert float(first.temperature[0]) == 0.5
    assert float(host.snapshot().temperature[0]) == 1.0


def test_an_unresolved_seed_is_an_error() -> None:
    request = dataclasses.replace(PLAIN, params=SamplingParams())
    with pytest.raises(ValueError, match="request plain: the seed must be resolved"):
        HostSlots(1, LIMITS).set(0, request)


@pytest.mark.parametrize(
    ("asked", "words", "needed"),
    [
        ({}, (), False),
        ({"temperature": 0.3, "top_k": 4, "min_tokens": 3, "logit_bias": {}}, ((4,),), False),
        ({"presence_penalty": 0.1}, (), True),
        ({"frequency_penalty": -0.1}, (), True),
        ({"repetition_penalty": 1.1}, (), True),
        ({"logit_bias": {1: 1.0}}, (), True),
        ({"allowed_token_ids": [1]}, (), True),
        ({}, ((4,), (4, 5)), True),
    ],
)
def test_needs_state(asked: dict, words: tuple[tuple[int, ...], ...], needed: bool) -> None:
    request = Request("r", (1,), SamplingParams(**asked), bad_words_ids=words)
    assert needs_sampler_state(request) is needed


def test_admission_resets_one_slot() -> None:
    used = jax.tree.map(lambda x: np.ones_like(x), new_state(3, 10, LIMITS))
    got = jax.jit(admit)(used, np.int32(1), *HostSlots.state_rows(FULL, 10))
    for have, before in zip(got, used, strict=True):
        np.testing.assert_array_equal(np.asarray(have)[[0, 2]], before[[0, 2]])
    inf = np.inf
    assert np.asarray(got.counts)[1].tolist() == [0] * 10
    assert np.flatnonzero(np.asarray(got.prompt)[1]).tolist() == [1, 2]
    assert np.asarray(got.bias)[1].tolist() == [-inf, -inf, -inf, -inf, -inf, 2.0, -inf, -inf, 0.0, -inf]
    assert np.asarray(got.recent)[1].tolist() == [-1, -1]


def test_state_rows_without_bias_are_neutral() -> None:
    prompt, bias = HostSlots.state_rows(PLAIN, 4)
    assert prompt.tolist() == [False, True, False, False]
    assert bias.tolist() == [0, 0, 0, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [1e-300, 1e300])
def test_values_beyond_float32_stay_positive_and_finite(value: float) -> None:
    host, asked = HostSlots(1, LIMITS), {"temperature": value, "repetition_penalty": value, "top_p": min(value, 1.0)}
    host.set(0, Request("r", (1,), SamplingParams(seed=0, top_k=10**12, **asked)))
    got = host.snapshot()
    assert np.isfinite([got.temperature, got.repetition_penalty, got.top_p]).all()
    assert (got.repetition_penalty > 0) & (got.top_p > 0) & (got.top_k > 10**9)


def test_only_what_changed_is_a_new_array() -> None:
    host = HostSlots(3, LIMITS)
    neutral = host.snapshot()
    host.set(1, dataclasses.replace(PLAIN, params=dataclasses.replace(PLAIN.params, seed=5, temperature=0.25)))
    first = host.snapshot()
    host.set(2, dataclasses.replace(PLAIN, params=dataclasses.replace(PLAIN.params, seed=6, temperature=0.25)))
    host.set(2, dataclasses.replace(PLAIN, params=dataclasses.replace(PLAIN.params, seed=6, temperature=0.25)))
    second = host.snapshot()
    changed = [name for name, a, b in zip(first._fields, first, second, strict=True) if a is not b]
    assert set(changed) <= {"seed", "temperature", "top_p", "stop_ids", "min_tokens"}
    assert "seed" in changed
    assert "bad_words" not in changed
    for name in changed:
        assert not np.array_equal(getattr(first, name), getattr(second, name))
        assert not np.shares_memory(getattr(first, name), getattr(second, name))
    assert neutral.temperature.tolist() == [0, 0, 0]
