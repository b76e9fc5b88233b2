"""A process that renders chat templates: `python -m jaxinfer.serve.template_helper`, started by `templates.Renderer`.

Templates come with checkpoints and with requests, and may loop for ever or ask for all memory. Here they may: this
process holds nothing, its memory and the processor's time for each conversation are bounded, and whoever started it
kills it when it takes too long. It reads frames from stdin, writes one back for each, and ends with its input, or at
once where its parent is killed, whatever it does. A frame is its length (4 bytes, big-endian) and, on the way in,
`jaxinfer.serve.packing`; on the way out `GOOD` and the text, or `BAD` and why there is none.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from typing import IO, Any

from jaxinfer.serve.packing import pack, unpack
from jaxinfer.text.chat_template import ChatTemplate, TemplateError

GOOD, BAD = b"+", b"-"
MAX_FRAME_BYTES = 256 << 20
"""More than the largest text that a template may write, every character escaped."""

_MAX_MEMORY_BYTES = 2 << 30
START_CPU_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """The first frame is the checkpoint's template (``sources``, ``tokens``) and the ``seconds`` of a conversation, the
    others are conversations. The argument is the process that starts this one."""
    die_with(int(sys.argv[1]))
    allow_cpu(START_CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    setup = unpack(read_frame(reader) or pack({}))
    default = ChatTemplate(setup["sources"], setup["tokens"]) if setup.get("sources") else None
    write_frame(writer, GOOD)
    while (frame := read_frame(reader)) is not None:
        allow_cpu(setup["seconds"])
        write_frame(writer, _answer(unpack(frame), default, setup))


def die_with(parent: int) -> None:
    """End this process with its parent, which ends the input too, but a template that loops reads none. Linux sends a
    signal; elsewhere it is the limit of the processor's time that ends such a template."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


def allow_cpu(seconds: float) -> None:
    """Allow ``seconds`` of the processor from now on; beyond that the kernel ends this process (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1  # it counts whole seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _answer(question: dict[str, Any], default: ChatTemplate | None, setup: dict[str, Any]) -> bytes:
    try:
        template = default if question["template"] is None else ChatTemplate(question["template"], setup["tokens"])
        if template is None:
            return BAD + b"there is no chat template"
        text = template.render(
            question["messages"], question["add_generation_prompt"], question["tools"], extra=question["variables"]
        )
    except TemplateError as refusal:
        return BAD + str(refusal).encode(errors="surrogatepass")
    return GOOD + text.encode(errors="surrogatepass")


def read_frame(reader: IO[bytes]) -> bytes | None:
    """Read a frame; None at the end of the input, also within a frame or where one is announced that is too large."""
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
