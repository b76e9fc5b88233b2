"""Worker process for untrusted input: `python -m jaxinfer.serve.workers.worker`, started by `pool.Pool`. No jax.

The input may loop forever or allocate all memory. A worker has no other state, its memory and the CPU time of each
question are bounded, and its parent kills it after a time limit. The first frame is its `Task` and the task's
arguments, each other one a question. The reply is whether it was answered, and the answer, or place and reason of a
`RequestError`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from jaxinfer.helper_process import (
    READY,
    allow_cpu,
    begin,
    limit_memory,
    lower_priority,
    read_frame,
    trim,
    write_frame,
)
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.workers.codec import decode, encode

_LARGE_BYTES = 1 << 20


class Task(msgspec.Struct, frozen=True):
    """What the workers of a pool do, and within which bounds.

    Attributes:
        start: ``module:function``; called with the task's arguments, it returns the function that answers a question.
        what: name of the questions, for error messages.
        stopped: reason in the error of a question that takes too long or too much memory.
        workers: processes; ``share``: those of one tenant at once, the others are started for other tenants only.
        waiting: questions that may wait.
        memory: bytes of address space.
        seconds: time limit of one question, without the wait for a free worker; then the worker is killed.
        cpu_seconds: CPU seconds of one question (0: as ``seconds``).
        idle: whether the workers have idle priority (`sched(7)`, SCHED_IDLE).
    """

    start: str
    what: str
    stopped: str
    workers: int = 3
    share: int = 2
    waiting: int = 256
    memory: int = 4 << 30
    seconds: float = 30.0
    cpu_seconds: float = 0.0
    idle: bool = False


def main() -> None:
    """Answer questions until the input ends. The argument is the parent's process id."""
    begin()
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    if (frame := read_frame(reader)) is None:
        return
    task, arguments = decode(frame, tuple[Task, dict[str, Any]])
    limit_memory(task.memory)
    if task.idle:
        lower_priority()
    module, _, name = task.start.partition(":")
    answer = getattr(importlib.import_module(module), name)(**arguments)
    write_frame(writer, READY)
    while (frame := read_frame(reader)) is not None:
        size = len(frame)
        allow_cpu(task.cpu_seconds or task.seconds)
        write_frame(writer, _reply(answer, frame))
        del frame
        if size > _LARGE_BYTES:
            trim()


def _reply(answer: Callable[[bytes], Any], question: bytes) -> bytes:
    try:
        return encode((True, answer(question)))
    except RequestError as error:
        return encode((False, (error.place, error.reason)))


if __name__ == "__main__":
    main()
