"""Parser of the setting ``lora_modules``: the LoRA adapters that are loaded at startup. No jax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxinfer.serve.api.errors import short

MAX_NAME_CHARACTERS = 128
MAX_PATH_CHARACTERS = 4096

_KEYS = ("name", "path", "base_model_name")


def parse_modules(modules: Sequence[str], base: str | None) -> dict[str, str]:
    """Return the adapter folders by name, in the given order.

    Args:
        modules: entries ``NAME=PATH`` or, as in vLLM, ``{"name": ..., "path": ..., "base_model_name": ...}``.
        base: name of the base model, if it is known.

    Raises:
        ValueError: an entry has neither form, a name is used twice or the base model's, or the base model differs.
    """
    found = dict[str, str]()
    for module in modules:
        name, path, model = _parsed(module)
        if name == base:
            raise ValueError(f"{short(module)}: {name!r} is the name of the model itself")
        if name in found:
            raise ValueError(f"{short(module)}: {name!r} is the name of two adapters")
        if model is not None and base is not None and model != base:
            raise ValueError(f"{short(module)}: base_model_name={model!r} is not served here, only {base!r}")
        found[name] = path
    return found


def _parsed(module: str) -> tuple[str, str, str | None]:
    if module.lstrip().startswith("{"):
        return _of_object(module)
    name, equals, path = module.partition("=")
    if not equals:
        raise ValueError(f"{short(module)} must be NAME=PATH")
    return _checked(module, "name", name, MAX_NAME_CHARACTERS), _checked(module, "path", path), None


def _of_object(module: str) -> tuple[str, str, str | None]:
    try:
        fields = json.loads(module)
    except ValueError as error:
        raise ValueError(f"{short(module)} is no JSON: {error}") from error
    if unknown := sorted(set(fields) - set(_KEYS)):
        raise ValueError(f"{short(module)}: {unknown[0]!r} is none of {', '.join(_KEYS)}")
    name = _checked(module, "name", fields.get("name"), MAX_NAME_CHARACTERS)
    model = fields.get("base_model_name")
    base = None if model is None else _checked(module, "base_model_name", model)
    return name, _checked(module, "path", fields.get("path")), base


def _checked(module: str, field: str, value: Any, most: int = MAX_PATH_CHARACTERS) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise ValueError(f"{short(module)}: the {field} must have 1 to {most} printable characters")
    return value
