"""A process that renders chat templates: `python -m jaxinfer.serve.template_helper`, started by `templates.Renderer`.

Templates come with checkpoints and with requests, and may loop for ever or ask for all memory. Here they may: this
process holds nothing, its memory is bounded, and whoever started it kills it when it takes too long. It reads frames
from stdin, writes one back for each, and ends with its input. A frame is its length (4 bytes, big-endian) and JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import IO, Any

from jaxinfer.text.chat_template import ChatTemplate, TemplateError

MAX_FRAME_BYTES = 256 << 20
"""More than the largest text that a template may write, every character escaped."""

_MAX_MEMORY_BYTES = 2 << 30


def main() -> None:
    """The first frame is the checkpoint's template (``sources``, ``tokens``), the others are conversations."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(read_frame(reader) or b"{}")
    own = ChatTemplate(setup["sources"], setup["tokens"]) if setup.get("sources") else None
    write_frame(writer, b"{}")
    while (frame := read_frame(reader)) is not None:
        write_frame(writer, json.dumps(_answer(json.loads(frame), own, setup)).encode())


def _answer(asked: dict[str, Any], own: ChatTemplate | None, setup: dict[str, Any]) -> dict[str, str]:
    try:
        template = own if asked["template"] is None else ChatTemplate(asked["template"], setup["tokens"])
        if template is None:
            return {"refused": "there is no chat template"}
        text = template.render(
            asked["messages"], asked["add_generation_prompt"], asked["tools"], extra=asked["variables"]
        )
    except TemplateError as refusal:
        return {"refused": str(refusal)}
    return {"text": text}


def read_frame(reader: IO[bytes]) -> bytes | None:
    """None at the end of the input, also where it ends within a frame or announces one that is too large."""
    head = reader.read(4)
    size = int.from_bytes(head)
    if len(head) < 4 or size > MAX_FRAME_BYTES:
        return None
    body = reader.read(size)
    return body if len(body) == size else None


def write_frame(writer: IO[bytes], body: bytes) -> None:
    writer.write(len(body).to_bytes(4))
    writer.write(body)
    writer.flush()


if __name__ == "__main__":
    main()
