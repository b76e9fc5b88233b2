"""Model families from outside of the package: named by the user, or installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import FAMILIES, Family

GROUP = "jaxinfer.families"
"""Entry points: the name is an architecture of config.json, the value ``module:NAME`` of a `Family`."""


OWN = "jaxinfer"
"""As a family: one of the package's own, whatever others have installed."""


def find_families(config_json: Mapping[str, Any], family: str = "auto") -> dict[str, Family]:
    """Find families beside the known ones, by architecture.

    Args:
        family: "module:NAME" is that of whatever config.json names; "auto" looks for those that installed packages have
            for it, and "jaxinfer" for none.

    This imports, and so runs, code: what the user names, or what somebody has installed. A model's folder only says
    which of the installed ones it needs.

    Raises:
        ConfigError: there is no such module or name in it, or it is no `Family`.
    """
    listed = config_json.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if family == OWN:
        return {}
    if family != "auto":
        return dict.fromkeys(names, _load(importlib.metadata.EntryPoint("family", family, GROUP)))
    installed = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    return {name: _load(installed[name]) for name in names if name in installed and name not in FAMILIES}


def _load(point: importlib.metadata.EntryPoint) -> Family:
    if point.pattern.match(point.value) is None or ":" not in point.value:
        others = f"auto, {OWN} or " if point.name == "family" else ""
        raise ConfigError(f"{point.name} = {point.value!r} must be {others}module:NAME")
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{point.name} = {point.value!r} cannot be imported: {error}") from error
    if not isinstance(found, Family):
        raise ConfigError(f"{point.name} = {point.value!r} is a {type(found).__name__}, and must be a Family")
    return found
