"""Unit tests of the request validator: every bound is inclusive, and the precedence of values."""

import dataclasses

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.admission import check_prompt, check_terms, request_id_of, sampling_of
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation, ServeLimits
from tests.serve.fake_engine import VOCAB, fake_card

CARD = fake_card()
LIMITS = ServeLimits(
    n=3,
    logprobs=2,
    stop_strings=2,
    stop_characters=4,
    stop_token_ids=2,
    bad_words=2,
    logit_bias=2,
    prompt_characters=10,
)


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("n", 3, 4),
        ("logprobs", 2, 3),
        ("prompt_logprobs", 2, 3),
        ("stop", ["a", "b"], ["a", "b", "c"]),
        ("stop", "abcd", "abcde"),
        ("stop", ["a", "abcd"], ["a", "abcde"]),
        ("stop_token_ids", [1, 2], [1, 2, 3]),
        ("bad_words", ["a", "b"], ["a", "b", "c"]),
        ("bad_words", ["a", "abcd"], ["a", "abcde"]),
        ("logit_bias", {1: 0.0, 2: 0.0}, {1: 0.0, 2: 0.0, 3: 0.0}),
        ("allowed_token_ids", [1] * VOCAB, [1] * (VOCAB + 1)),
    ],
)
def test_a_bound_on_sampling_is_the_last_value_that_is_taken(field, most, more):
    sampling_of(Call("", {field: most}), CARD, LIMITS)
    with pytest.raises(RequestError, match=rf"^{field}[ =]"):
        sampling_of(Call("", {field: more}), CARD, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "more"),
    [
        ("x" * 10, "x" * 11),
        (Conversation([{"role": "user!!"}]), Conversation([{"role": "user!!!"}])),
        (Conversation([{"role": ["a", ("b",)]}]), Conversation([{"role": ["a", ("b" * 6,)]}])),
        (Conversation([], tools=[{"name": "x" * 6}]), Conversation([], tools=[{"name": "x" * 7}])),
        (Conversation([], variables={"name": "x" * 6}), Conversation([], variables={"name": "x" * 7})),
        (Conversation([], template="x" * 10), Conversation([], template="x" * 11)),
    ],
)
def test_all_characters_of_a_prompt_count(prompt, more):
    check_prompt(prompt, LIMITS, allow_templates=True)
    with pytest.raises(RequestError, match=r"must have at most 10 characters, not 1[12]"):
        check_prompt(more, LIMITS, allow_templates=True)


def test_a_clients_value_goes_before_the_models_and_that_before_ours():
    card = dataclasses.replace(CARD, defaults={"temperature": 0.6, "top_k": 40})
    params = sampling_of(Call("", {"temperature": 0.0, "top_k": None}), card, LIMITS)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, 40, 1.0, None)


def test_bounds_on_terms():
    check_terms(Call("", timeout=1e-9, priority=-(2**31), cache_salt="x" * 256))
    for timeout in (0, -0.0, -1):
        with pytest.raises(ServeError) as caught:
            check_terms(Call("", timeout=timeout))
        assert caught.value.kind is Kind.DEADLINE
    for field, value in (("priority", -(2**31) - 1), ("cache_salt", "x" * 257)):
        with pytest.raises(RequestError, match=f"^{field}="):
            check_terms(Call("", **{field: value}))
    assert request_id_of(Call("", request_id="x" * 128)) == "x" * 128
    assert request_id_of(Call("")) != request_id_of(Call(""))
