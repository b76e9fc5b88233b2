"""Normalisation of chat messages for templates: every API converts their content to text, or to text and images, here.

A content part of another kind (audio, a file) is rejected with its path. An image or a video becomes a `GivenImage`,
which `with_images` takes out of the messages: a template sees its place only.
"""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.sampling_params import RequestError
from jaxinfer.text.chat_template import ChatTemplate

_KINDS = ("text", "refusal")  # content part types, each with its text in a field of that name
_ASKS_FOR_NONE = re.compile(r"content\W{0,3}\s+is\s+(?:not\s+)?none")
_READS_PARTS = re.compile(r"\bin\s+\w+(?:\.content|\[['\"]content['\"]\])\s*(?:\||-?%})")
_ASKS_FOR_KIND = re.compile(r"content\W{0,3}\s+is\s+(?:not\s+)?(?:string|iterable|sequence|mapping)")
_LOW = 512 * 512
_LONGEST_UUID = 256
_DETAILS: Mapping[str | None, Mapping[str, Any]] = {None: {}, "auto": {}, "high": {}, "low": {"max_pixels": _LOW}}
IMAGE, VIDEO = "image", "video"
"""Types of the parts that templates see in place of images and videos."""
_FRAMES = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)
_FRAME = "data:image/jpeg;base64,"


@dataclasses.dataclass(frozen=True)
class GivenImage:
    """An image or a video of a request, as a content part of a message.

    Attributes:
        path: path of the part in its request.
        kind: its ``type``.
        name: name of the part's field that has the image.
        source: the image: a data URL or another URL; in an offline call, anything that `picture_of` takes. Of a video:
            a list of these, its frames.
        options: options of the processor, from the part's ``detail`` or ``fps``.
        video: it is a video.
        uuid: the client's name for it, under which a later request may refer to it.
    """

    path: str
    kind: str
    name: str
    source: Any = dataclasses.field(repr=False)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    video: bool = False
    uuid: str | None = None

    @property
    def field(self) -> str:
        """Path of the image itself."""
        return f"{self.path}.{self.name}"


ImageReader = Callable[[str, Mapping[str, Any]], GivenImage | None]
"""Reader of the part at a path; None: it is no image."""


def image_part(path: str, part: Mapping[str, Any]) -> GivenImage | None:
    """Read an image part in OpenAI's format, or a video part (`video_part`); None: a part of another kind.

    Raises:
        RequestError: it has no URL, or an unknown ``detail``.
    """
    if part.get("type") in (VIDEO, "video_url"):
        video = video_part(path, part)
        for rank, frame in enumerate(video.source or ()):
            if not isinstance(frame, str):
                _refuse(f"{video.field}[{rank}]", frame, "must be a URL")
        return video
    if part.get("type") != "image_url":
        return None
    given, uuid = part.get("image_url"), _uuid(path, part)
    if given is None and uuid is not None:
        return GivenImage(path, "image_url", "uuid", None, uuid=uuid)
    image = {"url": given} if isinstance(given, str) else given
    if not isinstance(image, Mapping) or not isinstance(image.get("url"), str):
        _refuse(f"{path}.image_url.url", image.get("url") if isinstance(image, Mapping) else image, "must be a URL")
    options = detail_options(f"{path}.image_url.detail", image.get("detail"))
    name = "image_url" if image is not given else "image_url.url"
    return GivenImage(path, "image_url", name, image["url"], options, uuid=uuid)


def video_part(path: str, part: Mapping[str, Any]) -> GivenImage:
    """Read a video part: ``{"type": "video", "video": [frame, ...], "fps": 2}``, or vLLM's ``video_url``, a data URL of
    the type ``video/jpeg`` with frames separated by commas.

    Raises:
        RequestError: it has no list of frames.
    """
    kind, uuid = part["type"], _uuid(path, part)
    given = part.get(kind)
    options = {} if part.get("fps") is None else {"fps": part["fps"]}
    if given is None and uuid is not None:
        return GivenImage(path, kind, "uuid", None, options, video=True, uuid=uuid)
    name, given = (f"{kind}.url", given.get("url")) if isinstance(given, Mapping) else (kind, given)
    if isinstance(given, str) and (head := _FRAMES.match(given)):
        given = [_FRAME + frame for frame in given[head.end() :].split(",")]
    if isinstance(given, str | bytes | os.PathLike) or not hasattr(given, "__len__"):
        _refuse(f"{path}.{name}", given, "must be a list of frames: containers such as MP4 are not decoded")
    return GivenImage(path, kind, name, given, options, video=True, uuid=uuid)


def _uuid(path: str, part: Mapping[str, Any]) -> str | None:
    uuid = part.get("uuid")
    if not (uuid is None or (isinstance(uuid, str) and 0 < len(uuid) <= _LONGEST_UUID)):
        _refuse(f"{path}.uuid", uuid, f"must be a text of 1 to {_LONGEST_UUID} characters")
    return uuid


def held_image(path: str, part: Mapping[str, Any]) -> GivenImage | None:
    """Read an image or video part of an offline call: as `image_part`, or ``{"type": "image", "image": ...}``, where an
    image, and each frame, is anything that `jaxinfer.images.source.picture_of` takes."""
    kind = part.get("type")
    if kind == VIDEO:
        return video_part(path, part)
    name = next((name for name in _HELD.get(kind, ()) if part.get(name) is not None), None)
    if not isinstance(kind, str) or name is None:
        return image_part(path, part)
    return GivenImage(path, kind, name, part[name])


_HELD: Mapping[Any, Sequence[str]] = {IMAGE: (IMAGE, "path", "url"), "image_pil": ("image_pil",)}


def detail_options(field: str, detail: Any) -> Mapping[str, Any]:
    """Return the options of the processor for OpenAI's ``detail``.

    Raises:
        RequestError: it is not one of OpenAI's values.
    """
    if not isinstance(detail, str | None) or detail not in _DETAILS:
        _refuse(field, detail, "must be auto, low or high")
    return _DETAILS[detail]


def with_images(
    messages: Sequence[Mapping[str, Any]], sources: Sequence[str]
) -> tuple[list[Mapping[str, Any]], list[GivenImage]]:
    """Return messages for templates, and the images and videos in them, in order: in place of each a template gets
    ``{"type": "image"}`` or ``{"type": "video"}``. Templates that read nothing but lists of parts get texts as such
    lists, too.

    Args:
        sources: sources of the templates.
    """
    images: list[GivenImage] = []
    listed = any(map(_READS_PARTS.search, sources)) and not any(map(_ASKS_FOR_KIND.search, sources))
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            images += [part for part in content if isinstance(part, GivenImage)]
            parts = [
                {"type": VIDEO if part.video else IMAGE} if isinstance(part, GivenImage) else part for part in content
            ]
            message = {**message, "content": parts}
        elif listed and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        made.append(message)
    return made, images


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[GivenImage]:
    """Return the images of normalised messages, in order."""
    return with_images(messages, ())[1]


def asks_for_none(sources: Sequence[str]) -> bool:
    """Return whether a template tests for a message with calls and no content; other templates would write "None"."""
    return any(map(_ASKS_FOR_NONE.search, sources))


def message_of(path: str, message: Any, none: bool = True, image: ImageReader = image_part) -> dict[str, Any]:
    """Return the message without null fields. Its content is text or, if it has images, a list of text parts and
    `GivenImage`. A refusal becomes content of the assistant.

    Args:
        path: path of the message in its request, for errors.
        none: keep null content next to calls; otherwise it becomes an empty text, as it does without calls.
        image: reads image parts.

    Raises:
        RequestError: the message has no role, or content that is neither text nor an image; names path and value.
    """
    if not isinstance(message, Mapping):
        _refuse(path, message, "must be an object")
    if not isinstance(message.get("role"), str):
        _refuse(f"{path}.role", message.get("role"), "must be a string")
    made = {name: value for name, value in message.items() if value is not None}
    if made.get("tool_calls") == []:  # templates only test whether the field is present
        del made["tool_calls"]
    if "content" in message or made["role"] in ("assistant", "tool"):
        content = made.pop("content", None)
        refusal = text_of(f"{path}.refusal", made.pop("refusal", None))
        parts = _with_images_read(f"{path}.content", content, image)
        if parts is not None:
            made["content"] = [*parts, *([_text(refusal)] if refusal else [])]
            return made
        said = [text_of(f"{path}.content", content), refusal]
        keeps = content is None and none and "tool_calls" in made and not any(said)
        made["content"] = None if keeps else "\n".join(filter(None, said))
    return made


def _with_images_read(path: str, content: Any, image: ImageReader) -> list[Any] | None:
    """Return the parts of a content that has images, with each image read; None: it has none."""
    if not isinstance(content, list | tuple):
        return None
    read = [_image_at(f"{path}[{rank}]", part, image) for rank, part in enumerate(content)]
    if not any(read):
        return None
    pairs = enumerate(zip(content, read, strict=True))
    return [_text(text_part(f"{path}[{rank}]", part)) if found is None else found for rank, (part, found) in pairs]


def _image_at(path: str, part: Any, image: ImageReader) -> GivenImage | None:
    if isinstance(part, GivenImage):
        return part
    return image(path, part) if isinstance(part, Mapping) else None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def messages_of(
    path: str, messages: Any, template: ChatTemplate, image: ImageReader = held_image
) -> list[dict[str, Any]]:
    """Return a conversation normalised for the template, see `message_of`.

    Raises:
        RequestError: a message is invalid; names path and value.
    """
    if not isinstance(messages, list | tuple):
        _refuse(path, messages, "must be a list of messages")
    none = asks_for_none(list(template.sources.values()))
    return [message_of(f"{path}[{rank}]", message, none, image) for rank, message in enumerate(messages)]


def text_part(path: str, part: Any) -> str:
    """Return the text of a content part in OpenAI's format.

    Raises:
        RequestError: it is a part of another kind.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS:
        _refuse(f"{path}.type", kind, "is not served: parts of a message are text, images or videos")
    if not isinstance(part.get(kind), str):
        _refuse(f"{path}.{kind}", part.get(kind), "must be a string")
    text: str = part[kind]
    return text


def text_of(
    path: str, content: Any, part: Callable[[str, Any], str] = text_part, kinds: Collection[str] = ("text",)
) -> str:
    """Return the text of a content: a string, the texts of a list of parts joined by newlines, or "" for null.

    Args:
        part: reads the part at a path.
        kinds: part types that ``part`` reads.

    Raises:
        RequestError: it is none of these; or as raised by ``part``.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        _refuse(path, content, f"must be text or a list of parts: {', '.join(sorted(kinds))}")
    return "\n".join(part(f"{path}[{rank}]", each) for rank, each in enumerate(content))


def _refuse(path: str, value: Any, reason: str) -> NoReturn:
    raise RequestError(path, f"={reprlib.repr(value)[:200]} {reason}")
