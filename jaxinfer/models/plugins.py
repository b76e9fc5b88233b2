"""Model families from outside the package: named by the user, or from installed entry points."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigError
from jaxinfer.models.registry import FAMILIES, Family

GROUP = "jaxinfer.models.plugins"
"""Entry point group: the name is an architecture of config.json, the value ``module:NAME`` of a `Family`."""


OWN = "jaxinfer"
"""Value of ``family`` that allows only the package's own families and ignores installed entry points."""


def find_families(config_json: Mapping[str, Any], family: str = "auto") -> dict[str, Family]:
    """Find families by architecture in addition to the built-in ones.

    Args:
        family: "module:NAME" is used for every architecture of config.json; "auto" looks for installed entry points of
            the architectures; "jaxinfer" uses no external family.

    This imports, and so runs, code that the user names or has installed. A model folder only selects among the
    installed entry points.

    Raises:
        ConfigError: the module or the name does not exist, or is not a `Family`.
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
