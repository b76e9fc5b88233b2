"""Tests of chat templates: published cases, the environment that templates expect, and rejections."""

import datetime
import json
import pathlib

import pytest

from jaxinfer.text import ChatTemplate, TemplateError, chat_template, given_template, load_template

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(USER, extra=variables)


def test_published_cases(test_data: pathlib.Path) -> None:
    content = (test_data / "templates" / "chat_template_cases.json").read_text(encoding="utf-8")
    cases = [case for case in json.loads(content)["cases"] if case["python_matches_expected"]]
    assert len(cases) >= 10
    for case in cases:
        tokens = {name: case.get(name, "") for name in ("bos_token", "eos_token")}
        expected = case["expected_output_jinja"] or case["expected_output"]
        assert ChatTemplate(case["template_str"], tokens).render(case["messages"]) == expected, case["name"]


# --------------------------------------------------------------------------------------------------------------
# Environment


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\nend", "user\nend"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': '<b> & é'} | tojson }}", '{"a": "<b> & é"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% generation %}\n{{ messages[0].content }}!{% endgeneration %}", "Hi!"),
        ("{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{{ dict(a=1).a }}{{ '-' * 3 }}{{ 2 ** 3 }}{{ [0] * 2 }}", "1---8[0, 0]"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ missing }}", "TrueTrueTrue"),
        ("{{ 'it' in messages[0].content or messages[0]['content'].startswith('H') }}", "True"),
    ],
)
def test_environment(source: str, text: str) -> None:
    assert render(source) == text


def test_the_clock_is_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime.datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_arguments_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages | length }}{{ tools[0].name }}{{ thinking }}{{ add_generation_prompt }}",
        {"bos_token": "<s>"},
    )
    text = template.render(USER, add_generation_prompt=False, tools=[{"name": "f"}], extra={"thinking": "no"})
    assert text == "<s>1fnoFalse"


def test_messages_are_copied_before_the_template_sees_them() -> None:
    class Secret:
        value = "x"

    with pytest.raises(TemplateError, match=r"variables\['messages'\]\[0\]\['content'\] must be JSON-like.*Secret"):
        ChatTemplate("{{ messages[0].content.value }}").render([{"role": "user", "content": Secret()}])
    with pytest.raises(TemplateError, match="failed on the messages"):
        ChatTemplate("{{ messages.append(1) }}").render(USER)
    assert len(USER) == 1


# --------------------------------------------------------------------------------------------------------------
# Loading


def write(folder: pathlib.Path, name: str, content: object) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def rendered(folder: pathlib.Path, **arguments: object) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render(USER, **arguments)  # type: ignore[arg-type]


def test_the_first_source_wins(tmp_path: pathlib.Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    write(tmp_path, "tokenizer_config.json", tokens)
    assert ChatTemplate.load(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {**tokens, "chat_template": "{{ bos_token }}config{{ eos_token }}"})
    assert rendered(tmp_path) == "<s>config</s>"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert rendered(tmp_path) == "json"
    write(tmp_path, "chat_template.jinja", "jinja{{ eos_token }}")
    assert rendered(tmp_path) == "jinja</s>"


def test_named_templates(tmp_path: pathlib.Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert rendered(tmp_path) == "plain"
    assert rendered(tmp_path, tools=[]) == "tools"
    write(tmp_path, "tokenizer_config.json", {"chat_template": {"default": "by name", "tool_use": "tools by name"}})
    assert (rendered(tmp_path), rendered(tmp_path, tools=[{}])) == ("by name", "tools by name")
    write(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "only"}]})
    assert rendered(tmp_path) == "only"
    write(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": n, "template": n} for n in ("rag", "x")]})
    with pytest.raises(TemplateError, match="no default chat template, only rag, x"):
        rendered(tmp_path)


def test_templates_of_a_folder_of_their_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "{{ tools | length }} tools{{ eos_token }}")
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config", "eos_token": "</s>"})
    assert (rendered(tmp_path), rendered(tmp_path, tools=[{}])) == ("config", "1 tools</s>")
    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "not read"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert (rendered(tmp_path), rendered(tmp_path, tools=[{}])) == ("listed", "1 tools")
    write(tmp_path, "chat_template.jinja", "main")
    assert (rendered(tmp_path), rendered(tmp_path, tools=[{}])) == ("main", "1 tools")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "{% if %}")
    with pytest.raises(TemplateError, match="the chat template tool_use is not valid"):
        ChatTemplate.load(tmp_path)


def test_every_named_token_is_a_variable(tmp_path: pathlib.Path) -> None:
    config = {"image_token": "<image>", "add_bos_token": True, "extra_special_tokens": {"audio_token": "<audio>"}}
    names = ("bos_token", "image_token", "audio_token", "eot_token", "add_bos_token")
    write(tmp_path, "chat_template.jinja", "|".join(f"{{{{ {name} }}}}" for name in names))
    write(tmp_path, "tokenizer_config.json", config)
    write(tmp_path, "special_tokens_map.json", {"eot_token": {"content": "<eot>"}})
    assert rendered(tmp_path) == "|<image>|<audio>|<eot>|"
    write(tmp_path, "tokenizer_config.json", {**config, "tokenizer_class": "LlamaTokenizer"})
    assert rendered(tmp_path) == "<s>|<image>|<audio>|<eot>|"


def test_a_template_that_is_given(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "chat_template.jinja", "{% own is broken")
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>"})
    write(tmp_path, "other.jinja", "{{ bos_token }}of a file\\n")
    for given, text in (
        (str(tmp_path / "other.jinja"), "<s>of a file\\n"),
        ("{{ bos_token }}é 🙂\\n{{ messages[0].content }}\\\\d", "<s>é 🙂\nHi\\\\d"),
        ("{{ bos_token }}\nas it is\\n", "<s>\nas it is\\n"),
    ):
        template = load_template(tmp_path, given)
        assert template is not None
        assert template.render(USER) == text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("absent.jinja", "chat_template: cannot read absent.jinja"),
        ("", "chat_template: cannot read"),
        (".", "chat_template: cannot read"),
        ("a\0b", "chat_template: cannot read"),
        ("{% if %}", "chat_template: the chat template default is not valid"),
        ("{" * 10_000, "chat_template: the chat template default is not valid"),
    ],
)
def test_what_is_given_and_is_no_template(given: str, said: str) -> None:
    with pytest.raises(TemplateError, match=said) as caught:
        given_template(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("chat_template.jinja", "a\n{% if %}", r"default is not valid: .* \(line 2\)"),
        ("chat_template.jinja", "{% nonsense %}", "default is not valid: Encountered unknown tag 'nonsense'"),
        ("chat_template.jinja", "{{ x | nonsense }}", "default is not valid: No filter named 'nonsense'"),
        ("chat_template.jinja", "{{ (" * 5000, "default is not valid"),
        ("chat_template.jinja", "x" * ((1 << 20) + 1), "larger than the 1048576 bytes"),
        ("chat_template.json", {"chat_template": "x" * ((1 << 20) + 1)}, "larger than 1048576 bytes"),
        ("chat_template.json", {"chat_template": 3}, "must be a string or a list of named templates"),
        ("chat_template.json", {"chat_template": []}, "must be a string or a list of named templates"),
        ("chat_template.json", {"chat_template": [{"name": "a"}]}, "must be a string or a list of named templates"),
        ("chat_template.json", {"chat_template": {"default": 1}}, "must be a string or a list of named templates"),
        ("chat_template.json", {"chat_template": ["a"]}, "must be a string or a list of named templates"),
        ("chat_template.json", "{", "not valid JSON"),
    ],
)
def test_bad_files(tmp_path: pathlib.Path, name: str, content: object, said: str) -> None:
    write(tmp_path, name, content)
    with pytest.raises(TemplateError, match=said) as caught:
        ChatTemplate.load(tmp_path)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------------
# Forbidden operations in a template


def test_a_refusal_is_told_from_a_failure() -> None:
    with pytest.raises(TemplateError, match=r"^the chat template refuses the messages: Roles must alternate$"):
        render("{{ raise_exception('Roles must\n alternate') }}")
    with pytest.raises(TemplateError, match=r"^the chat template failed on the messages: 'missing' is undefined$"):
        render("{{ missing.name }}")
    with pytest.raises(TemplateError, match=r"failed on the messages: TypeError: .*concatenate"):
        render("{{ 'a' + [1] }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__subclasses__() }}",
        "{{ messages.clear() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_private=1) }}",
        "{{ lipsum(n=1) }}",
        "{% include 'secret' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10 ** 6) %}{% endfor %}",
        "{{ ('x' * 10 ** 9) | length }}",
        "{{ (10 ** 9 * [0]) | length }}",
        "{{ 2 ** 1000000 > 1 }}",
        "{% set n = namespace(t='x' * 1000000) %}{% for i in range(30) %}{{ n.t }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ {}['x'].y }}",
        "{{ [][5].y }}",
        "{{ 'x'.encode('nonsense') }}",
        "{{ tojson }}{{ messages[0] | tojson(separators=1) }}",
    ],
)
def test_bounds_and_faults(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "''|attr('__class__')",
        "'{0.__class__}'.format(1)",
        "raise_exception.__globals__",
        "dict.fromkeys",
    ],
)
def test_private_attributes_are_not_there(expression: str) -> None:
    assert render("{{ " + expression + " }}") == ""


def test_output_is_bounded_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 100)
    assert len(render("{% for i in range(10) %}0123456789{% endfor %}")) == 100
    with pytest.raises(TemplateError, match="writes more than 100 characters"):
        render("{% for i in range(11) %}0123456789{% endfor %}")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_extra_does_not_replace_arguments(name: str) -> None:
    with pytest.raises(TemplateError, match=f"variable {name} is set by its own argument"):
        render("x", **{name: []})


def test_deeply_nested_data_is_refused() -> None:
    value: object = "x"
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TemplateError, match="RecursionError"):
        ChatTemplate("x").render([{"role": "user", "content": value}])


@pytest.mark.parametrize(
    "content", ["So", "So, ", " \n So", "it is {{ x }} </s>", "So So", "So <the message goes on here"]
)
@pytest.mark.parametrize(
    ("source", "strips"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}So", False),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}So", True),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", False),
    ],
)
def test_a_message_goes_on_where_it_ends(source: str, strips: bool, content: str) -> None:
    messages = [{"role": "user", "content": "So"}, {"role": "assistant", "content": content}]
    text = ChatTemplate(source).render(messages, False, continue_final_message=True)
    assert text.endswith("<assistant>" + (content.strip() if strips else content))


def test_a_message_that_is_not_written_cannot_go_on() -> None:
    two = [{"content": "a"}, {"content": "b"}]
    with pytest.raises(TemplateError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(two, continue_final_message=True)


def test_what_tools_have_returned_is_the_named_templates_also_without_tools() -> None:
    template = ChatTemplate({"default": "no tools{{ tools }}", "tool_use": "{{ tools }}{{ messages[-1].content }}"})
    assert template.render([{"role": "user", "content": "a"}]) == "no toolsNone"
    assert template.render([{"role": "tool", "content": "a"}]) == "[]a"
    assert template.render([{"role": "assistant", "content": "a", "tool_calls": [{}]}]) == "[]a"
    assert template.render([{"role": "user", "content": "a"}], tools=[{}]) == "[{}]a"
    assert ChatTemplate("{{ tools }}").render([{"role": "tool", "content": "a"}]) == "None"
