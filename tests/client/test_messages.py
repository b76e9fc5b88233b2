"""Tests of the client's conversion of arguments to messages and of statuses to errors, without a server."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import json_format

from jaxinfer import client as c
from jaxinfer.client.errors import from_status
from jaxinfer.client.requests import generate_request


def test_all_of_a_conversation_is_sent() -> None:
    message = {"role": "user", "content": "Hi", "name": "me"}
    tool = {"type": "function", "function": {"name": "f"}}
    options = {"tools": [tool, tool], "template_variables": {"thinking": True}, "template": "t"}
    request = generate_request(None, None, [message], {**options, "add_generation_prompt": False, "priority": 0})
    chat = json_format.MessageToDict(request.chat, preserving_proto_field_name=True)
    assert chat == {
        "messages": [{"role": "user", "content": "Hi", "fields": {"name": "me"}}],
        "tools": [tool, tool],
        "template_variables": {"thinking": True},
        "template": "t",
        "add_generation_prompt": False,
    }
    assert request.HasField("priority")


def test_an_empty_list_is_not_none() -> None:
    assert generate_request("a", None, None, {"allowed_token_ids": []}).sampling.HasField("allowed_token_ids")
    assert not generate_request("a", None, None, {"allowed_token_ids": None}).sampling.HasField("allowed_token_ids")


def test_speculation_is_sent_by_its_fields() -> None:
    for given in ({}, {"enabled": False}, {"max_tokens": 0}, {"max_tokens": 3, "acceptance": "typical"}):
        sampling = generate_request("a", None, None, {"speculation": {"enabled": None, **given}}).sampling
        assert sampling.HasField("speculation")
        assert {field.name: value for field, value in sampling.speculation.ListFields()} == given
    for wrong, sentence in (
        ({"foo": 1}, "speculation.foo is no field of it: they are enabled, max_tokens, acceptance"),
        ({"max_tokens": "x"}, "speculation.max_tokens='x' cannot be sent"),
        (1, "speculation=1 must be a mapping"),
    ):
        with pytest.raises(ValueError, match=sentence):
            generate_request("a", None, None, {"speculation": wrong})


def test_structured_outputs_are_sent_by_their_fields() -> None:
    schema = {"type": "null"}
    for given, sent in (
        ({"regex": "a", "json": None}, {"regex": "a"}),
        ({"json": schema}, {"json": '{"type": "null"}'}),
        ({"json": "{}"}, {"json": "{}"}),
        ({"structural_tag": {"type": "a"}}, {"structural_tag": '{"type": "a"}'}),
        ({"choice": ("a", "b")}, {"choice": ["a", "b"]}),
        ({"json_object": True}, {"json_object": True}),
    ):
        message = generate_request("a", None, None, {"structured_outputs": given}).sampling.structured_outputs
        found = {field.name: value for field, value in message.ListFields()}
        assert {name: list(each) if name == "choice" else each for name, each in found.items()} == sent
    for wrong, sentence in (
        ({"ebnf": "a"}, "structured_outputs.ebnf is no field of it: they are json, json_object, regex, choice"),
        ({"choice": "ab"}, "structured_outputs.choice='ab' must be a list"),
        ("a", "structured_outputs='a' must be a mapping"),
    ):
        with pytest.raises(ValueError, match=sentence):
            generate_request("a", None, None, {"structured_outputs": wrong})


def test_a_limit_is_no_full_queue() -> None:
    """A size limit and a full queue are both RESOURCE_EXHAUSTED; only a full queue is worth a retry."""
    error = from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the body is too large", ())
    assert type(error) is c.ResourceExhausted


def test_images_are_sent_as_parts() -> None:
    text = {"type": "text", "text": "hi"}
    low = {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}
    held = {"type": "image", "image": b"file", "min_pixels": 3}
    request = generate_request(None, None, [{"role": "user", "content": [text, low, held]}], {})
    message = request.chat.messages[0]
    assert not message.HasField("content")
    assert not message.HasField("fields")
    first, second, third = message.parts
    assert first.text == "hi"
    assert (second.image.url, second.image.max_pixels) == ("https://a/b.png", 512 * 512)
    assert (third.image.data, third.image.min_pixels) == (b"file", 3)


def test_videos_are_sent_as_frames(tmp_path):
    (path := tmp_path / "a.png").write_bytes(b"second")
    part = {"type": "video", "video": [b"first", path], "fps": 4, "max_pixels": 9}
    (sent,) = generate_request(None, None, [{"role": "user", "content": [part]}], {}).chat.messages[0].parts
    assert list(sent.video.frames) == [b"first", b"second"]
    assert (sent.video.fps, sent.video.max_pixels) == (4, 9)
    assert not sent.video.HasField("min_pixels")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video"},
        {"type": "video", "video": b"file"},
        {"type": "video", "video": [7]},
        {"type": "video", "video": [b"file"], "fps": "x"},
        {"type": "image"},
        {"type": "image", "image": 7},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image_url", "image_url": {}},
        {"type": "image", "image": b"file", "max_pixels": "x"},
    ],
)
def test_what_is_no_image_is_not_sent(part: dict) -> None:
    with pytest.raises(ValueError, match=r"cannot be sent|must be a list"):
        generate_request(None, None, [{"role": "user", "content": [part]}], {})


def test_beside_an_image_there_are_texts() -> None:
    for part in ({"type": "audio"}, {"type": "text"}, "hi"):
        with pytest.raises(ValueError, match="text=None cannot be sent"):
            generate_request(None, None, [{"role": "user", "content": [{"type": "image", "image": b"a"}, part]}], {})
