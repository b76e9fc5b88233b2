"""Helper process for long inputs: `python -m jaxinfer.serve.workers.text_helper`, started by `offload`.

JSON parsing and tokenization hold the GIL, and need many times the memory of their input. This process delays no other
request, its memory is bounded, and its parent kills it after a time limit. It reads frames from stdin and writes one
back for each, as `template_helper` does. No jax.

The first frame is JSON: ``folder``, from which the tokenizer is loaded (null: none is needed), ``values``, the limit of
values in a body, and ``seconds`` of CPU time. A question is `BODY` and the body, or `TEXT` or `TEXT_ALONE` (without
special tokens) and the text. An answer is `GOOD` and a frame of `jaxinfer.serve.workers.packing`, or `BAD` and, as
JSON, an error message and the field with the error.
"""

from __future__ import annotations

import json
import pathlib
import sys

from jaxinfer.helper_process import BAD, GOOD, allow_cpu, begin, read_frame, write_frame
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.json_bodies import check_count, parse
from jaxinfer.serve.runtime import malloc_trim
from jaxinfer.serve.workers import packing
from jaxinfer.text.load import load_tokenizer
from jaxinfer.text.pieces import TokenizerError
from jaxinfer.text.tokenizer import Tokenizer

BODY, TEXT, TEXT_ALONE = b"b", b"t", b"a"
ID_FIELDS = ("prompt", "tokens", "allowed_token_ids", "stop_token_ids")
"""Body fields that may hold many token ids."""

_MAX_MEMORY_BYTES = 4 << 30
_LARGE_BYTES = 1 << 20


def main() -> None:
    """Answer questions until the input ends. The argument is the parent's process id."""
    begin(_MAX_MEMORY_BYTES)
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(read_frame(reader) or b"{}")
    folder = setup.get("folder")
    tokenizer = None if folder is None else load_tokenizer(pathlib.Path(folder))
    if tokenizer is not None:
        tokenizer.forget()  # all tenants share it: timing must not reveal their texts
    write_frame(writer, GOOD)
    while (frame := read_frame(reader)) is not None:
        size = len(frame)
        allow_cpu(setup["seconds"])
        write_frame(writer, _answer(frame, tokenizer, setup.get("values", 0)))
        del frame
        if size > _LARGE_BYTES:
            malloc_trim.trim()


def _answer(frame: bytes, tokenizer: Tokenizer | None, values: int) -> bytes:
    kind, content = frame[:1], memoryview(frame)[1:]
    try:
        found = _read(content, values) if kind == BODY else _ids(content, tokenizer, special=kind == TEXT)
    except (ServeError, TokenizerError) as error:
        return BAD + json.dumps([str(error), getattr(error, "field", None)]).encode()
    return GOOD + found


def _read(body: memoryview, values: int) -> bytes:
    data = bytes(body)
    check_count(data, values)
    value = parse(data)
    try:
        return packing.pack(value, ID_FIELDS, values)
    except packing.PackError as error:
        raise ServeError(Kind.INVALID, f"{error.field or 'the body'} holds {error}", error.field) from error


def _ids(text: memoryview, tokenizer: Tokenizer | None, *, special: bool) -> bytes:
    assert tokenizer is not None
    return packing.pack({"ids": tokenizer.encode(str(text, "utf-8"), special)}, ("ids",))


if __name__ == "__main__":
    main()
