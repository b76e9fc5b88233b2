"""Tests of the limit on values in a message, which is checked before the message is parsed."""

import asyncio
import contextlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.decode import MAX_NUMBERS, _Count, decode
from tests.serve.evil import GENERATE, GRPC, field, number_of
from tests.yardstick import slowness

VALUES = 1000

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def decoded(raw: bytes, values: int = VALUES) -> pb.GenerateRequest:
    return asyncio.run(decode(pb.GenerateRequest, raw, values))


def refused(raw: bytes, values: int = VALUES) -> ServeError:
    with pytest.raises(ServeError) as caught:
        decoded(raw, values)
    assert caught.value.kind is Kind.INVALID
    return caught.value


def conversation(messages: int, content: str = "") -> pb.GenerateRequest:
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="u", content=content)] * messages))
    request.chat.template_variables.update({"a": {"b": [1, None, "x", {"c": True}]}})
    request.sampling.logit_bias.update({3: 1.5, 4: -2.0})
    request.sampling.stop_token_ids.extend(range(300))
    return request


def test_a_large_message_is_parsed_as_a_small_one():
    for request in (conversation(3, "x" * 100_000), pb.GenerateRequest(prompt="🦊" * 50_000)):
        assert decoded(request.SerializeToString()) == request


@patient
@given(st.integers(0, 8))
def test_what_is_counted(messages):
    """The count is one for a request field, one per message and two inside each; other fields do not add to it."""

    def count(request: pb.GenerateRequest) -> int:
        raw = request.SerializeToString()
        counting = _Count(raw, VALUES)
        counting.within(pb.GenerateRequest.DESCRIPTOR, 0, len(raw))
        assert counting._numbers == MAX_NUMBERS - 300
        return 4 * VALUES - counting._fields

    assert count(conversation(messages, "x")) == count(conversation(0)) + 3 * messages


def test_too_many_are_refused_soon():
    """Counting stops at the limit, however many values follow."""
    attack = next(each for each in GRPC if each.door == GENERATE and each.name == "empty messages")
    few, many = attack.make(1 << 17), attack.make(1 << 23)
    took = {}
    for raw in (few, many):
        begun = time.process_time()
        assert "more than 1000 values" in refused(raw).message
        took[len(raw)] = time.process_time() - begun
    assert took[len(many)] < 2.0 * slowness()  # counting all values would take several seconds


def test_ids_are_counted_however_they_are_written():
    packed = field(number_of(pb.GenerateRequest, "token_ids"), field(1, b"\xff\x01" * (MAX_NUMBERS + 1)))
    assert refused(packed).field == "token_ids.ids"
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 50_000))
    assert decoded(ids.SerializeToString()) == ids


@pytest.mark.parametrize(
    "more",
    [b"\x0a\x05abc", b"\x0b\x0c", b"\x0a\xff", b"\x80", b"\x1a\x02\xff\xff", b"\x0a" + b"\xff" * 11],
    ids=["cut short", "a group", "no length", "no tag", "no UTF-8", "an endless number"],
)
def test_what_is_no_message_is_refused(more):
    raw = pb.GenerateRequest(request_id="x" * 100_000).SerializeToString() + more
    assert "no valid jaxinfer.v1.GenerateRequest" in refused(raw).message


@patient
@given(st.binary(min_size=1, max_size=40))
def test_noise_never_breaks_it(noise):
    raw = pb.GenerateRequest(request_id="x" * 70_000).SerializeToString() + noise
    with contextlib.suppress(ServeError):
        assert decoded(raw) == pb.GenerateRequest.FromString(raw)
