"""Tests of the fields of one output in cases that the fake engine lacks: equal token texts, impossible tokens."""

import json
import math

import pytest

from jaxinfer.serve.http.choices import LOWEST_LOGPROB, ChatChoice, ResponseFields, TextChoice
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs, TokenLogprob


class Words:
    """A tokenizer in which tokens 1 and 2 have the same text; token 9 is special."""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return {1: b"\xc3", 2: b"\xa9", 3: b"c", 9: b"<s>"}[token]


def position(*candidates: tuple[int, float]) -> PositionLogprobs:
    """Return logprobs of a position: the first candidate is chosen, the others are the top ones."""
    chosen, *top = (TokenLogprob(token, logprob, rank) for rank, (token, logprob) in enumerate(candidates))
    return PositionLogprobs(chosen, tuple(top))


def logprobs_of(*positions: PositionLogprobs, hidden: frozenset[int] = frozenset()) -> dict:
    tokens = [each.chosen.token_id for each in positions]
    choice = TextChoice(0, Words(), ResponseFields(logprobs=True, hidden=hidden), [])
    (chunk,) = choice.chunks(OutputDelta(0, "text", tokens, positions))
    return json.loads(chunk)["logprobs"]


def test_of_two_tokens_with_one_text_the_likelier_is_shown():
    found = logprobs_of(position((2, -3.0), (1, -0.5), (3, -1.0)))
    assert found["top_logprobs"] == [{"�": -0.5, "c": -1.0}]
    assert found["token_logprobs"] == [-3.0]


def test_what_cannot_be_has_a_number_all_the_same():
    impossible = position((3, -math.inf), (1, -math.inf))
    assert logprobs_of(impossible)["token_logprobs"] == [LOWEST_LOGPROB]
    choice = ChatChoice(0, Words(), ResponseFields(logprobs=True))
    (chunk,) = choice.chunks(OutputDelta(0, "c", [3], [impossible]))
    (shown,) = json.loads(chunk)["logprobs"]["content"]
    assert (shown["logprob"], shown["top_logprobs"][0]["logprob"]) == (LOWEST_LOGPROB, LOWEST_LOGPROB)


def test_hidden_tokens_take_no_place_in_the_text():
    three = [position((9, -1.0)), position((3, -1.0)), position((3, -1.0))]
    assert logprobs_of(*three)["text_offset"] == [0, 3, 4]
    assert logprobs_of(*three, hidden=frozenset({9}))["text_offset"] == [0, 0, 1]


@pytest.mark.parametrize("kind", [ChatChoice, TextChoice])
def test_versions_of_weights_are_in_the_last_chunk_and_in_the_whole(kind):
    several = {"weight_version": 4, "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in RANGES]}
    for versions, fields in (((), {"weight_version": 0}), (((4, 3),), {"weight_version": 4}), (VERSIONS, several)):
        deltas = [OutputDelta(0, "c", [3]), OutputDelta(0, "c", [3, 3], (), "length", weight_versions=versions)]
        given = [0, Words(), ResponseFields(token_ids=True)] + [[]] * (kind is TextChoice)
        whole, streamed = kind(*given), kind(*given)
        for delta in deltas:
            whole.take(delta)
        chunks = [json.loads(chunk) for delta in deltas for chunk in streamed.chunks(delta)]
        for choice in (whole.whole(), chunks[-1]):
            assert {name: choice.get(name) for name in fields} == fields
            assert ("weight_versions" in choice) == (versions is VERSIONS)
        assert not any("weight_version" in chunk for chunk in chunks[:-1])


VERSIONS, RANGES = ((0, 1), (2, 1), (4, 1)), [(0, 0, 1), (2, 1, 2), (4, 2, 3)]
