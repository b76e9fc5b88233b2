"""Conversion of ``tools`` and ``tool_choice`` to a structured output constraint. No jax."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.parsers.forms import Form, FormError, Function, Node, const, either, regex, schema_of
from jaxinfer.parsers.harmony import harmony_answer
from jaxinfer.parsers.registry import GPT_OSS, TOOL_FORMS, Parsers
from jaxinfer.sampling_params import RequestError, SamplingParams, StructuredOutputs

_EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY: Mapping[str, Any] = {"type": "object"}
_MODES = ("auto", "required")
_MOST_TOOLS, _MOST_PARTS = 1024, 50_000


@dataclasses.dataclass(frozen=True)
class Choice:
    """A parsed ``tool_choice``.

    Attributes:
        mode: ``none``, ``auto``, ``required``, or ``named``: one call of one function.
        names: names of the functions that may be called; None: all functions.
    """

    mode: str
    names: Sequence[str] | None = None

    @property
    def must(self) -> bool:
        return self.mode in ("required", "named")


def choice_of(given: Any) -> Choice:
    """Parse OpenAI's ``tool_choice``: a word, a function by name, or ``allowed_tools``.

    Raises:
        RequestError: the value has none of these forms.
    """
    if given is None:
        return Choice("auto")
    if isinstance(given, str) and given in ("none", *_MODES):
        return Choice(given)
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function":
        _check_fields("tool_choice", given, ("type", "function"))
        return Choice("named", [_name_of("tool_choice", given)])
    if kind != "allowed_tools":
        _refuse("tool_choice", given, "must be none, auto, required, a function by name, or allowed_tools")
    _check_fields("tool_choice", given, ("type", "allowed_tools"))
    return _allowed(given.get("allowed_tools"))


def held(
    sampling: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, given: Any, parallel: bool, parsers: Parsers
) -> dict[str, Any]:
    """Return the sampling fields with the constraint that the tools add to the output, if they add one.

    Args:
        given: ``tool_choice`` of the request.
        parallel: whether several calls may be made.
        parsers: parsers of the output.

    Raises:
        RequestError: naming the field: it is invalid, or cannot be enforced in the format of this model's calls.
    """
    choice, fields = choice_of(given), dict(sampling)
    if choice.names is not None or choice.must:
        _check_callable(choice, tools, given, parsers)
    answer = fields.get("structured_outputs")
    if not tools or choice.mode == "none" or parsers.tool_calls is None:
        behind_thoughts = parsers.reasoning == GPT_OSS and not _in_reasoning(answer)
        return {**fields, **_tagged(harmony_answer(_format_of(answer)))} if answer and behind_thoughts else fields
    if not (choice.must or choice.names is not None or answer or any(map(_says_strict, tools))):
        return fields
    functions = [_loosened(each, strict or choice.must) for each, strict in _functions(tools, choice)]
    form = _form(functions, choice, parallel, parsers)
    made = form.calls if choice.must else form.beside(_format_of(answer)) if answer else form.text
    _check_size(made)
    return {**fields, **_tagged(made, in_reasoning=_in_reasoning(answer))}


def _tagged(made: Node, *, in_reasoning: bool = False) -> dict[str, Any]:
    """Return the sampling field that constrains an output by a structural tag's format."""
    tag = {"type": "structural_tag", "format": made}
    return {"structured_outputs": {"structural_tag": tag, "enable_in_reasoning": in_reasoning}}


def _in_reasoning(asked: Any) -> bool:
    """Whether the constraint applies to the reasoning, too."""
    name = "enable_in_reasoning"
    return (asked.get(name) if isinstance(asked, Mapping) else getattr(asked, name, None)) is True


def _form(functions: Sequence[Function], choice: Choice, parallel: bool, parsers: Parsers) -> Form:
    assert parsers.tool_calls is not None
    try:
        return TOOL_FORMS[parsers.tool_calls](functions, parallel=parallel and choice.mode != "named")
    except FormError as error:
        raise RequestError(error.place, error.reason) from error


def _check_size(made: Node) -> None:
    """Check the size of a format before it is serialized, which repeats its shared nodes."""
    parts: list[Any] = [made]
    for _ in range(_MOST_PARTS):
        if not parts:
            return
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    raise RequestError("tools", f"make a grammar of more than {_MOST_PARTS} parts: their schemas are too much")


def _check_callable(choice: Choice, tools: Sequence[Mapping[str, Any]] | None, given: Any, parsers: Parsers) -> None:
    if not tools:
        _refuse("tool_choice", given, "needs tools, and there are none")
    if parsers.tool_calls is None:
        _refuse("tool_choice", given, "is not served: no parser of this model's tool calls is known")
    known = [_name_of(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    for name in choice.names or ():
        if name not in known:
            _refuse("tool_choice", name, "is no function of tools")


def _functions(tools: Sequence[Mapping[str, Any]], choice: Choice) -> list[tuple[Function, bool]]:
    """Return the functions that may be called, and whether each is strict."""
    if len(tools) > _MOST_TOOLS:
        raise RequestError("tools", f"must hold at most {_MOST_TOOLS}, not {len(tools)}")
    found = [_function(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    return [each for each in found if choice.names is None or each[0].name in choice.names]


def _function(place: str, tool: Mapping[str, Any]) -> tuple[Function, bool]:
    name, function = _name_of(place, tool), tool["function"]
    parameters, strict = function.get("parameters"), function.get("strict")
    if parameters is not None and not isinstance(parameters, Mapping):
        _refuse(f"{place}.function.parameters", parameters, "must be an object")
    if strict not in (None, True, False):
        _refuse(f"{place}.function.strict", strict, "must be true or false")
    schema = _EMPTY if parameters is None else {"type": "object", **parameters}
    if schema["type"] != "object":
        _refuse(f"{place}.function.parameters.type", schema["type"], "must be object")
    return Function(f"{place}.function", name, schema), strict is True


def _says_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") not in (None, False)


def _loosened(function: Function, held_to_schema: bool) -> Function:
    """Allow any arguments of a function, unless they are constrained by its schema."""
    return function if held_to_schema else dataclasses.replace(function, schema=_ANY)


def _format_of(asked: Mapping[str, Any] | StructuredOutputs) -> Node:
    """Convert a structured output constraint to a structural tag's format."""
    constraint = SamplingParams(structured_outputs=asked).grammar
    assert constraint is not None
    kind, text = constraint
    return _FORMATS[kind](text)


def _inner(tag: Mapping[str, Any]) -> Node:
    if "format" not in tag:
        raise RequestError("structured_outputs.structural_tag", "must have a format, beside tools")
    return dict(tag["format"]) if isinstance(tag["format"], Mapping) else {"type": tag["format"]}


_FORMATS: Mapping[str, Callable[[str], Node]] = {
    "json": lambda text: schema_of(json.loads(text), "structured_outputs.json"),
    "json_object": lambda text: schema_of(_ANY, "structured_outputs.json_object"),
    "choice": lambda text: either(map(const, json.loads(text))),
    "regex": regex,
    "grammar": lambda text: {"type": "grammar", "grammar": text},
    "structural_tag": lambda text: _inner(json.loads(text)),
}


def _allowed(given: Any) -> Choice:
    place = "tool_choice.allowed_tools"
    if not isinstance(given, Mapping):
        _refuse(place, given, "must be an object")
    _check_fields(place, given, ("mode", "tools"))
    if given.get("mode") not in _MODES:
        _refuse(f"{place}.mode", given.get("mode"), "must be auto or required")
    listed = given.get("tools")
    if not isinstance(listed, list) or not listed:
        _refuse(f"{place}.tools", listed, "must be a list that is not empty")
    return Choice(str(given["mode"]), [_name_of(f"{place}.tools[{at}]", each) for at, each in enumerate(listed)])


def _name_of(place: str, tool: Any) -> str:
    """Return the name in ``{"type": "function", "function": {"name": ...}}``."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        _refuse(place, tool, "must be of type function")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        _refuse(f"{place}.function.name", name, "must be a string that is not empty")
    return name


def _check_fields(place: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            _refuse(f"{place}.{name:.50}", given[name], f"is no field of it: they are {', '.join(names)}")


def _refuse(place: str, value: Any, reason: str) -> NoReturn:
    raise RequestError(place, f"={reprlib.repr(value)} {reason}")
