"""Answers in each family's format, as in its chat template and model card, with the expected parse."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jaxinfer.parsers.registry import Parsers

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "options": {"type": "object"},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "near": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {"type": "number"}}}}},
    {"type": "function", "function": {"name": "now"}},
]


@dataclasses.dataclass(frozen=True)
class Case:
    """An answer, and its content, reasoning and tool calls. Valid JSON arguments are compared as JSON."""

    parsers: Parsers
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    content: str = ""
    reasoning: str = ""
    prompt: str = ""


def weather(city: str, **more: Any) -> tuple[str, Any]:
    return "get_weather", {"city": city, **more}


HERMES, LLAMA, MISTRAL = Parsers("hermes"), Parsers("llama3_json"), Parsers("mistral")
CODER, GLM, KIMI = Parsers("qwen3_coder"), Parsers("glm45", "glm45"), Parsers("kimi_k2")
V3, V31, OPENAI = Parsers("deepseek_v3"), Parsers("deepseek_v31"), Parsers("openai", "openai_gptoss")
PYTHONIC, QWEN3, R1 = Parsers("pythonic"), Parsers("hermes", "qwen3"), Parsers("deepseek_v3", "deepseek_r1")

_JSON = '{"city": "Paris <é> \\" } ] </x", "days": 3, "options": {"a": [1, {"b": null}], "c": "[x"}}'
_WEATHER = ("get_weather", json.loads(_JSON))
_CALLS, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _kimi(name_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name_id} <|tool_call_argument_begin|>{arguments} <|tool_call_end|>"


def _section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def _to(name: str, arguments: str) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{head}<|message|>{arguments}<|end|>"


CASES = [
    Case(HERMES, "Just text, 1 < 2 and </b> <tool.", content="Just text, 1 < 2 and </b> <tool."),
    Case(HERMES, " \n", content=" \n"),
    Case(HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {_JSON}}}\n</tool_call>', (_WEATHER,)),
    Case(
        HERMES,
        f'Sure.\n<tool_call>{{"arguments": {_JSON}, "name": "get_weather"}}</tool_call>\n\n'
        '<tool_call>\n{"id": 7, "name": "add", "arguments": {"a": [], "b": -1.5e3}}\n</tool_call> Done.',
        (_WEATHER, ("add", {"a": [], "b": -1500.0})),
        "Sure.\n Done.",
    ),
    Case(
        HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>', (("add", {"a": "\n"}),)
    ),
    Case(HERMES, '<tool_call>{"name": "add", "arguments": "x"}</tool_call>', (("add", "x"),)),
    Case(HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', (("now", {}),)),
    Case(HERMES, '<tool_call>{"name": "now", "arguments": {}}', (("now", {}),)),
    Case(
        QWEN3,
        "<think>\nI <b>could</b> say\n\n<tool_call>.\n</think>\n\n"
        'So:<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        (("now", {}),),
        "So:",
        "I <b>could</b> say\n\n<tool_call>.",
    ),
    Case(
        QWEN3,
        '<think>\nHm.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (("now", {}),),
        reasoning="Hm.",
    ),
    Case(QWEN3, "Hm, yes.</think>No.", content="No.", reasoning="Hm, yes.", prompt="<|im_start|>assistant\n<think>\n"),
    Case(QWEN3, "A <think> tag.", content="A <think> tag.", prompt="assistant\n<think>\n\n</think>\n\n"),
    Case(QWEN3, "<think>\nHm", reasoning="Hm"),
    Case(QWEN3, "<think>Hm</think>A <tool_c", content="A <tool_c", reasoning="Hm"),
    Case(
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": ' + _JSON + "}",
        (_WEATHER,),
    ),
    Case(
        LLAMA,
        'Both: {"name": "now", "parameters": {}}; {"name": "add", "arguments": {"a": 1}} Well?',
        (("now", {}), ("add", {"a": 1})),
        "Both: Well?",
    ),
    Case(
        LLAMA,
        'f { return "{" } {"x": {"name": "now", "parameters": {}}} {"name": "Bob", "parameters": {}}',
        content='f { return "{" } {"x": {"name": "now", "parameters": {}}} {"name": "Bob", "parameters": {}}',
    ),
    Case(MISTRAL, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_JSON}}}]', (_WEATHER,)),
    Case(
        MISTRAL,
        'Hello[TOOL_CALLS][{"name": "now", "arguments": {}}, {"arguments": {"name": "J"}, "name": "add"}]',
        (("now", {}), ("add", {"name": "J"})),
        "Hello",
    ),
    Case(
        MISTRAL,
        f'[TOOL_CALLS]get_weather{_JSON}[TOOL_CALLS]add[ARGS]{{"a": 1}}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}',
        (_WEATHER, ("add", {"a": 1}), ("now", {})),
    ),
    Case(
        Parsers("mistral", "mistral"),
        "Well. [THINK] [a] ?\n[/THINK]\nSo[TOOL_CALLS]now{}",
        (("now", {}),),
        "Well. So",
        "[a] ?",
    ),
    Case(Parsers("mistral", "mistral"), "[THINK]Hm.[TOOL_CALLS]now{}", (("now", {}),), reasoning="Hm."),
    Case(
        CODER,
        'Let me see.<tool_call>\n<function=get_weather>\n<parameter=city>\n\n "New\n<York> \\\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=options>\n{'a': [True, None], \"b\": {}}\n</parameter>\n"
        "<parameter=near>\nnull\n</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
        (weather('\n "New\n<York> \\\n', days=3, options={"a": [True, None], "b": {}}, near=None), ("now", {})),
        "Let me see.",
    ),
    Case(
        CODER,
        "<tool_call><function=get_weather><parameter=city>A<parameter=days>\nmany\n</parameter></function></tool_call>",
        (weather("A", days="many"),),
    ),
    Case(
        GLM,
        "<think>\nHm.</think>\nYes.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>S\u00e3o <P></arg_value>\n"
        '<arg_key>options</arg_key>\n<arg_value>{"x": 1}</arg_value>\n</tool_call>\n<tool_call>add<arg_key>a</arg_key>'
        "<arg_value>[1, 2]</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"
        "<tool_call>now\n</tool_call>",
        (weather("São <P>", options={"x": 1}), ("add", {"a": [1, 2], "b": 2}), ("now", {})),
        "Yes.\n",
        "Hm.",
    ),
    Case(V3, f"Ok.{_CALLS}{_v3('get_weather', _JSON)}\n{_v3('now', '{}')}{_END}", (_WEATHER, ("now", {})), "Ok."),
    Case(V31, f"{_CALLS}{_v31('get_weather', _JSON)}{_v31('now', '')}{_END}", (_WEATHER, ("now", {}))),
    Case(R1, f"So be it.\n</think>\n\n{_CALLS}{_v3('now', '{}')}{_END}", (("now", {}),), "", "So be it."),
    Case(R1, f"So be it.{_CALLS}{_v3('now', '{}')}{_END}", (("now", {}),), "", "So be it."),
    Case(R1, "No thought.", content="No thought.", prompt="<｜Assistant｜><think>\n\n</think>\n\n"),
    Case(R1, "Sunny.", content="Sunny.", prompt="<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
    Case(
        KIMI,
        "Yes. " + _section(_kimi("functions.get_weather:0", _JSON), _kimi("functions.now:1", "{}")),
        (_WEATHER, ("now", {})),
        "Yes. ",
    ),
    Case(
        KIMI,
        _section(_kimi("functions.add:0", '{"a": "x'), _kimi("functions.now:1", "{}")),
        (("add", {"a": "x "}), ("now", {})),
    ),
    Case(OPENAI, "Plain <| text", content="Plain <| text"),
    Case(
        OPENAI,
        f"<|channel|>analysis<|message|>We need it.<|end|>{_to('get_weather', _JSON)}"
        "<|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{_to('now', '')}"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        (_WEATHER, ("now", {})),
        "I look.\nDone.",
        "We need it.\nMore.",
    ),
    Case(OPENAI, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', (("add", {"a": 1}),)),
    Case(
        OPENAI,
        "<|channel|>commentary to=python code<|message|>print(1)<|call|>",
        reasoning="print(1)",
    ),
    Case(
        PYTHONIC,
        "[get_weather(city='Martha\\'s [\"V\"])', days=3, options={'a': [1.5, None]}, near=True), now()]",
        (weather('Martha\'s ["V"])', days=3, options={"a": [1.5, None]}, near=True), ("now", {})),
    ),
    Case(PYTHONIC, "[add(a='C:\\\\', b=')\\'')]", (("add", {"a": "C:\\", "b": ")'"}),)),
    Case(
        PYTHONIC,
        "See [1] and [f](x): <|python_start|>[add(a=b'x'), add(a=-1)]<|python_end|> [add(1)] [now(",
        (("add", {"a": -1}),),
        "See [1] and [f](x): [add(a=b'x') [add(1)] [now(",
    ),
]
