"""Supervisor of the engine core: starts it, monitors it, and restarts it. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA, LoRAError
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.api.streams import EngineDeadError
from jaxinfer.serve.core import socket_dir as folder
from jaxinfer.serve.core.backend import BackendStream
from jaxinfer.serve.core.child import Child
from jaxinfer.serve.core.link import CoreLink, RefusedError
from jaxinfer.serve.core.messages import Failed, Fault, KvEvents, Lifecycle, Pulse, Ready, StartupEvent
from jaxinfer.serve.core.operations import AnyOperation, WeightState
from jaxinfer.serve.core.profiling import MAX_STEPS
from jaxinfer.serve.settings import ServeConfig
from jaxinfer.types import LoRARef, Request

STARTING: Final = "starting"
READY: Final = "ready"
DEAD, STOPPED = "dead", "stopped"
FAILED: Final = "failed"

_LAST_WORDS_SECONDS = 0.5
LEAST_STEP_TIMEOUT, STEPS = 10.0, 20.0
"""Default of ``step_timeout``: minimum in seconds, and multiple of the 99th percentile of the step times."""
LONGEST_DOUBT = 60.0
"""Seconds up to which a step limit that may be too short is doubled, and limit while a profile starts or stops, or
weights or memory change."""
_STARTING = "the engine is starting"
_ENOUGH_STEPS = 1000  # of one core, after which the step times of earlier cores are dropped

_PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EINTR})
"""Errors of a start that may succeed a second later: the machine, or this process, is short of a resource."""

_log = logging.getLogger("jaxinfer.serve.supervisor")


Prepare = Callable[[CoreLink, ModelCard, Callable[[], None]], Awaitable[None]]
"""Preparation of each core that has started, before it is READY; calls its last argument on progress. A `LoRAError`, a
`RequestError` or a `RefusedError` ends the core, and is a permanent failure if no core was READY before."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """Public health of the engine, without paths, addresses or fault messages.

    Attributes:
        state: see `Supervisor`.
        reason: reason why the engine does not run; "" if it runs.
        retry_after: seconds after which it may run; during a start, estimated from the duration of the last one.
    """

    state: str
    reason: str = ""
    retry_after: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisorTimeouts:
    """Internal timeouts in seconds, which are not user settings.

    Attributes:
        first_pause, longest_pause: pauses before a restart: doubled each time, from the first to the longest.
        healthy: time in READY after which the pauses begin anew.
        tick: interval of the checks for progress.
        dump: time for a core that hangs to write its stacks.
        end: time for a core to exit by itself.
    """

    first_pause: float = 0.5
    longest_pause: float = 30.0
    healthy: float = 60.0
    tick: float = 0.1
    dump: float = 0.5
    end: float = 5.0


class Supervisor:
    """A supervisor that keeps an engine core running; must be used from one event loop.

    If a core dies or hangs, all streams end with `EngineDeadError`, and another core is started after a pause. A
    permanent startup failure (a bad model, a setting that cannot be served) is not retried, unless the same settings
    were READY before: then the cause may be transient, as memory that another process has. The same holds for a process
    that cannot be started; if the machine is short of memory or descriptors, the first start is retried, too.

    Args:
        command: command line of a core (default: this Python with ``-m jaxinfer.serve.core``).
        prepare: see `Prepare`.
        kv_events: called with the KV events of a core.

    Attributes:
        state: "starting", "ready", "dead" (until the next start) or "stopped".
        restarts: number of restarts of the core.
        failure: message of a permanent startup failure: the state is "stopped" then.
        backend: the core that currently runs; raises `EngineDeadError` while none is READY.
    """

    def __init__(
        self,
        config: ServeConfig,
        command: Sequence[str] | None = None,
        patience: SupervisorTimeouts = SupervisorTimeouts(),
        prepare: Prepare | None = None,
        kv_events: Callable[[KvEvents], object] = lambda _: None,
    ) -> None:
        self._config, self._patience, self._prepare, self._kv_events = config, patience, prepare, kv_events
        self._command = [sys.executable, "-m", "jaxinfer.serve.core"] if command is None else list(command)
        self.state: str = STARTING
        self.restarts = 0
        self.failure: str | None = None
        self.backend = CurrentCore(self._link)
        self._ready: tuple[ModelCard, str] | None = None  # card and folder of the last READY core
        self._ready_since: float | None = None
        self._reason = self._public = _STARTING
        self._begun = self._took = 0.0  # time of the last or next start, and duration of the last one that succeeded
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None  # referenced, or it could be garbage collected
        self._stopping = False
        self._listeners: list[Callable[[str], None]] = []
        self._startup = StartupEvent()
        self._changed = asyncio.Event()
        self._progress = self._steps = self._heard = 0
        self._alone = config.num_processes == 1
        self._p99 = 0.0  # of the steps of this core or an earlier one, whichever is more
        self._doubt = 0.0
        self._long_calls = 0  # calls in flight that may block a core for long
        self._profile: asyncio.Task[None] | None = None  # waits for the end of the last profile

    # ---- state

    @property
    def card(self) -> ModelCard:
        """The model card. Raises EngineDeadError if no core was READY yet."""
        return self._known()[0]

    @property
    def folder(self) -> str:
        """The folder of tokenizer and chat template; raises as `card`."""
        return self._known()[1]

    @property
    def condition(self) -> Condition:
        """Public health of the engine. Must be read on the event loop."""
        due = self._begun + self._took - asyncio.get_running_loop().time()
        return Condition(self.state, self._public, max(1.0, due))

    def subscribe(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call ``listener`` with each new state; return a function that unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def watch_startup(self) -> AsyncIterator[StartupEvent]:
        """Yield startup events from now on, until "ready" or "failed". A slow reader misses intermediate events."""
        while True:
            event, changed = self._startup, self._changed
            yield event
            if event.phase in (READY, FAILED):
                return
            await changed.wait()

    # ---- lifecycle

    async def start(self) -> None:
        """Begin to run cores. Does not wait for READY: see `until_ready`, `watch_startup` and `subscribe`."""
        with contextlib.suppress(OSError):  # no folder for temporary files: the first start reports it
            folder.sweep()
        self._task = asyncio.create_task(self._run())

    async def until_ready(self) -> ModelCard:
        """Wait until a core is READY and return its model card.

        Raises:
            EngineDeadError: it was stopped before, or its start failed permanently, with the reason.
        """
        while self.state != READY:
            if self.state == STOPPED:
                raise EngineDeadError(self._reason)
            await self._changed.wait()
        return self.card

    async def until_stopped(self) -> str | None:
        """Wait for the end; return the message of a permanent startup failure, None if it was stopped."""
        if self._task is not None:
            await asyncio.wait({self._task})
        return self.failure

    async def stop(self, seconds: float = 10.0) -> None:
        """Abort running requests and stop the core, which is killed after ``seconds``."""
        self._stopping = True
        if self._task is None:
            return
        if self._child is not None:
            self._child.link.stop()
            await asyncio.wait({self._task}, timeout=seconds)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def start_profile(self, steps: int = MAX_STEPS) -> None:
        """Start a profile, which ends after so many steps. Raises `ServeError` if no trace folder is set, a profile
        runs, or no core is READY."""
        with self._during_long_call():
            await _answered(lambda: self._link().start_profile(steps))
        self._profile = asyncio.create_task(self._during_profile())

    async def _during_profile(self) -> None:
        """Take no step for a hang that is long because the end of a profile writes its trace."""
        with self._during_long_call(), contextlib.suppress(EngineDeadError, RefusedError):
            await self._link().wait_profile()

    async def stop_profile(self) -> str:
        """Stop the profile and return the folder with the trace.

        Raises:
            ServeError: no profile is running, or no core is READY.
        """
        with self._during_long_call():
            return await _answered(lambda: self._link().stop_profile())

    async def operate(self, operation: AnyOperation) -> WeightState:
        """See `CoreLink.operate`. Raises EngineDeadError if no core is READY."""
        with self._during_long_call():
            return await self._link().operate(operation)

    @contextlib.contextmanager
    def _during_long_call(self) -> Iterator[None]:
        self._long_calls += 1
        try:
            yield
        finally:
            self._long_calls -= 1

    # ---- sequence of cores

    async def _run(self) -> None:
        pause = self._patience.first_pause
        try:
            while True:
                reason = await self._live()
                if self._stopping or self.failure is not None:
                    return
                if self._was_healthy():
                    pause = self._patience.first_pause
                _log.warning("%s; it is started again in %g s", reason, pause)
                self._begun = asyncio.get_running_loop().time() + pause
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._patience.longest_pause)
                self.restarts += 1
        finally:
            reason = self.failure or "the server is stopping"
            if self._startup.phase != READY:
                self._startup = StartupEvent(FAILED, message=reason)
            self._enter(STOPPED, reason, "the server is stopping")

    async def _live(self) -> str:
        """Run one core until it ends; return the reason."""
        self._startup, self._ready_since = StartupEvent(), None
        self._progress = self._steps = self._heard = 0
        self._begun = asyncio.get_running_loop().time()
        self._enter(STARTING, _STARTING)
        try:
            child = await Child.start(self._command, self._config, self._observe)
        except OSError as error:
            return self._not_started(error)
        self._child = child
        carrying, watching = asyncio.create_task(child.link.run()), asyncio.create_task(self._watch())
        exiting = asyncio.create_task(child.process.wait())
        grace = 0.0
        try:
            await asyncio.wait({carrying, watching, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if exiting.done():  # its last messages may still be in flight
                await asyncio.wait({carrying}, timeout=_LAST_WORDS_SECONDS)
            if watching.done():
                self._died(watching.result())
                await child.dump(self._patience.dump)
            else:
                self._died("the engine core is gone")
                grace = self._patience.end
        finally:
            self._child = None
            watching.cancel()
            how = await child.end(grace)
            carrying.cancel()
            await asyncio.wait({carrying, watching, exiting})
        if not carrying.cancelled() and (fault := carrying.exception()) is not None:
            _log.error("the link to the engine core ended by a fault", exc_info=fault)
        return f"{self._reason} (it {how})"

    def _not_started(self, error: OSError) -> str:
        """Record that there is no process, and the reason: with paths for the log, without them for clients."""
        reason = f"the engine core cannot be started: {error}"
        if self._ready is None and error.errno not in _PASSING:
            self.failure = reason
        what = errno.errorcode.get(error.errno or 0, "OSError")
        self._died(reason, f"the engine core cannot be started: {error.strerror or 'a fault'} ({what})")
        return reason

    async def _watch(self) -> str:
        """Return the reason when the core makes no progress. Time is counted in ticks: if this process itself is held
        up, a core that is held up with it does not count as hung."""
        seen, quiet, heard, silent = self._progress, 0.0, 0, 0.0
        while True:
            await asyncio.sleep(self._patience.tick)
            seen, quiet = self._progress, quiet + self._patience.tick if self._progress == seen else 0.0
            heard, silent = self._heard, silent + self._patience.tick if self._heard == heard else 0.0
            if self.state == READY and quiet > (limit := self._step_limit()):
                self._doubt = min(2 * limit, LONGEST_DOUBT)
                return f"the engine hangs: no step ended in {limit:g} s"
            if heard and not self._alone and silent > self._config.group_timeout:
                return f"the engine hangs: it said nothing for {silent:g} s"
            if self.state == STARTING and quiet > self._config.startup_timeout:
                return f"the engine hangs: its start did not get on in {self._config.startup_timeout:g} s"

    def _step_limit(self) -> float:
        """Return the seconds without progress after which a core counts as hung.

        Unless it is set, the limit follows from the step times. A model with first steps above the minimum limit gets
        twice the time after each core that was ended for it.
        """
        if not self._alone:
            return max(self._config.group_timeout, LONGEST_DOUBT if self._long_calls else 0.0)
        if self._config.step_timeout is not None:
            return self._config.step_timeout
        least = LONGEST_DOUBT if self._long_calls else LEAST_STEP_TIMEOUT
        return max(least, STEPS * self._p99, self._doubt)

    def _observe(self, message: Lifecycle) -> None:
        if self.state == DEAD:
            return  # the core is being ended: its messages are ignored
        self._heard += 1
        match message:
            case StartupEvent():
                self._get_on()
                self._announce(message)
            case Ready():
                self._started(message.card, message.folder)
            case Pulse():
                self._beat(message)
            case KvEvents():
                self._kv_events(message)
            case Failed():
                self._cannot_start(message.reason)
            case Fault():
                self._died(message.reason, "the engine ended by a fault")

    def _started(self, card: ModelCard, folder: str) -> None:
        if self._prepare is None or self._child is None:
            self._become_ready(card, folder)
        else:
            preparing = self._prepare(self._child.link, card, self._get_on)
            self._preparing = asyncio.ensure_future(self._prepared(self._child, preparing, card, folder))

    async def _prepared(self, child: Child, preparing: Awaitable[None], card: ModelCard, folder: str) -> None:
        try:
            await preparing
        except (LoRAError, RequestError, RefusedError) as error:
            child.link.stop()
            self._cannot_start(str(error))
        except EngineDeadError:
            return
        if child is self._child and self.state == STARTING:
            self._become_ready(card, folder)

    def _become_ready(self, card: ModelCard, folder: str) -> None:
        self._ready = card, folder
        self._ready_since = asyncio.get_running_loop().time()
        self._took = self._ready_since - self._begun
        self._get_on()
        self._startup = StartupEvent(READY)
        self._enter(READY, "")

    def _get_on(self) -> None:
        self._progress += 1

    def _cannot_start(self, reason: str) -> None:
        if self._ready is None:
            self.failure = reason
        self._died(reason, "the engine cannot start")

    def _beat(self, pulse: Pulse) -> None:
        """Record a heartbeat; before READY it only shows that the process lives."""
        self._p99 = max(pulse.p99, self._p99 if pulse.steps < _ENOUGH_STEPS else 0.0)
        if self.state == READY and (not pulse.busy or pulse.steps != self._steps):
            self._progress, self._steps = self._progress + 1, pulse.steps

    def _died(self, reason: str, public: str | None = None) -> None:
        """Enter DEAD at once, before the process ends. The first reason counts; ``public``: reason for clients."""
        if self._child is not None:
            self._child.link.close(reason)
        if self.state != DEAD and not self._stopping:
            self._startup = StartupEvent(FAILED, message=reason)
            self._enter(DEAD, reason, public)

    def _enter(self, state: str, reason: str, public: str | None = None) -> None:
        self.state, self._reason, self._public = state, reason, reason if public is None else public
        self._announce(self._startup)
        for listener in list(self._listeners):
            listener(state)

    def _announce(self, event: StartupEvent) -> None:
        self._startup = event
        self._changed.set()
        self._changed = asyncio.Event()

    def _was_healthy(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._ready_since is not None and now - self._ready_since >= self._patience.healthy

    def _known(self) -> tuple[ModelCard, str]:
        if self._ready is None:
            raise EngineDeadError(self._reason)
        return self._ready

    def _link(self) -> CoreLink:
        if self.state != READY or self._child is None:
            raise EngineDeadError(self._reason)
        return self._child.link


async def _answered[T](question: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return await question()
    except RefusedError as error:
        raise ServeError(Kind.INVALID, str(error)) from error
    except EngineDeadError as error:
        raise ServeError(Kind.UNAVAILABLE, str(error), retry_after=1.0) from error


class CurrentCore:
    """A `Backend` and `LoRABackend` that forwards to the current core."""

    def __init__(self, link: Callable[[], CoreLink]) -> None:
        self._link = link

    async def submit(self, request: Request) -> BackendStream:
        return await self._link().submit(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        await self._link().abort(request_id, index)

    async def stats(self) -> EngineStats:
        return await self._link().stats()

    async def reset_prefix_cache(self) -> int:
        return await self._link().reset_prefix_cache()

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        return await self._link().load_lora(name, path)

    def unload_lora(self, name: str) -> None:
        self._link().unload_lora(name)

    def release_lora(self, ref: LoRARef) -> None:
        self._link().release_lora(ref)
