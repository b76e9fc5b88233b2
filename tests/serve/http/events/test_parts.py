"""Tests of answers as parts: the parts do not depend on how tokens and deltas split the text."""

import codecs
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.events import message_of
from jaxinfer.parsers.parser import Parser
from jaxinfer.parsers.tools import Tools
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.frontend.chat.outputs import EventFilter
from jaxinfer.serve.http.events.parts import CALL, REASONING, TEXT, Closed, More, Opened, PartReader, Step
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs, TokenLogprob
from tests.parsers.corpus import CASES, TOOLS, Case

ALL = EventFilter()
HIDDEN = 0
CASE = st.sampled_from(CASES)


@dataclasses.dataclass
class Spelt:
    """A tokenizer with random tokens by id; token 0 is hidden."""

    tokens: list[bytes]

    def token_bytes(self, token: int) -> bytes:
        return b"</s>" if token == HIDDEN else self.tokens[token - 1]

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")


def new_parser(case: Case) -> Parser:
    parser = case.parsers.make(Tools(TOOLS), prompt=case.prompt, new_id=lambda index: f"id{index}")
    assert parser is not None
    return parser


def deltas(tokens: list[bytes], groups: list[int], reason: str = "stop") -> list[OutputDelta]:
    """Return deltas with these groups of tokens, and an end token; texts are whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids, found = [*range(1, len(tokens) + 1), HIDDEN], []
    for first, end in itertools.pairwise([0, *groups, len(ids)]):
        part = ids[first:end]
        text = "".join(decoder.decode(tokens[each - 1]) for each in part if each != HIDDEN)
        positions = [PositionLogprobs(TokenLogprob(each, -1.0, 1), ()) for each in part]
        found.append(OutputDelta(0, text, part, positions))
    found[-1].finish_reason = reason
    return found


def read(reader: PartReader, made: list[OutputDelta]) -> list[Step]:
    return [step for delta in made for step in reader.read(delta)]


def split(data: st.DataObject, length: int) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=length))) if length > 1 else []


def check_steps(steps: list[Step], reader: PartReader) -> None:
    """Check that parts follow one another, and that the steps of each part add up to it."""
    kinds = [type(step) for step in steps if not isinstance(step, More)]
    assert kinds == [Opened, Closed] * len(reader.parts)
    assert [step.part for step in steps if isinstance(step, Opened)] == reader.parts
    for index, part in enumerate(reader.parts):
        more = [step for step in steps if isinstance(step, More) and step.part is part]
        assert part.index == index
        assert "".join(step.text for step in more) == part.text
        assert [each for step in more for each in step.logprobs] == part.logprobs


@given(st.data(), CASE)
def test_parts_are_those_of_the_whole_text(data: st.DataObject, case: Case) -> None:
    spelt = case.text.encode("utf-8", "surrogatepass")
    if spelt.decode(errors="replace") != case.text:
        return
    cuts = split(data, len(spelt))
    tokens = [spelt[a:b] for a, b in itertools.pairwise([0, *cuts, len(spelt)])]
    words = Spelt(tokens)
    reader = PartReader(new_parser(case), ALL, words, frozenset({HIDDEN}))
    steps = read(reader, deltas(tokens, split(data, len(tokens) + 1)))
    parser = new_parser(case)
    whole = message_of(parser.feed(case.text) + parser.finish())
    check_steps(steps, reader)
    assert "".join(part.text for part in reader.parts if part.kind == TEXT) == whole.content
    assert "".join(part.text for part in reader.parts if part.kind == REASONING) == whole.reasoning
    calls = [(part.id, part.name, part.text) for part in reader.parts if part.kind == CALL]
    assert calls == [(call.id, call.name, call.arguments) for call in whole.calls]
    assert reader.called == bool(calls)
    assert not any(part.cut for part in reader.parts)


@given(st.data(), CASE)
def test_tokens_belong_to_the_part_that_they_said(data: st.DataObject, case: Case) -> None:
    """The logprobs of a part, with one-byte tokens, spell its text without markers. Harmony's parser adds newlines
    between messages, which have no token."""
    spelt = case.text.encode("utf-8", "surrogatepass")
    if spelt.decode(errors="replace") != case.text:
        return
    tokens = [bytes([each]) for each in spelt]
    words = Spelt(tokens)
    reader = PartReader(new_parser(case), ALL, words, frozenset({HIDDEN}))
    read(reader, deltas(tokens, split(data, len(tokens) + 1)))
    thought = 0
    for part in reader.parts:
        said = b"".join(words.token_bytes(each.chosen.token_id) for each in part.logprobs)
        if part.kind != CALL:
            between = part.text.startswith("\n") and case.parsers.tool_calls == "openai"
            assert said.decode() == (part.text.removeprefix("\n") if between else part.text)
        thought += len(part.logprobs) if part.kind == REASONING else 0
    assert reader.reasoning_tokens == thought


THINKING = next(case for case in CASES if case.reasoning and case.content and case.parsers.reasoning == "qwen3")


def test_a_thought_that_is_not_shown_is_counted_all_the_same() -> None:
    counts = []
    for shown in (ALL, EventFilter(reasoning=False)):
        tokens = [bytes([each]) for each in THINKING.text.encode()]
        reader = PartReader(new_parser(THINKING), shown, Spelt(tokens), frozenset({HIDDEN}))
        read(reader, deltas(tokens, []))
        counts.append(reader.reasoning_tokens)
        assert (REASONING in {part.kind for part in reader.parts}) == bool(shown.reasoning)
    assert counts == [len(THINKING.reasoning.encode())] * 2


def test_without_a_parser_all_is_text() -> None:
    tokens = [b"<think>", b"\xe7", b"\x8b\x90", b"."]
    reader = PartReader(None, ALL, Spelt(tokens), frozenset({HIDDEN}))
    check_steps(read(reader, deltas(tokens, [2, 3])), reader)
    (part,) = reader.parts
    assert (part.kind, part.text, len(part.logprobs)) == (TEXT, "<think>狐.", 4)
    assert (reader.finish_reason, part.cut, reader.reasoning_tokens) == ("stop", False, 0)


def test_what_is_cut_is_the_part_that_was_open() -> None:
    case = next(case for case in CASES if case.calls and case.parsers.tool_calls == "hermes")
    tokens = [case.text[: case.text.index('"Paris') + 3].encode()]
    reader = PartReader(new_parser(case), ALL, Spelt(tokens), frozenset({HIDDEN}))
    check_steps(read(reader, deltas(tokens, [], "length")), reader)
    assert [part.cut for part in reader.parts] == [*[False] * (len(reader.parts) - 1), True]
    assert reader.parts[-1].kind == CALL


def test_text_that_is_held_back_for_a_stop_string_is_of_the_tokens_that_said_it() -> None:
    tokens = [b"ab", b"cd", b"ef"]
    made = [OutputDelta(0, text, [token]) for text, token in (("a", 1), ("bc", 2), ("def", 3))]
    for delta in made:
        delta.logprobs = [PositionLogprobs(TokenLogprob(delta.token_ids[0], -1.0, 1), ())]
    made.append(OutputDelta(0, "", [HIDDEN], finish_reason="stop"))
    reader = PartReader(None, ALL, Spelt(tokens), frozenset({HIDDEN}))
    steps = read(reader, made)
    more = [(step.text, [each.chosen.token_id for each in step.logprobs]) for step in steps if isinstance(step, More)]
    assert more == [("a", [1]), ("bc", [2]), ("def", [3])]
    assert [each.chosen.token_id for each in reader.parts[0].logprobs] == [1, 2, 3]


def test_text_that_is_held_back_is_of_its_tokens_also_where_several_come_at_once() -> None:
    tokens = [b"<think>", b"a", b"b", b"</think>", b"c", b"d"]
    made = deltas(tokens, [1])
    made[0].text, made[1].text = "<think", ">ab</think>cd"
    reader = PartReader(new_parser(THINKING), ALL, Spelt(tokens), frozenset({HIDDEN}))
    read(reader, made)
    said = [(part.kind, part.text, [each.chosen.token_id for each in part.logprobs]) for part in reader.parts]
    assert said == [(REASONING, "ab", [2, 3]), (TEXT, "cd", [5, 6])]


def test_a_text_that_is_cut_is_the_last_part() -> None:
    tokens = [b"<think>", b"a", b"</think>", b"c"]
    reader = PartReader(new_parser(THINKING), ALL, Spelt(tokens), frozenset({HIDDEN}))
    read(reader, deltas(tokens, [], "length"))
    assert [(part.kind, part.cut) for part in reader.parts] == [(REASONING, False), (TEXT, True)]


def test_an_output_that_was_aborted_is_an_error() -> None:
    reader = PartReader(None, ALL, Spelt([b"a"]), frozenset())
    with pytest.raises(ServeError, match="aborted") as refused:
        read(reader, deltas([b"a"], [], "abort"))
    assert refused.value.kind is Kind.CANCELLED
