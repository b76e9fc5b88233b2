"""Chat templates outside the event loop, and killable. No jax.

Jinja compiles templates to Python, so a loop in one holds a thread, and the interpreter's lock, until it ends. They
are rendered in helper processes instead (`jaxinfer.serve.template_helper`): the kernel shares out the processor, a
limit bounds the memory, and killing works at any time, in the midst of a C function too. Templates of requests have
helpers of their own, so that bad ones keep nobody waiting who uses the checkpoint's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.serve.calls import Conversation
from jaxinfer.serve.template_helper import read_frame, write_frame
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import QueueFullError, RequestError

MAX_WAITING, MAX_WAITING_OWN = 4096, 256
"""Conversations that wait for a helper, with the checkpoint's template and with their own; more are refused. The
checkpoint's takes a millisecond or so, one of a request's own may take all the seconds that there are."""

_START_SECONDS = 30.0
_COMMAND = (sys.executable, "-m", "jaxinfer.serve.template_helper")
_OWN_HELPERS, _REQUEST_HELPERS = 2, 1


class Renderer:
    """Renders conversations as `ChatTemplate.render` does, in helpers that are started when they are needed.

    Args:
        template: the checkpoint's. Its ``now`` is not taken along: helpers have the clock of the machine.
        seconds: for one conversation, without the wait for a free helper; the helper is killed then.
    """

    def __init__(self, template: ChatTemplate | None, seconds: float) -> None:
        sources, tokens = (template.sources, template.tokens) if template is not None else ({}, {})
        self.has_template = template is not None
        setup = json.dumps({"sources": sources, "tokens": tokens}).encode()
        self._own = _Pool(_OWN_HELPERS, setup, seconds, MAX_WAITING)
        self._requests = _Pool(_REQUEST_HELPERS, setup, seconds, MAX_WAITING_OWN)

    async def warm(self) -> None:
        """Start the helpers of the checkpoint's template, if it has one."""
        if self.has_template:
            await self._own.warm()

    async def render(self, conversation: Conversation) -> str:
        """The prompt's text.

        Raises:
            RequestError: the template refuses the messages, fails on them, or takes too long.
            QueueFullError: too many wait.
        """
        pool = self._own if conversation.template is None else self._requests
        answer = await pool.ask(_as_json(conversation))
        if "text" not in answer:
            raise RequestError(f"messages: {answer['refused']}")
        return answer["text"]

    def close(self) -> None:
        """End the helpers."""
        self._own.close()
        self._requests.close()


class _Pool:
    """Some helpers, each busy with one conversation at a time."""

    def __init__(self, size: int, setup: bytes, seconds: float, most: int) -> None:
        self._most = most
        self._helpers = [_Helper(setup) for _ in range(size)]
        self._free = list(self._helpers)
        self._places = asyncio.Semaphore(size)
        self._threads = concurrent.futures.ThreadPoolExecutor(size, "jaxinfer-template")
        self._seconds = seconds
        self._waiting = 0

    async def warm(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, helper.start) for helper in self._helpers))

    async def ask(self, question: bytes) -> Mapping[str, str]:
        if self._waiting >= self._most:
            raise QueueFullError(f"{self._waiting} conversations wait for their chat template already")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        # A client that leaves does not take the helper away in the midst of an answer.
        return await asyncio.shield(self._ask(self._free.pop(), question))

    async def _ask(self, helper: _Helper, question: bytes) -> Mapping[str, str]:
        try:
            await self._within(_START_SECONDS, helper, helper.start)
            answer = await self._within(self._seconds, helper, helper.ask, question)
        finally:
            self._free.append(helper)
            self._places.release()
        stopped = f"the chat template was stopped: it ran for {self._seconds:g} s, or wanted too much memory"
        return {"refused": stopped} if answer is None else answer

    async def _within[*A, T](self, seconds: float, helper: _Helper, function: Callable[[*A], T], *args: *A) -> T:
        """``function`` in a thread; the helper is killed after ``seconds``, which ends it."""
        loop = asyncio.get_running_loop()
        killer = loop.call_later(seconds, helper.kill)
        try:
            return await loop.run_in_executor(self._threads, function, *args)
        finally:
            killer.cancel()

    def close(self) -> None:
        for helper in self._helpers:
            helper.kill()
        self._threads.shutdown(wait=False)


class _Helper:
    """A helper process and the pipes to it. Methods but `kill` belong to whoever took it out of the pool."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._reap: weakref.finalize[..., _Helper] | None = None
        self._killed = False

    def start(self) -> None:
        """Start it if it does not run.

        Raises:
            RuntimeError: it cannot be started.
        """
        if self._process is not None and not self._killed and self._process.poll() is None:
            return
        if self._reap is not None:
            self._reap()
        # In a session of its own: a Ctrl-C in the terminal is the server's business.
        self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), start_new_session=True
        )
        self._reap, self._killed = weakref.finalize(self, _end, self._process), False
        if self._exchange(self._setup) is None:
            raise RuntimeError("the process for chat templates does not start")

    def ask(self, question: bytes) -> Mapping[str, str] | None:
        """None: it was killed, or died."""
        answer = self._exchange(question)
        self._killed = self._killed or answer is None
        return None if answer is None else json.loads(answer)

    def kill(self) -> None:
        """From any thread. Whoever waits for an answer gets none."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def _exchange(self, frame: bytes) -> bytes | None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            write_frame(process.stdin, frame)
        except BrokenPipeError:
            return None
        return read_frame(process.stdout)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what a write that failed has left in the buffer
                pipe.close()


def _environment() -> dict[str, str]:
    """Templates have no business with the server's environment, but Python must find itself, and this package."""
    passed = ("PATH", "LD_LIBRARY_PATH", "HOME", "TZ", "LANG", "LC_ALL", "SYSTEMROOT")
    own = {name: os.environ[name] for name in passed if name in os.environ}
    return {**own, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _as_json(conversation: Conversation) -> bytes:
    asked: dict[str, Any] = {
        "messages": list(conversation.messages),
        "tools": None if conversation.tools is None else list(conversation.tools),
        "add_generation_prompt": conversation.add_generation_prompt,
        "variables": dict(conversation.variables),
        "template": conversation.template,
    }
    try:
        return json.dumps(asked).encode()
    except (TypeError, ValueError, RecursionError) as cause:
        raise RequestError(f"messages must be JSON-like data: {cause}") from cause
