"""Chat templates outside the event loop, and killable. No jax.

Jinja compiles templates to Python, so a loop in one holds a thread, and the interpreter's lock, until it ends. They
are rendered in helper processes instead (`jaxinfer.serve.template_helper`): the kernel shares out the processor, a
limit bounds the memory, and killing works at any time, in the midst of a C function too. Templates of requests have
helpers of their own, so that bad ones keep nobody waiting who uses the checkpoint's. And tenants take turns: none has
all helpers of a kind, however many of its conversations take however long.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from jaxinfer.helper_process import GOOD, Helper
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.calls import Conversation
from jaxinfer.serve.errors import ServeError
from jaxinfer.serve.faults import unavailable
from jaxinfer.serve.packing import pack
from jaxinfer.serve.turns import Turns
from jaxinfer.text.chat_template import ChatTemplate

MAX_WAITING, MAX_WAITING_OWN = 4096, 256
"""Conversations that wait for a helper, with the checkpoint's template and with their own; more are refused. The
checkpoint's takes a millisecond or so, one of a request's own may take all the seconds that there are."""

_START_SECONDS = 120.0  # of a second's work: who asks on a busy machine waits for it rather than for an error
_START_PAUSES = (0.0, 0.2, 1.0)  # seconds before each attempt
_MODULE = "jaxinfer.serve.template_helper"

_log = logging.getLogger("jaxinfer.serve")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a pool.

    Attributes:
        share: the helpers of one tenant at once; those beyond are started for others only.
        waiting: questions that may wait.
    """

    helpers: int
    share: int
    waiting: int


_DEFAULT, _REQUESTS = Sizes(4, 2, MAX_WAITING), Sizes(4, 1, MAX_WAITING_OWN)


class Renderer:
    """Renders conversations as `ChatTemplate.render` does, in helpers that are started when they are needed.

    Args:
        template: the checkpoint's. Its ``now`` is not taken along: helpers have the clock of the machine.
        seconds: for one conversation, without the wait for a free helper; the helper is killed then.
    """

    def __init__(self, template: ChatTemplate | None, seconds: float) -> None:
        sources, tokens = (template.sources, template.tokens) if template is not None else ({}, {})
        self.has_template = template is not None
        setup, what = pack({"sources": sources, "tokens": tokens, "seconds": seconds}), "conversations"
        self._default, self._requests = (Pool(_MODULE, sizes, setup, seconds, what) for sizes in (_DEFAULT, _REQUESTS))

    async def warm(self) -> None:
        """Start the helpers of the checkpoint's template, if it has one."""
        if self.has_template:
            await self._default.warm()

    async def render(self, conversation: Conversation, tenant: str = "") -> str:
        """The prompt's text.

        Args:
            tenant: whose it is: tenants take turns.

        Raises:
            RequestError: the template refuses the messages, fails on them, or takes too long.
            QueueFullError: too many wait.
            ServeError: UNAVAILABLE: see `Pool.ask`.
        """
        pool = self._default if conversation.template is None else self._requests
        answer = await pool.ask(tenant, _packed(conversation))
        if answer is None:
            stopped = f"it ran for {pool.seconds:g} s, or wanted too much memory"
            raise RequestError("messages", f": the chat template was stopped: {stopped}")
        kind, text = answer[:1], str(memoryview(answer)[1:], "utf-8", "surrogatepass")
        if kind != GOOD:
            raise RequestError("messages", f": {text}")
        return text

    def close(self) -> None:
        """End the helpers."""
        self._default.close()
        self._requests.close()


class Pool:
    """Some helper processes, each busy with one question at a time. They are started when they are needed.

    Args:
        module: what they run.
        setup: the first frame that each of them is sent.
        what: is asked, in words, for whoever has to wait too long.

    Attributes:
        seconds: for one question, without the wait for a free helper; the helper is killed then.
    """

    def __init__(self, module: str, sizes: Sizes, setup: bytes, seconds: float, what: str) -> None:
        self._helpers = [Helper(module, setup) for _ in range(sizes.helpers)]
        self._share, self._what = sizes.share, what
        self._turns = Turns(self._helpers, sizes.share, sizes.waiting, f"{what} wait for a helper")
        self._threads = concurrent.futures.ThreadPoolExecutor(sizes.helpers, "jaxinfer-helper")
        self.seconds = seconds

    @property
    def busy(self) -> int:
        """Helpers that have a question."""
        return self._turns.held

    async def warm(self) -> None:
        """Start those that a tenant has at once. One that cannot be started is started when it is needed."""
        with contextlib.suppress(ServeError):  # which is logged
            await asyncio.gather(*(self._start(helper) for helper in self._helpers[-self._share :]))

    async def ask(self, tenant: str, question: bytes) -> bytes | None:
        """The answer; None: the question took too long or too much memory.

        Raises:
            QueueFullError: too many wait.
            ServeError: UNAVAILABLE: the helper could not be started, or the system ended it.
        """
        helper = await self._turns.take(tenant)
        # A client that leaves does not take the helper away in the midst of an answer.
        return await asyncio.shield(self._ask(tenant, helper, question))

    async def _ask(self, tenant: str, helper: Helper, question: bytes) -> bytes | None:
        try:
            await self._start(helper)
            answer = await self._within(self.seconds, helper, helper.ask, question)
            if answer is None and await asyncio.to_thread(getattr, helper, "was_taken_away"):
                raise self._unavailable("was killed by the system")
            return answer
        finally:
            self._turns.give(tenant, helper)

    async def _start(self, helper: Helper) -> None:
        for pause in _START_PAUSES:
            await asyncio.sleep(pause)
            try:
                await self._within(_START_SECONDS, helper, helper.start)
            except (OSError, RuntimeError) as error:  # no descriptors, no memory: perhaps for a moment
                failed = error
            else:
                return
        raise self._unavailable(f"cannot be started: {failed}") from failed

    def _unavailable(self, what: str) -> ServeError:
        _log.error("a helper process for %s %s", self._what, what)
        return unavailable(f"a helper process {what}: try again later")

    async def _within[*A, T](self, seconds: float, helper: Helper, function: Callable[[*A], T], *args: *A) -> T:
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


def _packed(conversation: Conversation) -> bytes:
    question: dict[str, Any] = {
        "messages": list(conversation.messages),
        "tools": None if conversation.tools is None else list(conversation.tools),
        "add_generation_prompt": conversation.add_generation_prompt,
        "variables": dict(conversation.variables),
        "template": conversation.template,
        "continue_final_message": conversation.continue_final_message,
    }
    try:
        return pack(question)
    except (TypeError, ValueError, RecursionError) as cause:
        raise RequestError("messages", f"must be JSON-like data: {cause}") from cause
