"""Tests of message contents: text, parts, null, and invalid ones."""

from typing import Any

import pytest

from jaxinfer.sampling_params import RequestError
from jaxinfer.text.contents import GivenImage, asks_for_none, held_image, images_in, message_of, text_of, with_images

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "hello"}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
NOT_TEXT: list[tuple[Any, str]] = [
    ([{"type": "image_url"}], ".content[0].image_url.url"),
    ([{"type": "image_url", "image_url": {"url": 7}}], ".content[0].image_url.url"),
    ([{"type": "image_url", "image_url": None, "uuid": ""}], ".content[0].uuid"),
    ([{**IMAGE, "uuid": 7}], ".content[0].uuid"),
    ([TEXT, {"type": "image_url", "image_url": {"url": "data:", "detail": "fine"}}], ".content[1].image_url.detail"),
    ([IMAGE, {"type": "input_audio", "input_audio": {}}], ".content[1].type"),
    ([TEXT, {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}], ".content[1].type"),
    ([{"type": "video_url", "video_url": {}}], ".content[0].video_url.url"),
    ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], ".content[0].video_url.url"),
    ([{"type": "video", "video": "a.mp4"}], ".content[0].video"),
    ([{"type": "video", "video": [URL, 7]}], ".content[0].video[1]"),
    ([{"type": "image"}], ".content[0].type"),
    ([{"text": "no type"}], ".content[0].type"),
    (["hello"], ".content[0].type"),
    ([None], ".content[0].type"),
    ([[TEXT]], ".content[0].type"),
    ([{"type": "text"}], ".content[0].text"),
    ([{"type": "text", "text": None}], ".content[0].text"),
    ([{"type": "text", "text": ["a"]}], ".content[0].text"),
    (3, ".content"),
    (True, ".content"),
    (TEXT, ".content"),
    (b"bytes", ".content"),
]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_text_parts_are_joined(role: str) -> None:
    parts = [TEXT, {"type": "text", "text": "", "cache_control": {}}, {"type": "text", "text": "world"}]
    for content, text in ((parts, "hello\n\nworld"), (tuple(parts[:1]), "hello"), ([], ""), ("a", "a"), ("", "")):
        assert message_of("messages[0]", {"role": role, "content": content}) == {"role": role, "content": text}


@pytest.mark.parametrize(("content", "where"), NOT_TEXT)
def test_what_is_no_text_is_refused_by_its_place(content: Any, where: str) -> None:
    with pytest.raises(RequestError) as refused:
        message_of("messages[2]", {"role": "user", "content": content})
    assert (refused.value.place, refused.value.field) == (f"messages[2]{where}", "messages")


@pytest.mark.parametrize(("message", "place"), [("Hi", "m"), (None, "m"), ({}, "m.role"), ({"role": 3}, "m.role")])
def test_what_is_no_message_is_refused(message: Any, place: str) -> None:
    with pytest.raises(RequestError) as refused:
        message_of("m", message)
    assert refused.value.place == place


def test_null_is_an_empty_text_unless_calls_stand_beside_it() -> None:
    for role in ("system", "user", "assistant", "tool"):
        for more in ({}, {"tool_calls": []}, {"tool_calls": None}):
            assert message_of("m", {"role": role, "content": None, **more})["content"] == ""
    called = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert message_of("m", called) == called
    assert message_of("m", called, none=False)["content"] == ""


def test_other_fields_that_are_null_are_left_out() -> None:
    """Null fields, as in responses that clients send back, are removed: templates would print "None", or fail."""
    message = {"role": "assistant", "content": "a", "tool_calls": None, "refusal": None, "name": "b"}
    assert message_of("m", message) == {"role": "assistant", "content": "a", "name": "b"}
    assert message_of("m", {"role": "user"}) == {"role": "user"}


def test_values_of_any_size_make_short_refusals() -> None:
    with pytest.raises(RequestError) as refused:
        text_of("content", [{"type": "text", "text": ["x" * 10**6]}])
    assert len(str(refused.value)) < 400


def test_templates_that_ask_for_no_content() -> None:
    assert asks_for_none(["{% if message.content is none %}"])
    assert asks_for_none(["{{ x }}", "{% if m['content'] is not none %}"])
    assert not asks_for_none(["{{ message.content }}"])


def test_images_are_read_at_their_place_and_texts_beside_them_stay_parts() -> None:
    low = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "7"}
    content = [TEXT, IMAGE, {"type": "image_url", "image_url": URL}, low]
    made = message_of("m", {"role": "user", "content": content})["content"]
    assert made[0] == TEXT
    assert [(each.path, each.field, each.source, each.options) for each in made[1:]] == [
        ("m.content[1]", "m.content[1].image_url.url", URL, {}),
        ("m.content[2]", "m.content[2].image_url", URL, {}),
        ("m.content[3]", "m.content[3].image_url.url", URL, {"max_pixels": 512 * 512}),
    ]
    assert message_of("m", {"role": "user", "content": made})["content"] == made


def test_images_held_in_this_process_are_read_only_where_they_may_be() -> None:
    for part, field in (
        ({"type": "image", "image": b"bytes"}, "m.content[0].image"),
        ({"type": "image", "path": "a.png"}, "m.content[0].path"),
        ({"type": "image_pil", "image_pil": 7}, "m.content[0].image_pil"),
        (IMAGE, "m.content[0].image_url.url"),
    ):
        message = {"role": "user", "content": [part]}
        (made,) = message_of("m", message, image=held_image)["content"]
        assert made.field == field
        if part is not IMAGE:  # a server must not read files that its clients name
            with pytest.raises(RequestError):
                message_of("m", message)


def test_templates_get_places_of_images() -> None:
    image = GivenImage("m", "image", "image", b"")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [image, TEXT, image]}]
    for source in ("{{ m.content }}", "{% if message.content is string %}{% for part in message.content %}"):
        made, images = with_images(messages, [source])
        assert made[0]["content"] == "s"
        assert made[1]["content"] == [{"type": "image"}, TEXT, {"type": "image"}]
        assert images == [image, image] == images_in(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}",
        "{%- for part in message.content -%}",
    ],
)
def test_templates_that_read_lists_of_parts_alone_get_lists(source: str) -> None:
    assert with_images([{"role": "user", "content": "hello"}], [source])[0][0]["content"] == [TEXT]


def test_an_image_is_not_shown() -> None:
    assert "secret" not in repr(GivenImage("m", "image", "image", b"secret"))


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "video", "video": [URL, URL], "fps": 4}, "m.content[0].video"),
        (
            {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,BBBB"}, "fps": 4},
            "m.content[0].video_url.url",
        ),
    ],
)
def test_a_video_is_a_list_of_frames(part: Any, field: str) -> None:
    message = message_of("m", {"role": "user", "content": [part, TEXT]})
    (video,) = images_in([message])
    assert (video.video, video.options, video.field, len(video.source)) == (True, {"fps": 4}, field, 2)
    assert all(frame.startswith("data:image/") for frame in video.source)
    assert with_images([message], ())[0][0]["content"] == [{"type": "video"}, TEXT]


def test_a_uuid_stands_for_an_earlier_image() -> None:
    parts = [{**IMAGE, "uuid": "a"}, {"type": "image_url", "image_url": None, "uuid": "b"}]
    sent, named = images_in([message_of("m", {"role": "user", "content": parts})])
    assert (sent.uuid, sent.source) == ("a", URL)
    assert (named.uuid, named.source, named.field) == ("b", None, "m.content[1].uuid")
