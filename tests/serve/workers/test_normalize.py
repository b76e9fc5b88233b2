"""Tests of the adaptation of conversations to chat templates: unsupported features, and the format of tool calls."""

from typing import Any

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.workers.normalize import normalize_messages
from jaxinfer.serve.workers.normalize import written as in_form
from jaxinfer.text.chat_template import ChatTemplate, TemplateError
from tests.serve.fake_engine import TEMPLATE

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_template_that_does_not_know_developers_has_a_system_instead():
    told = Conversation([{"role": "developer", "content": "Be short."}, *HELLO])
    assert [each["role"] for each in normalize_messages(told, [TEMPLATE]).messages] == ["system", "user"]
    assert normalize_messages(told, ["{% if m.role == 'developer' %}"]) == told
    assert told.messages[0]["role"] == "developer"


def test_tools_that_no_template_would_show_are_refused_by_name():
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="tools: the model's chat template has no place for tools") as refusal:
        normalize_messages(Conversation(HELLO, tools), [TEMPLATE])
    assert refusal.value.field == "tools"
    for sources in ([TEMPLATE, "{{ tools }}"], ["{% if tools is defined %}{% endif %}"]):
        assert normalize_messages(Conversation(HELLO, tools), sources).tools == tools
    assert normalize_messages(Conversation(HELLO, []), [TEMPLATE]).tools == []


def test_an_effort_is_what_the_template_knows_of_it():
    hard, none = (Conversation(HELLO, variables={"x": 1}, reasoning_effort=effort) for effort in ("high", "none"))
    assert normalize_messages(hard, ["{{ reasoning_effort }}"]).variables == {"reasoning_effort": "high", "x": 1}
    assert normalize_messages(none, ["{{ reasoning_effort }}"]).variables == {"reasoning_effort": "none", "x": 1}
    assert normalize_messages(none, ["{% if enable_thinking %}"]).variables == {
        "enable_thinking": False,
        "thinking": False,
        "x": 1,
    }
    for conversation, source in ((hard, "{% if enable_thinking %}"), (none, TEMPLATE)):
        with pytest.raises(RequestError, match="template knows no such effort") as refusal:
            normalize_messages(conversation, [source])
        assert refusal.value.field == "reasoning_effort"


def called(**more: Any) -> Conversation:
    function = {"name": "f", "arguments": {"a": "é"}}
    return Conversation([{"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}])


def written(source: str, conversation: Conversation) -> str:
    return ChatTemplate(source).render(normalize_messages(conversation, [source]).messages)


DEEPSEEK = "{{ m['content'] is none }}{{ 'x' + m['tool_calls'][0]['function']['arguments'] + 'y' }}"
GLM = "[{{ m.content }}]{{ m.tool_calls[0].function.arguments | tojson }}"
GPT_OSS = "{% set message = m %}{{ 'x' in message.content }}{{ message.thinking }}"


@pytest.mark.parametrize("more", [{}, {"content": None}])
@pytest.mark.parametrize(
    ("source", "text"), [(DEEPSEEK, 'Truex{"a": "é"}y'), (GLM, '[]{"a": "é"}'), (GPT_OSS, "FalseHm")]
)
def test_calls_are_written_as_the_template_wants_them(source: str, text: str, more: dict[str, Any]) -> None:
    loop = f"{{% for m in messages %}}{source}{{% endfor %}}"
    assert written(loop, called(reasoning_content="Hm", **more)) == text


def test_a_thought_has_one_name_beside_content() -> None:
    (message,) = normalize_messages(called(reasoning_content="Hm", content="Well"), ["message.thinking"]).messages
    assert "thinking" not in message


@pytest.mark.parametrize("calls", ["x", ["x"], [{"function": 3}], [{"function": {"arguments": "text"}}]])
def test_calls_of_another_shape_are_left_to_the_template(calls: Any) -> None:
    (message,) = normalize_messages(called(tool_calls=calls), ["'' + arguments + ''"]).messages
    assert message["tool_calls"] == calls


S, D = {"role": "system", "content": "S1"}, {"role": "developer", "content": "D2"}
U, A = {"role": "user", "content": "U3"}, {"role": "assistant", "content": "A4"}
INSISTS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
LEAVES_OUT = (
    "{% if messages[0].role == 'system' %}{% set told = messages[0].content %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{{ '[system]' + (told or '') }}"
    "{% for m in rest %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
TAKES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KNOWS_DEVELOPERS = INSISTS.replace("== 'system'", "in ('system', 'developer')")
JOINED = "[system]S1\n\nD2[user]U3"


def prompt_of(source: str, *messages: dict[str, Any]) -> str:
    shown = normalize_messages(Conversation(messages), [source])
    return in_form(shown.messages, ChatTemplate(source).render)


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (INSISTS, (S, D, U), JOINED),
        (INSISTS, (S, U, D), JOINED),
        (INSISTS, (U, S), "[system]S1[user]U3"),
        (INSISTS, (S, U, A, D, U), JOINED + "[assistant]A4[user]U3"),
        (LEAVES_OUT, (S, D, U), JOINED),
        (LEAVES_OUT, (S, U, D), JOINED),
        (TAKES, (S, U, D, U), "[system]S1[user]U3[system]D2[user]U3"),
        (KNOWS_DEVELOPERS, (D, S, U), "[developer]D2\n\nS1[user]U3"),
        (INSISTS, (S, U), "[system]S1[user]U3"),
    ],
)
def test_system_messages_behind_the_first_are_joined_where_a_template_insists(
    source: str, messages: tuple[dict[str, Any], ...], text: str
) -> None:
    assert prompt_of(source, *messages) == text


def test_a_template_that_refuses_both_forms_says_why() -> None:
    never = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system at all') }}{% endfor %}"
    with pytest.raises(TemplateError, match="no system at all"):
        prompt_of(never, S, U, D)
