"""Helper process of `templates.Renderer`: renders chat templates (`python -m jaxinfer.serve.workers.template_helper`).

Templates come from checkpoints and requests, and may loop forever or allocate all memory. This process has no other
state, its memory and the CPU time of each conversation are bounded, and its parent kills it after a time limit. It
reads frames from stdin, writes one back for each, and exits at the end of the input, or at once if its parent is
killed. A frame is its length (4 bytes, big-endian) and its content: input in the format of
`jaxinfer.serve.workers.packing`, output as `GOOD` and the text, or `BAD` and an error message.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from jaxinfer.helper_process import BAD, GOOD, allow_cpu, begin, read_frame, write_frame
from jaxinfer.serve.workers.normalize import written
from jaxinfer.serve.workers.packing import pack, unpack
from jaxinfer.text.chat_template import ChatTemplate, TemplateError

_MAX_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Render conversations until the input ends. The first frame has the checkpoint's template (``sources``,
    ``tokens``) and the CPU ``seconds`` of a conversation, the others are conversations. ``argv[1]`` is the parent's
    process id."""
    begin(_MAX_MEMORY_BYTES)
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    setup = unpack(read_frame(reader) or pack({}))
    default = ChatTemplate(setup["sources"], setup["tokens"]) if setup.get("sources") else None
    write_frame(writer, GOOD)
    while (frame := read_frame(reader)) is not None:
        allow_cpu(setup["seconds"])
        write_frame(writer, _answer(unpack(frame), default, setup))


def _answer(question: dict[str, Any], default: ChatTemplate | None, setup: dict[str, Any]) -> bytes:
    try:
        template = default if question["template"] is None else ChatTemplate(question["template"], setup["tokens"])
        if template is None:
            return BAD + b"there is no chat template"
        write = functools.partial(
            template.render,
            add_generation_prompt=question["add_generation_prompt"],
            tools=question["tools"],
            extra=question["variables"],
            continue_final_message=question["continue_final_message"],
        )
        text = written(question["messages"], write)
    except TemplateError as refusal:
        return BAD + str(refusal).encode(errors="surrogatepass")
    return GOOD + text.encode(errors="surrogatepass")


if __name__ == "__main__":
    main()
