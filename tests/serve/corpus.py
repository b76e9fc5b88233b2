"""Reader of tests/serve/bad_inputs.yaml, which documents its tags at the top."""

from __future__ import annotations

import pathlib
from typing import Any

import yaml
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]

FILE = pathlib.Path(__file__).with_name("bad_inputs.yaml")


def load() -> dict[str, Any]:
    return yaml.load(FILE.read_bytes(), _Loader)  # noqa: S506 - a safe loader with its own tags


class _Loader(yaml.SafeLoader):
    pass


def _items(loader: yaml.SafeLoader, node: yaml.Node) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _repeat(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    what, times = _items(loader, node)
    return what * times


def _join(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    return "".join(_items(loader, node))


def _range(loader: yaml.SafeLoader, node: yaml.Node) -> list[int]:
    return list(range(int(loader.construct_scalar(node))))


def _biases(loader: yaml.SafeLoader, node: yaml.Node) -> dict[str, float]:
    return {str(token): 1.0 for token in range(int(loader.construct_scalar(node)))}


def _latin(loader: yaml.SafeLoader, node: yaml.Node) -> bytes:
    return loader.construct_scalar(node).encode("latin-1")


def _nested(loader: yaml.SafeLoader, node: yaml.Node) -> bytes:
    """Return a GenerateRequest with a template variable of that many nested lists."""
    parts, size = [b""], 0
    for _ in range(int(loader.construct_scalar(node))):
        for tag in (b"\x0a", b"\x32"):  # ListValue.values, Value.list_value
            head = tag + _VarintBytes(size)
            parts.append(head)
            size += len(head)
    for tag in (b"\x12", b"\x0a", b"\x22", b"\x2a"):  # the entry's value, Struct.fields, variables of Chat, chat
        head = tag + _VarintBytes(size)
        parts.append(head)
        size += len(head)
    return b"".join(reversed(parts))


for _tag in (_repeat, _join, _range, _biases, _latin, _nested):
    _Loader.add_constructor(f"!{_tag.__name__.removeprefix('_')}", _tag)
