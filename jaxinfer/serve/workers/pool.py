"""A pool of worker processes shared round-robin between tenants. No jax."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from jaxinfer.helper_process import Helper
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import ServeError, unavailable
from jaxinfer.serve.runtime.background import shielded
from jaxinfer.serve.runtime.fair_pool import FairPool
from jaxinfer.serve.workers.codec import decode, encode
from jaxinfer.serve.workers.worker import Task

_START_SECONDS = 120.0  # of about a second's work: on a busy machine a request waits rather than fails
_START_PAUSES = (0.0, 0.2, 1.0)  # seconds before each attempt
_MODULE = "jaxinfer.serve.workers.worker"

_log = logging.getLogger("jaxinfer.serve")


class Pool:
    """A pool of worker processes, started on demand, each of which answers one question at a time.

    Args:
        arguments: of the task's ``start``.
    """

    def __init__(self, task: Task, **arguments: Any) -> None:
        setup = encode((msgspec.structs.asdict(task), arguments))
        self._task, self._helpers = task, [Helper(_MODULE, setup) for _ in range(task.workers)]
        self._turns = FairPool(self._helpers, task.share, task.waiting, f"{task.what} wait for a helper")
        self._threads = concurrent.futures.ThreadPoolExecutor(task.workers, "jaxinfer-helper")

    @property
    def busy(self) -> int:
        """Number of workers that are answering a question."""
        return self._turns.held

    async def warm(self) -> None:
        """Start the workers that one tenant may have at once. One that cannot be started is started on demand."""
        with contextlib.suppress(ServeError):  # it is logged
            await asyncio.gather(*(self._start(helper) for helper in self._helpers[-self._task.share :]))

    async def ask(self, tenant: str, place: str | None, question: bytes) -> Any:
        """Return the answer of a worker. ``place``: the field of the request, see `RequestError`.

        Raises:
            RequestError: the worker rejects the question, or it took too long or too much memory.
            QueueFullError: too many questions wait.
            ServeError: UNAVAILABLE: the worker could not be started, or the system killed it.
        """
        helper = await self._turns.take(tenant)
        # After a client has disconnected, the worker still completes its answer.
        reply = await shielded(self._ask(tenant, helper, question))
        if reply is None:
            raise RequestError(place, self._task.stopped.format(seconds=self._task.seconds))
        answered, answer = reply
        if not answered:
            raise RequestError(*answer)
        return answer

    async def _ask(self, tenant: str, helper: Helper, question: bytes) -> tuple[bool, Any] | None:
        try:
            await self._start(helper)
            reply = await self._within(self._task.seconds, helper, _reply, helper, question)
            if reply is None and await asyncio.to_thread(getattr, helper, "killed_externally"):
                raise self._unavailable("was killed by the system")
            return reply
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
        _log.error("a helper process for %s %s", self._task.what, what)
        return unavailable(f"a helper process {what}: try again later")

    async def _within[*A, T](self, seconds: float, helper: Helper, function: Callable[[*A], T], *args: *A) -> T:
        """Run ``function`` in a thread; after ``seconds`` the worker is killed, which ends it."""
        loop = asyncio.get_running_loop()
        killer = loop.call_later(seconds, helper.kill)
        try:
            return await loop.run_in_executor(self._threads, function, *args)
        finally:
            killer.cancel()

    def close(self) -> None:
        """Kill the workers."""
        for helper in self._helpers:
            helper.kill()
        self._threads.shutdown(wait=False)


def _reply(helper: Helper, question: bytes) -> tuple[bool, Any] | None:
    reply = helper.ask(question)
    return None if reply is None else decode(reply, tuple[bool, Any])
