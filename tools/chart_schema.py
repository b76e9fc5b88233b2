"""What `config` of the Helm chart may hold, made of the settings of a server: helm refuses by name what is no setting.

`python -m tools.settings_tables` writes it into the chart's values.schema.json, whose rest is written by hand.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.cli.flags import attribute_docs
from jaxinfer.config import EngineConfig
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.settings import TIMES, ServeConfig

FILE = pathlib.Path(__file__).resolve().parent.parent / "configs/kubernetes/jaxinfer/values.schema.json"

OF_THE_CHART = (
    *("host", "metrics_host", "compilation_cache_dir", "api_keys", "tls_cert", "tls_key"),
    *("num_processes", "process_id", "coordinator_address", "group_key_file"),
    *("kv_events", "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_insecure"),
)
"""Settings that the chart makes of other values."""

UNFIT = ("tls_client_ca",)
"""Those that cannot be in a pod: the probes of Kubernetes have no certificate."""

_NESTED: Mapping[str, type] = {"limits": ServeLimits, "engine": EngineConfig}
_TYPES: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_DOORS = ("grpc_port", "metrics_port", "control_port")
_DOOR = {"type": "integer", "minimum": 1024, "maximum": 65535}  # user 10001 may not take lower ones everywhere
_NEEDED = ("model", "grpc_port", "http_port", "metrics_port", "drain_delay", "drain_seconds")
_TIME = {"exclusiveMinimum": 0, "maximum": 2_000_000}


def with_settings(text: str) -> str:
    """The file as it must be."""
    schema = json.loads(text)
    schema["properties"]["config"] = config_schema()
    return json.dumps(schema, indent=2) + "\n"


def config_schema() -> dict[str, Any]:
    """A JSON schema of the settings in a file for a server in a pod."""
    schema = _schema(ServeConfig, (*OF_THE_CHART, *UNFIT))
    for name, kind in _NESTED.items():
        schema["properties"][name] = _schema(kind, ())
    for name in _DOORS:
        schema["properties"][name] |= _DOOR
    schema["properties"]["http_port"] |= {"anyOf": [_DOOR, {"enum": ["off", False]}]}
    for name in TIMES:
        schema["properties"][name] |= _TIME
    schema["properties"]["drain_delay"] |= {"minimum": 0, "maximum": 86400}
    schema["properties"]["drain_seconds"] |= {"maximum": 86400}
    schema["required"] = list(_NEEDED)
    return schema


def _schema(kind: type, skip: Collection[str]) -> dict[str, Any]:
    hints, docs = typing.get_type_hints(kind, include_extras=True), attribute_docs(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in skip]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"description": docs.get(name, ""), **_type(hints[name])} for name in names},
    }


def _type(hint: Any) -> dict[str, Any]:
    """Of a field. What is converted before it is checked (``off``, mappings for JSON) may be anything."""
    if isinstance(hint, types.UnionType):
        parts = [_type(part) for part in typing.get_args(hint) if part is not types.NoneType]
        kinds = [part["type"] for part in parts]
        return {key: value for part in parts for key, value in part.items()} | {"type": [*kinds, "null"]}
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": _type(typing.get_args(hint)[0])}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}
