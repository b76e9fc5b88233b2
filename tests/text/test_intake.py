"""Tests of request preparation: whether reasoning precedes the answer, and sampling recommended by a checkpoint."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.registry import REASONING_PARSERS
from jaxinfer.sampling_params import RequestError, SamplingLimits, SamplingParams
from jaxinfer.text.intake import Intake, recommended_sampling
from jaxinfer.types import Thinking
from tests.serve.fake_engine import VOCAB
from tests.serve.http.scripted import SPECIAL, tokenizer

TOKENS = tokenizer()
BEGIN, END = (TOKENS.token_to_id(tag) for tag in ("<think>", "</think>"))
LIMITS = SamplingLimits(grammars=True)
HELD: Any = {"structured_outputs": {"regex": "a"}}


def thinking(prompt: str, answers: bool, name: str = "qwen3", **params: Any) -> Thinking | None:
    intake = Intake(TOKENS, VOCAB + len(SPECIAL), 500, LIMITS, REASONING_PARSERS[name])
    asked = SamplingParams(max_tokens=5, **(params or HELD))
    return intake.request("a", prompt, asked, answers=answers).thinking


@pytest.mark.parametrize(
    ("prompt", "answers", "expected"),
    [
        ("Hi <think>\n", True, Thinking(BEGIN, END, True)),
        ("Hi <think>\n", False, Thinking(BEGIN, END, True)),
        ("Hi", True, Thinking(BEGIN, END, False)),
        ("Hi", False, None),
        ("Hi <think>\n\n</think>\n\n", True, None),
    ],
)
def test_a_prompt_tells_whether_there_is_a_thought(prompt, answers, expected):
    assert thinking(prompt, answers) == expected
    assert thinking(prompt, answers, thinking_token_budget=4) == expected


def test_a_model_that_begins_within_its_thought_does():
    assert thinking("Hi", True, "deepseek_r1") == Thinking(BEGIN, END, True)
    assert thinking("Hi</think>", True, "deepseek_r1") is None


def test_where_it_makes_no_difference_there_is_none():
    assert thinking("Hi", True, temperature=1.0) is None
    assert thinking("Hi", True, structured_outputs={"regex": "a", "enable_in_reasoning": True}) is None


def test_tags_that_are_no_tokens_tell_nothing():
    assert thinking("Hi", True, "mistral") is None
    with pytest.raises(RequestError, match="thinking_token_budget=3: no token is known"):
        thinking("Hi", True, "mistral", thinking_token_budget=3)


# --------------------------------------------------------------------------------------------------------------
# generation_config.json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1", "0.5", "20.0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=3,
)
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample", "max_length")


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"top_k": 20.0, "temperature": 1, "top_p": "0.9"}, {"top_k": 20, "temperature": 1.0, "top_p": 0.9}),
        ({"top_k": "50", "min_p": None, "do_sample": True}, {"top_k": 50}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"do_sample": 0}, {"temperature": 0.0}),
        ({"do_sample": 1, "eos_token_id": "x"}, {}),
        ({}, {}),
    ],
)
def test_recommended_sampling(said: dict[str, Any], read: dict[str, Any]) -> None:
    found = recommended_sampling(said)
    assert found == read
    assert [type(found[name]) for name in read] == [type(value) for value in read.values()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("top_k", 20.5), ("top_k", "many"), ("top_k", True), ("top_k", [20]), ("top_k", -2), ("top_p", 1.5)),
        *(("temperature", "hot"), ("temperature", float("nan")), ("temperature", 10**400), ("min_p", {})),
        *(("repetition_penalty", -1.0), ("do_sample", "false"), ("do_sample", 2)),
    ],
)
def test_values_that_cannot_be_recommended(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}=") as caught:
        recommended_sampling({field: value})
    assert len(str(caught.value)) < 200


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_values_are_read_or_refused(said: dict[str, Any]) -> None:
    wrong = ""
    try:
        SamplingParams(**recommended_sampling(said))
    except RequestError as error:
        wrong = error.field or "nothing"
    assert wrong == "" or wrong in said
