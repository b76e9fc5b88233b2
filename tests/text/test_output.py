"""Tests of `Output`: any split or merge of an output's deltas gives the same text, tokens and reasons."""

import dataclasses
import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.output import Output, OutputDelta
from jaxinfer.types import FinishReason, PositionLogprobs, Request, SequenceDelta, TokenLogprob
from tests.serve.fake_engine import BOS, EOS, FIRST_BYTE, VOCAB, fake_tokenizer

TOKENIZER = fake_tokenizer()
PROMPT = tuple(FIRST_BYTE + byte for byte in "é".encode()[:1])
TEXTS = st.text("aé狐🦊b", max_size=12)
STOPS = st.lists(st.text("aé狐🦊b", min_size=1, max_size=3), max_size=3)
TOKENS = st.one_of(
    TEXTS.map(lambda text: [FIRST_BYTE + byte for byte in text.encode()]), st.lists(st.integers(0, VOCAB - 1))
)


@dataclasses.dataclass
class Whole:
    """The assembled result of an output."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | str | None = None


def assembled(tokens: list[int], cuts: list[int], reason: FinishReason, **params: object) -> Whole:
    """Return the output for ``tokens`` in deltas that begin at ``cuts``; the last delta has the ``reason``."""
    output, whole = Output(TOKENIZER, Request("a", PROMPT, SamplingParams(**params))), Whole()
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(tokens)]):
        new = tokens[begin:end]
        delta = SequenceDelta("a", 0, new, [PositionLogprobs(TokenLogprob(t, -1.0, 1), ()) for t in new])
        if end == len(tokens):
            delta.finish_reason = reason
            delta.stop_reason = tokens[-1] if reason is FinishReason.STOP else None
        piece = output.take(delta)
        whole.text += piece.text
        whole.tokens += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.reason, whole.stop_reason = piece.finish_reason, piece.stop_reason
        if output.ended:
            break
    return whole


@given(
    TOKENS.filter(bool),
    st.sets(st.integers(1, 40), max_size=12),
    STOPS,
    st.booleans(),
    st.integers(0, 4),
    st.sampled_from([FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT]),
)
@example([FIRST_BYTE + byte for byte in "a狐b".encode()], {2, 3}, ["狐"], False, 0, FinishReason.LENGTH)
@example([EOS, FIRST_BYTE], set(), [], True, 0, FinishReason.STOP)
def test_any_split_makes_the_same_output(tokens, cuts, stops, include, least, reason):
    cuts = [cut for cut in cuts if cut < len(tokens)]
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": least, "max_tokens": None}
    one_by_one = assembled(tokens, list(range(1, len(tokens))), reason, **params)
    split = assembled(tokens, cuts, reason, **params)
    assert split == one_by_one
    assert len(split.logprobs) == len(split.tokens)
    assert split.reason is not None
    if not stops:
        shown = tokens if include or reason is not FinishReason.STOP else tokens[:-1]
        before = TOKENIZER.decode(PROMPT)
        # The prompt ends within a character: the bytes that complete it belong to the output.
        assert split.text in (
            TOKENIZER.decode([*PROMPT, *shown]).removeprefix(before),
            TOKENIZER.decode([*PROMPT, *shown]),
        )


def test_tokens_behind_a_stop_string_do_not_count():
    tokens = [FIRST_BYTE + byte for byte in b"abcdef"]
    whole = assembled(tokens, [], FinishReason.LENGTH, stop=["bc"])
    assert (whole.text, whole.tokens, whole.reason, whole.stop_reason) == ("a", tokens[:3], FinishReason.STOP, "bc")
    assert len(whole.logprobs) == 3


def test_only_own_stop_tokens_are_told():
    for own, told in (([FIRST_BYTE], FIRST_BYTE), ([BOS], None)):
        assert assembled([9, FIRST_BYTE], [1], FinishReason.STOP, stop_token_ids=own).stop_reason == told


def test_without_a_tokenizer_tokens_alone_count():
    output = Output(None, Request("a", PROMPT, SamplingParams()))
    assert output.take(SequenceDelta("a", 0, [1, 2])) == OutputDelta(0, "", [1, 2])
    assert output.take(SequenceDelta("a", 0, [3], (), FinishReason.LENGTH)) == OutputDelta(0, "", [3], (), "length")


@settings(max_examples=300)
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
)
@example("aab", ["ab"], 2, False)
@example("abab", ["abab"], 3, False)
@example("aaaa", ["aa"], 2, True)
def test_a_stop_string_may_begin_within_the_least_tokens(text, stops, least, include):
    """A stop string that begins within ``min_tokens`` and is completed after them ends the output, as in vLLM."""
    ends = [(end, -len(stop)) for end in range(least + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    end, negative = min(ends, default=(len(text), 0))
    expected = text[:end] if include else text[: end + negative]
    tokens = [FIRST_BYTE + byte for byte in text.encode()]
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": least, "max_tokens": None}
    made = assembled(tokens, list(range(1, len(tokens))), FinishReason.LENGTH, **params)
    assert (made.text, made.reason) == (expected, "stop" if ends else "length")


def test_an_output_that_its_grammar_ends_keeps_its_last_token_however_deltas_are_merged() -> None:
    tokens = [FIRST_BYTE + byte for byte in b"ok7"]
    for cut in range(len(tokens) + 1):
        output = Output(TOKENIZER, Request("a", PROMPT, SamplingParams()))
        pieces = [output.take(SequenceDelta("a", 0, tokens[:cut]))] if cut else []
        pieces.append(output.take(SequenceDelta("a", 0, tokens[cut:], (), FinishReason.STOP)))
        assert "".join(piece.text for piece in pieces).endswith("ok7")
