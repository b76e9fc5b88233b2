"""JSON schema of `config` of the Helm chart, derived from the server settings: helm rejects unknown settings by name.

`python -m tools.settings_tables` writes it into the chart's values.schema.json; the rest of that file is hand-written.
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
"""Settings that the chart derives from other values."""

UNFIT = ("tls_client_ca",)
"""Settings that cannot be used in a pod: the probes of Kubernetes have no client certificate."""

_NESTED: Mapping[str, type] = {"limits": ServeLimits, "engine": EngineConfig}
_TYPES: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_DOORS = ("grpc_port", "metrics_port", "control_port")
_DOOR = {"type": "integer", "minimum": 1024, "maximum": 65535}  # user 10001 may not bind lower ports everywhere
_NEEDED = ("model", "grpc_port", "http_port", "metrics_port", "drain_delay", "drain_seconds")
_TIME = {"exclusiveMinimum": 0, "maximum": 2_000_000}


def with_settings(text: str) -> str:
    """Return the schema file with the settings updated."""
    schema = json.loads(text)
    schema["properties"]["config"] = config_schema()
    return json.dumps(schema, indent=2) + "\n"


def config_schema() -> dict[str, Any]:
    """Return a JSON schema of the settings in a file for a server in a pod."""
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
    """Return the schema of a field's type; values converted before validation (``off``, JSON) may be anything."""
    if isinstance(hint, types.UnionType):
        parts = [_type(part) for part in typing.get_args(hint) if part is not types.NoneType]
        kinds = [part["type"] for part in parts]
        return {key: value for part in parts for key, value in part.items()} | {"type": [*kinds, "null"]}
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": _type(typing.get_args(hint)[0])}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}
