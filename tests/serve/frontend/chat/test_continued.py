"""Tests of continued answers: the parser returns the events of the whole text, less those of the existing prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxinfer.parsers.events import Content, Event, Reasoning, message_of
from jaxinfer.parsers.registry import GPT_OSS, OPENAI, Parsers
from jaxinfer.parsers.tools import Tools
from jaxinfer.serve.frontend.chat.continued import continuing

TOOLS = Tools([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QWEN = Parsers("hermes", "qwen3")
R1 = Parsers("deepseek_v3", "deepseek_r1")
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
)

ANSWERS: list[tuple[Parsers, str, str]] = [
    (QWEN, "[assistant]", "Let me see. <tool or not? It is < 3."),
    (QWEN, "[assistant]", f"Let me see.{CALL}"),
    (QWEN, "[assistant]", f"Two: {CALL}\n{CALL}"),
    (QWEN, "[assistant]", f"<think>\nHm  \n\n I see.\n</think>\n\nSo: {CALL}"),
    (QWEN, "[assistant]<think>\nOf old.\n</think>\n\n", "It is 20°.\n\nIn Rome. 🦊"),
    (R1, "<｜Assistant｜>", f"It is 20°. {DEEPSEEK_CALL}"),
    (Parsers("mistral", "mistral"), "[/INST]", '[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'),
    (Parsers("llama3_json", None), "<|end_header_id|>\n\n", '{"name": "weather", "parameters": {"city": "Rome"}}'),
]


def read(parser: Any, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def texts(events: list[Event]) -> tuple[str, str]:
    return tuple("".join(e.text for e in events if isinstance(e, kind)) for kind in (Content, Reasoning))  # type: ignore[return-value]


@pytest.mark.parametrize(("parsers", "before", "answer"), ANSWERS)
def test_an_answer_goes_on_wherever_it_was_cut(parsers: Parsers, before: str, answer: str) -> None:
    prompt = before if parsers is not R1 else f"{before}</think>"  # as if no thought had been opened
    whole = parsers.make(TOOLS, prompt=prompt)
    assert whole is not None
    wanted = message_of(read(whole, [answer]))
    for cut in range(1, len(answer)):
        begun, rest = answer[:cut], answer[cut:]
        shown = parsers.make(TOOLS, prompt=prompt)
        assert shown is not None
        already = message_of(shown.feed(begun) + shown.finish(cut=True))
        for pieces in ([rest], list(rest)):
            parser = continuing(parsers, TOOLS, before + begun, begun)
            assert parser is not None
            found = message_of(read(parser, pieces))
            ended = len(wanted.calls) - len(found.calls)
            assert [(c.name, c.arguments) for c in found.calls] == [(c.name, c.arguments) for c in wanted.calls[ended:]]
            assert rest_of(wanted.content, already.content) in (found.content.lstrip(), None)
            assert rest_of(wanted.reasoning, already.reasoning) in (found.reasoning.lstrip(), None)
            assert wanted.content.endswith(found.content)
            assert wanted.reasoning.endswith(found.reasoning)


def rest_of(whole: str, seen: str) -> str | None:
    """Return the text after ``seen``; None: ``seen`` ends in a partial marker. Parsers may drop trailing space."""
    return whole[len(seen) :].lstrip() if whole.startswith(seen) else None


def test_a_call_that_has_begun_is_whole() -> None:
    begun = f'{CALL}\n<tool_call>\n{{"name": "weather", "argum'
    parser = continuing(QWEN, TOOLS, f"[assistant]{begun}", begun)
    assert parser is not None
    message = message_of(read(parser, ['ents": {"city": "Oslo"}}\n</tool', "_call>"]))
    (call,) = message.calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert message.content == ""


@pytest.mark.parametrize("parsers", [Parsers(OPENAI, GPT_OSS), Parsers(None, GPT_OSS)])
def test_harmony_goes_on_in_its_message(parsers: Parsers) -> None:
    prompt = "<|end|><|start|>assistant<|channel|>final<|message|>It is "
    parser = continuing(parsers, None, prompt, "It is ")
    assert parser is not None
    assert texts(read(parser, ["20", "°."])) == ("20°.", "")


def test_what_nothing_reads_is_text() -> None:
    assert continuing(Parsers(), None, "[assistant]So", "So") is None
