"""Dataclasses as frames: they arrive as sent, and invalid messages are rejected."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxinfer.engine.execution.commands import COMMANDS, Encode
from jaxinfer.parallel.frames import ChannelError
from jaxinfer.parallel.messages import decode, encode


class Rows(NamedTuple):
    tokens: np.ndarray
    owners: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Message:
    number: int
    rows: Rows
    hosts: Sequence[int]
    fields: Mapping[str, np.ndarray]


def sent(message: Any) -> Any:
    """Return a message after encoding and decoding."""
    fields, arrays = encode(message)
    return decode(type(message), json.loads(json.dumps(fields)), arrays)


@pytest.mark.parametrize("owners", [None, np.arange(3)])
def test_what_arrives_is_what_was_sent(owners: np.ndarray | None) -> None:
    message = Message(3, Rows(np.ones(3), owners), range(4), {"seed": np.int32([7]), "top_p": np.float32([0.5])})
    found = sent(message)
    assert (found.number, found.hosts) == (3, (0, 1, 2, 3))
    assert isinstance(found.rows, Rows)
    np.testing.assert_array_equal(found.rows.tokens, message.rows.tokens)
    assert (found.rows.owners is None) == (owners is None)
    assert {name: array.tolist() for name, array in found.fields.items()} == {"seed": [7], "top_p": [0.5]}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "its fields are"),
        ({"number": 1}, "its fields are number"),
        ([1], "no attribute 'keys'"),
        ({"number": "1", "rows": [], "hosts": [], "fields": {}}, "'1' is no value"),
        ({"number": 1.5, "rows": [], "hosts": [], "fields": {}}, "1.5 is no value"),
        ({"number": 1, "rows": [{"array": 7}], "hosts": [], "fields": {}}, "out of range"),
        ({"number": 1, "rows": [{"array": "x"}], "hosts": [], "fields": {}}, "is no value"),
        ({"number": 1, "rows": [], "hosts": [], "fields": {"map": {}}}, "missing 1 required"),
        ({"number": 1, "rows": [None] * 3, "hosts": [], "fields": {"map": {}}}, "takes from 2 to 3"),
        ({"number": 1, "rows": 1, "hosts": [], "fields": {"map": {}}}, "must be an iterable"),
        ({"number": 1, "rows": [None], "hosts": [{"__class__": "x"}], "fields": {"map": {}}}, "is no value"),
    ],
)
def test_what_is_no_message_is_refused(fields: Any, why: str) -> None:
    with pytest.raises(ChannelError, match=f"it sent what is no Message: .*{why}"):
        decode(Message, fields, [np.ones(1)])


def test_an_image_arrives_as_it_was_sent() -> None:
    patches, seen = np.full((4, 3), 255, np.uint8), np.array([True, False])
    found = sent(Encode(patches, {"seen": seen, "count": np.asarray(4)}, np.arange(2, dtype=np.int32)))
    np.testing.assert_array_equal(found.patches, patches)
    np.testing.assert_array_equal(found.layout["seen"], seen)
    assert found.layout["count"] == 4
    assert found.rows.tolist() == [0, 1]


def test_every_command_has_fields_that_can_be_sent() -> None:
    """`tests/engine/distributed/test_leader.py` (two-process engine) tests that each arrives unchanged."""
    assert len(COMMANDS) > 10
    for kind in COMMANDS.values():
        assert dataclasses.is_dataclass(kind)
        assert dataclasses.fields(kind)
