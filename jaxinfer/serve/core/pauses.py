"""Pauses of an engine, and changes of its weights and memory between two steps. No jax."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxinfer.engine.core import EngineCore, Pace, PauseMode
from jaxinfer.sampling_params import RequestError


@runtime_checkable
class Update(Protocol):
    """Result of an update of weights; see `jaxinfer.served.WeightUpdate`."""

    @property
    def version(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


@runtime_checkable
class Weights(Protocol):
    """Weights and memory of an engine, see `jaxinfer.served.ServedModel`: `stage`, `discard` and `checksums` are called
    in any thread, the other methods in the engine thread."""

    @property
    def asleep(self) -> list[str]: ...
    @property
    def stage(self) -> Callable[..., Any]: ...
    def commit(self, staged: Any, version: int | None = None) -> Update: ...
    def discard(self, staged: Any) -> None: ...
    def require_version(self, version: int | None) -> int: ...
    def sleep(self, level: int = 1, tags: Iterable[str] = ...) -> None: ...
    def wake_up(self, tags: Iterable[str] = ...) -> None: ...
    def resume(self) -> None: ...
    def checksums(self) -> Mapping[str, str]: ...


class Pauses:
    """Pauses of one engine; must be used from the engine thread.

    A pause for a change ends with it, unless an operator has paused the engine meanwhile.

    Args:
        abort_all: aborts all requests.
        weights: None: nothing but `resume` of the engine is needed to go on.

    Attributes:
        awaited: futures of pauses that have not begun.
    """

    def __init__(self, engine: EngineCore, abort_all: Callable[[], object], weights: Weights | None) -> None:
        self._engine, self._abort_all, self._weights = engine, abort_all, weights
        self.awaited: list[concurrent.futures.Future[None]] = []
        self._own = False  # the engine pauses for a change

    def pause(self, mode: PauseMode) -> concurrent.futures.Future[None]:
        """Pause as `AsyncEngine.pause` says; the future ends when the engine is paused."""
        self._own = False
        if mode == "abort":
            self._abort_all()
        if self._engine.pace is not Pace.PAUSED:
            self._engine.pause("wait" if mode == "wait" else "keep")
        return self._paused()

    def resume(self) -> None:
        """Go on. Raises RequestError while something is asleep."""
        self._own = False
        if self._weights is None:
            self._engine.resume()
        else:
            self._weights.resume()
        self.settle()

    def drain(self) -> concurrent.futures.Future[None]:
        """Pause for a change; the future ends when the requests that have begun have ended.

        Raises:
            RequestError: the engine is paused already, with such requests.
        """
        if self._engine.pace is Pace.PAUSED:
            self._require_none_begun()
        elif self._engine.pace is Pace.RUNNING:
            self._own = True
            self._engine.pause("wait")
        return self._paused()

    def _require_none_begun(self) -> None:
        self._engine.pause("wait")
        begun = self._engine.pace is Pace.DRAINING
        self._engine.pause("keep")
        if begun:
            raise RequestError("mode", "='wait' while the engine is paused with requests that have begun")

    def change_drained[T](self, change: Callable[[], T]) -> T:
        """Run a change after `drain`, and end the pause that it began."""
        if self._engine.pace is not Pace.PAUSED:
            raise _resumed()
        self.end_own()
        return change()

    def change_now[T](self, mode: PauseMode, change: Callable[[], T]) -> T:
        """Run a change while requests run ("keep"), or after aborting them ("abort")."""
        if mode == "abort":
            self._abort_all()
        return change()

    def end_own(self) -> None:
        """End the pause that `drain` began."""
        if self._own:
            self._own = False
            self._engine.resume()
            self.settle()

    def settle(self) -> None:
        """Answer those that wait for a pause, if it has begun or will not begin."""
        if self._engine.pace is Pace.DRAINING:
            return
        error = None if self._engine.pace is Pace.PAUSED else _resumed()
        self._answer(error)

    def close(self, error: Exception) -> None:
        """Answer those that wait for a pause: the engine has ended."""
        self._answer(error)

    def _paused(self) -> concurrent.futures.Future[None]:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.awaited.append(future)
        self.settle()
        return future

    def _answer(self, error: Exception | None) -> None:
        awaited, self.awaited = self.awaited, []
        for future in awaited:
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _resumed() -> RequestError:
    return RequestError("mode", "='wait': the engine was resumed before its requests had ended")
