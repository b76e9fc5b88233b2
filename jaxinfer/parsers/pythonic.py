"""Tool calls as a Python list: ``[f(a=1), g(b="x")]`` (Llama)."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable, Sequence

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.forms import (
    Form,
    FormError,
    Function,
    Node,
    check_names,
    check_parts,
    const,
    either,
    optional,
    regex,
    row,
    several,
    unmarked,
)
from jaxinfer.parsers.literals import MOST_PARAMETERS, Literals, listed
from jaxinfer.parsers.source import Markers, Source, Wait
from jaxinfer.parsers.tools import MOST_PYTHON, Tools, literal_json, parsed, quoted
from jaxinfer.parsers.values import LANGUAGE, MAX_NAME, close_fence

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_FENCE = "```"
_LIST = Markers(_BEGIN, _END, _FENCE, "[")
_AFTER_NAME = re.compile(r"[^\w.]")
_BRACKETS = re.compile(r"""["'(\[{)\]}]""")
_QUOTES = {quote: re.compile(rf"[{quote}\\\n]") for quote in "'\""}
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def pythonic(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse lists of calls with literals as keyword arguments, anywhere. A call is emitted when it is complete, because
    only then is it known to be one. Since no marker identifies calls, they must name a function of the request."""
    while marker := (yield from source.until(_LIST, emitter.content)):
        if marker in (_BEGIN, _END):
            emitter.gap()
            continue
        source.copy(marker)
        if marker == _FENCE:
            yield from source.skip(LANGUAGE)
            yield from source.skip_space()
        if marker == "[" or (yield from source.starts("[")):
            yield from _list(source, emitter, tools)
        else:
            emitter.content(source.copied())


def _list(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Read a list after its bracket. Elements that are not calls become content, and so does a list without calls."""
    calls = emitter.calls
    while (is_call := (yield from _call(source, emitter, tools))) is not None:
        text = source.copied()
        source.copy()
        if not is_call:
            emitter.content(text)
        yield from source.skip_space()
        if (yield from source.starts("]")):
            break
        yield from source.starts(",")
        yield from source.skip_space()
        if (yield from source.starts("]")):
            break
    text = source.copied()
    if is_call is None or emitter.calls == calls:
        emitter.content(text)
    else:
        yield from source.attempt(close_fence(source))


def _call(source: Source, emitter: Emitter, tools: Tools) -> Wait[bool | None]:
    """Read one call. False: its arguments are not literals by keyword. None: the text is not a call."""
    yield from source.skip_space()
    parts: list[str] = []
    if (yield from source.scan(_AFTER_NAME, parts.append)) != "(":
        return None
    head = "".join(parts)
    if not head or len(head) > MAX_NAME or not tools.know(head):
        return None
    size = yield from _parenthesis(source, parts)
    if size is None:
        return None
    arguments = _arguments("".join(parts)) if size <= MOST_PYTHON else None
    if arguments is not None:
        emitter.start(tools.named(head) or head)
        emitter.arguments(arguments)
        emitter.end()
    return arguments is not None


def _parenthesis(source: Source, parts: list[str]) -> Wait[int | None]:
    """Read up to the bracket that closes the next one, tracking only brackets and quotes.

    Returns:
        Number of characters, strings not counted. None: no bracket closes it.
    """
    depth = size = 0
    while True:
        first = len(parts)
        character = yield from source.scan(_BRACKETS, parts.append)
        if not character:
            return None
        parts.append(source.take(1))
        size += sum(map(len, parts[first:]))
        if character in _QUOTES:
            yield from _string(source, parts, character)
        depth += _DEPTH.get(character, 0)
        if depth == 0:
            return size


def _string(source: Source, parts: list[str], quote: str) -> Wait[None]:
    """Read a string after its first quote, single or triple quoted."""
    end = quote
    if (yield from source.starts(quote)):
        parts.append(quote)
        if not (yield from source.starts(quote)):
            return
        parts.append(quote)
        end = 3 * quote
    while character := (yield from source.scan(_QUOTES[quote], parts.append)):
        if (yield from source.starts(end)):
            parts.append(end)
            return
        parts.append(source.take(1))
        if character == "\n" and end == quote:  # Python allows it as an escape only
            parts[-1] = "\\n"
        if character == "\\":
            yield from source.peek(1)
            parts.append(source.take(1))


def _arguments(call: str) -> str | None:
    """Return JSON of a call's arguments; None if they are not literals by keyword."""
    node = parsed(call)
    if not isinstance(node, ast.Call) or node.args:
        return None
    found: dict[str, str] = {}
    for each in node.keywords:
        value = literal_json(each.value)
        if each.arg is None or value is None:
            return None
        found.setdefault(quoted(each.arg), value)
    return f"{{{', '.join(f'"{name}": {value}' for name, value in found.items())}}}"


# ---- form, see `jaxinfer.parsers.forms.Form`

_CALLABLE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def pythonic_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    """Return the form of unmarked calls: an answer that begins with a bracket is a list of calls."""
    check_names(functions, _CALLABLE)
    calls = [row(const(f"{each.name}("), *_by_name(each), const(")")) for each in functions]
    some = several(either(calls), parallel=parallel, between=regex(", ?"))
    return unmarked(row(optional(const(_BEGIN)), const("["), some, const("]"), optional(const(_END))), "[")


def _by_name(function: Function) -> Iterable[Node]:
    """Return the keyword arguments in order, with commas between those that are present."""
    check_parts(function)
    literals = Literals(function)
    if function.open:
        pair = row(regex("[A-Za-z_][A-Za-z0-9_]{0,63}="), literals.any())
        return [optional(several(pair, parallel=True, between=regex(", ?")))]
    for name in function.parameters:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise FormError(function, "parameters.properties", f"has {name!r:.100}, which is no name in Python")
    if len(function.parameters) > MOST_PARAMETERS:
        raise FormError(
            function, "parameters.properties", f"are more than {MOST_PARAMETERS}, too many for Python's calls"
        )
    pairs = [(row(const(f"{name}="), literals.of(name)), function.needs(name)) for name in function.parameters]
    return [listed(pairs)] if pairs else []
