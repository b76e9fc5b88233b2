"""Chat template rendering outside the event loop, in killable helper processes. No jax.

Jinja compiles templates to Python, so a loop in one holds a thread, and the GIL, until it ends. Templates are therefore
rendered in helper processes (`jaxinfer.serve.workers.template_helper`): the kernel shares out the CPU, a limit bounds
the memory, and a process can be killed at any time, even in a C function. Templates of requests have separate helpers,
so that bad ones do not delay requests with the checkpoint's template. Helpers are shared round-robin between tenants:
no tenant has all helpers of a kind.
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
from jaxinfer.serve.api.errors import ServeError, unavailable
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.workers.fair_pool import FairPool
from jaxinfer.serve.workers.packing import pack
from jaxinfer.text.chat_template import ChatTemplate

MAX_WAITING, MAX_WAITING_OWN = 4096, 256
"""Conversations that may wait for a helper, with the checkpoint's template and with a request's own; more are rejected.
The checkpoint's takes about a millisecond, a request's own may take the whole time limit."""

_START_SECONDS = 120.0  # of about a second's work: on a busy machine a request waits rather than fails
_START_PAUSES = (0.0, 0.2, 1.0)  # seconds before each attempt
_MODULE = "jaxinfer.serve.workers.template_helper"

_log = logging.getLogger("jaxinfer.serve")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a pool.

    Attributes:
        share: helpers of one tenant at once; those beyond are started for other tenants only.
        waiting: questions that may wait.
    """

    helpers: int
    share: int
    waiting: int


_DEFAULT, _REQUESTS = Sizes(4, 2, MAX_WAITING), Sizes(4, 1, MAX_WAITING_OWN)


class Renderer:
    """A renderer of conversations, as `ChatTemplate.render`, in helpers that are started on demand.

    Args:
        template: template of the checkpoint. Its ``now`` is not used: helpers have the clock of the machine.
        seconds: time limit of one conversation, without the wait for a free helper; then the helper is killed.
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
        """Return the prompt text of a conversation.

        Args:
            tenant: tenant of the request, for the round-robin.

        Raises:
            RequestError: the template rejects the messages, fails on them, or takes too long.
            QueueFullError: too many conversations wait.
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
        """Kill the helpers."""
        self._default.close()
        self._requests.close()


class Pool:
    """A pool of helper processes, started on demand, each of which answers one question at a time.

    Args:
        module: Python module that the helpers run.
        setup: first frame sent to each helper.
        what: name of the questions, for error messages.

    Attributes:
        seconds: time limit of one question, without the wait for a free helper; then the helper is killed.
    """

    def __init__(self, module: str, sizes: Sizes, setup: bytes, seconds: float, what: str) -> None:
        self._helpers = [Helper(module, setup) for _ in range(sizes.helpers)]
        self._share, self._what = sizes.share, what
        self._turns = FairPool(self._helpers, sizes.share, sizes.waiting, f"{what} wait for a helper")
        self._threads = concurrent.futures.ThreadPoolExecutor(sizes.helpers, "jaxinfer-helper")
        self.seconds = seconds

    @property
    def busy(self) -> int:
        """Number of helpers that are answering a question."""
        return self._turns.held

    async def warm(self) -> None:
        """Start the helpers that one tenant may have at once. One that cannot be started is started on demand."""
        with contextlib.suppress(ServeError):  # it is logged
            await asyncio.gather(*(self._start(helper) for helper in self._helpers[-self._share :]))

    async def ask(self, tenant: str, question: bytes) -> bytes | None:
        """Return the answer of a helper; None: the question took too long or too much memory.

        Raises:
            QueueFullError: too many questions wait.
            ServeError: UNAVAILABLE: the helper could not be started, or the system killed it.
        """
        helper = await self._turns.take(tenant)
        # After a client has disconnected, the helper still completes its answer.
        return await asyncio.shield(self._ask(tenant, helper, question))

    async def _ask(self, tenant: str, helper: Helper, question: bytes) -> bytes | None:
        try:
            await self._start(helper)
            answer = await self._within(self.seconds, helper, helper.ask, question)
            if answer is None and await asyncio.to_thread(getattr, helper, "killed_externally"):
                raise self._unavailable("was killed by the system")
            return answer
        finally:
            self._turns.give(tenant, helper)

    async def _start(self, helper: Helper) -> None:
        for pause in _START_PAUSES:
            await asyncio.sleep(pause)
            try:
                await self._within(_START_SECONDS, helper, helper.start)
            except (OSError, RuntimeError) as error:  # no descriptors, no memory: possibly transient
                failed = error
            else:
                return
        raise self._unavailable(f"cannot be started: {failed}") from failed

    def _unavailable(self, what: str) -> ServeError:
        _log.error("a helper process for %s %s", self._what, what)
        return unavailable(f"a helper process {what}: try again later")

    async def _within[*A, T](self, seconds: float, helper: Helper, function: Callable[[*A], T], *args: *A) -> T:
        """Run ``function`` in a thread; after ``seconds`` the helper is killed, which ends it."""
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
