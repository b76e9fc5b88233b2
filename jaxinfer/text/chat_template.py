"""Chat templates: render a conversation to the prompt text of a model.

The environment is that of Hugging Face's ``apply_chat_template``: Jinja with ``trim_blocks``, ``lstrip_blocks``, loop
controls, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now`` and the ``generation`` tag. A template
comes with a checkpoint and is untrusted: it runs in Jinja's immutable sandbox, its size and that of its output are
bounded, and it receives copies of plain data only.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxinfer.text.classes import declared_tokens, tokenizer_class
from jaxinfer.text.files import read_object, read_text

MAX_TEMPLATE_BYTES = 1 << 20
MAX_RENDERED_CHARACTERS = 16 << 20
MAX_POWER_BITS = 1 << 10

_MARK = "<the message goes on here: 7c1d83f0e95b42a6> "

ADDITIONAL = "additional_chat_templates"
DEFAULT = "default"
TOOL_USE = "tool_use"

ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that are arguments of `ChatTemplate.render`."""

_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}

# Exceptions of template code besides Jinja's own errors: it runs as Python.
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateError(ValueError):
    """A chat template that cannot be loaded, or that rejects the conversation, with a one-sentence message."""


class ChatTemplate:
    """The chat templates of one checkpoint.

    Args:
        source: the template, or templates by name ("default" and, for conversations with tools, "tool_use").
        tokens: special tokens for the template: ``bos_token``, ``eos_token`` ...
        now: clock of ``strftime_now``.

    Attributes:
        sources, tokens: as given, the templates by name: another process can construct the same template from them.

    Raises:
        TemplateError: a template is too large or not valid Jinja.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        environment = _environment(now)
        self.sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self.tokens = dict(tokens or {})
        self._templates = {name: _compile(environment, name, text) for name, text in self.sources.items()}

    @classmethod
    def load(cls, folder: Path, source: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """Load chat_template.jinja, else chat_template.json, else tokenizer_config.json; None without one.

        Files in additional_chat_templates (``tool_use.jinja``) are named templates, which override those of a list.

        Args:
            source: templates by name that replace those of the folder.

        Raises:
            TemplateError: a file cannot be read, or its template is not valid.
        """
        sources = _find(folder) if source is None else source
        if not sources:
            return None
        return cls(sources, declared_tokens(folder, tokenizer_class(folder, TemplateError), TemplateError).texts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt text, with special tokens as text: encode it with ``add_special_tokens=False``.

        Args:
            messages: each with a ``role`` and the template's other fields, usually ``content``.
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: JSON descriptions of functions that the model may call.
            extra: additional template variables (``enable_thinking``, ``documents`` ...).
            continue_final_message: end after the last message's content, which must be text, as ``transformers`` does.

        Raises:
            TemplateError: the template rejects the messages, fails on them, writes too much, or does not write the
                message to be continued.
        """
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        if tools is None and TOOL_USE in self._templates and any(map(_calls, messages)):
            tools = []  # the default template may not support tool results
        named = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        taken = ARGUMENTS & (extra or {}).keys()
        if taken:
            raise TemplateError(f"chat template variable {min(taken)} is set by its own argument")
        template = self._choose(with_tools=tools is not None)
        try:
            variables = _plain({"documents": None, **self.tokens, **(extra or {}), **named}, "chat template variables")
            text = _bounded(template.generate(variables))
        except _FAULTS as cause:
            raise _refusal(cause) from cause
        return _up_to_mark(text) if continue_final_message else text

    def _choose(self, with_tools: bool) -> jinja2.Template:
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name in self._templates:
            return self._templates[name]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise TemplateError(f"the checkpoint has no default chat template, only {', '.join(sorted(self._templates))}")


def given_source(given: str) -> str:
    """Return the text of a template given by the user: the file of this path, or the text itself.

    A text of one line may contain ``\\n`` for line ends (and ``\\t``, ``\\r``), as on a command line.

    Raises:
        TemplateError: the file does not exist, and the argument is not the text of a template.
    """
    is_text = any(character in given for character in "{}\n")
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        is_file = False
    if is_file or not is_text:
        return read_text(Path(given), MAX_TEMPLATE_BYTES, TemplateError)
    return given if "\n" in given else re.sub(r"\\[nrt]", lambda found: _ESCAPES[found[0]], given)


def _find(folder: Path) -> dict[str, str]:
    """Return the templates by name."""
    return _main(folder) | {
        path.stem: read_text(path, MAX_TEMPLATE_BYTES, TemplateError)
        for path in sorted((folder / ADDITIONAL).glob("*.jinja"))
    }


def _main(folder: Path) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.exists():
        return {DEFAULT: read_text(path, MAX_TEMPLATE_BYTES, TemplateError)}
    for file in ("chat_template.json", "tokenizer_config.json"):
        value = read_object(folder / file, TemplateError).get("chat_template")
        if value is not None:
            return _named(value, folder / file)
    return {}


def _named(value: Any, path: Path) -> dict[str, str]:
    """Normalise a template, templates by name, or a list of ``{"name": ..., "template": ...}`` to templates by name."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    entries = value if isinstance(value, list) else []
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)]
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if not named or len(named) < len(entries):
        raise TemplateError(f"chat_template in {path} must be a string or a list of named templates")
    return named


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise TemplateError(f"the chat template {name} is larger than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as cause:
        raise TemplateError(f"the chat template {name} is not valid: {cause.message} (line {cause.lineno})") from cause
    except _FAULTS as cause:
        raise TemplateError(f"the chat template {name} is not valid: {_said(cause)}") from cause


def _calls(message: Mapping[str, Any]) -> bool:
    """Return whether a message has tool calls or a tool result."""
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": f"{message.get('content') or ''}{_MARK}"}


def _up_to_mark(text: str) -> str:
    """Return the text before the mark; a template that strips contents has removed the trailing space of the mark."""
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise TemplateError("the chat template does not write the content of the last message: it cannot be continued")
    return before if after.startswith(_MARK[-1]) else before.rstrip()


def _bounded(parts: Any) -> str:
    """Join the output of a template as it is generated, to stop it in time."""
    written: list[str] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_RENDERED_CHARACTERS:
            raise TemplateError(f"the chat template writes more than {MAX_RENDERED_CHARACTERS} characters")
        written.append(part)
    return "".join(written)


def _refusal(cause: BaseException) -> TemplateError:
    if isinstance(cause, TemplateError):
        return cause
    if isinstance(cause, _Refused):
        return TemplateError(f"the chat template refuses the messages: {_said(cause)}")
    return TemplateError(f"the chat template failed on the messages: {_said(cause)}")


def _said(cause: BaseException) -> str:
    """Describe an exception in one line, with its type unless it is Jinja's (``KeyError: 'x'``)."""
    message = " ".join(str(cause).split())
    return message if isinstance(cause, jinja2.TemplateError) and message else f"{type(cause).__name__}: {message}"


def _plain(value: Any, name: str) -> Any:
    """Copy JSON-like data, so that a template gets no object with methods of its own.

    Raises:
        TemplateError: other objects are in it.
    """
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{rank}]") for rank, item in enumerate(value)]
    raise TemplateError(f"{name} must be JSON-like data, not {type(value).__name__}")


# --------------------------------------------------------------------------------------------------------------
# Environment


class _Refused(jinja2.TemplateError):
    """Error raised by ``raise_exception``."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox with bounded operator results; ``range`` is bounded by Jinja (``MAX_RANGE``)."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for sized, count in ((left, right), (right, left)):
            if hasattr(sized, "__len__") and isinstance(count, int) and len(sized) * count > MAX_RENDERED_CHARACTERS:
                raise SecurityError(f"repetition makes more than {MAX_RENDERED_CHARACTERS} items")
        if operator == "**" and isinstance(left, int) and left.bit_length() * right > MAX_POWER_BITS:
            raise SecurityError(f"power has more than {MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The ``{% generation %}`` tag, which marks the assistant's text for training; the text is rendered normally."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace without private names, which could shadow Python's own."""

    def __init__(*args: Any, **values: Any) -> None:
        # As Jinja: `namespace(self=1)` is allowed.
        self, attributes = args[0], dict(*args[1:], **values)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the private attribute {name}")


def _environment(now: Callable[[], datetime.datetime]) -> jinja2.Environment:
    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "namespace": _Namespace,
        "dict": _make_dict,
    }
    del environment.globals["lipsum"]  # filler text of any length: useless, and unbounded
    return environment


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """``dict(...)`` as a function: the class itself would expose its attributes."""
    return dict(*args, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
