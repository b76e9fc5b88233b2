"""Requests of token ids: whether a thought is in front of the answer."""

import pytest

from jaxinfer.parsers.registry import REASONING_PARSERS
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.text.intake import Intake
from jaxinfer.types import Thinking
from jaxinfer.validate import SamplingLimits
from tests.serve.fake_engine import VOCAB
from tests.serve.http.scripted import SPECIAL, tokenizer

TOKENS = tokenizer()
BEGIN, END = (TOKENS.token_to_id(tag) for tag in ("<think>", "</think>"))
LIMITS = SamplingLimits(grammars=True)
HELD = {"structured_outputs": {"regex": "a"}}


def thinking(prompt: str, answers: bool, name: str = "qwen3", **params: object) -> Thinking | None:
    intake = Intake(TOKENS, VOCAB + len(SPECIAL), 500, LIMITS, REASONING_PARSERS[name])
    given = SamplingParams(max_tokens=5, **(params or HELD))  # type: ignore[arg-type]
    return intake.request("a", prompt, given, answers=answers).thinking


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
