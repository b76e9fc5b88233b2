"""Adapters without a model: folders are dict entries, contents are numbers, arrays hold the content number. No jax."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxinfer.lora.adapter import Adapter, Delta
from jaxinfer.lora.folders import CONFIG_FILE
from jaxinfer.lora.slots import Part
from jaxinfer.lora.store import LoRAStore

PARTS = 3


def make_adapter(content: int) -> Adapter:
    """Return an adapter for a content number; its identity is the number in hexadecimal, never 0."""
    delta = Delta(np.full((1, 2), content, np.float32), np.ones((2, 1), np.float32))
    return Adapter(format(content, "x"), 1, {("w",): delta})


def parts_of(adapter: Adapter) -> list[Part]:
    """Return `PARTS` parts, each of which holds the content number."""
    return [{"w:a": np.array([int(adapter.identity, 16)])} for _ in range(PARTS)]


class Folders:
    """Contents by path, with a read count of each."""

    def __init__(self, **contents: int) -> None:
        self.contents = dict(contents)
        self.reads: collections.Counter[str] = collections.Counter()

    def read(self, path: str) -> Adapter:
        self.reads[path] += 1
        if path not in self.contents:
            raise FileNotFoundError(f"{path}: no such folder")
        return make_adapter(self.contents[path])


def write_number(folder: pathlib.Path, content: int) -> pathlib.Path:
    """Write a folder that `read_number` accepts as an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(str(content))
    return folder


def read_number(folder: str) -> Adapter:
    """Read the adapter of a real folder. Raises OSError or ValueError if it has none."""
    return make_adapter(int((pathlib.Path(folder) / CONFIG_FILE).read_text()))


class Now:
    """A replacement of the store's thread: runs calls immediately, or in `run` if ``late``."""

    def __init__(self) -> None:
        self.late = False
        self._due: collections.deque[tuple[Future[Any], Callable[[], Any]]] = collections.deque()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._due.append((future, lambda: function(*args)))
        if not self.late or function.__name__ == "_load":  # the caller waits for a load
            self.run()
        return future

    def run(self) -> None:
        """Run all pending calls."""
        while self._due:
            future, work = self._due.popleft()
            try:
                future.set_result(work())
            except ValueError as error:
                future.set_exception(error)

    def shutdown(self) -> None:
        self.run()


def make_store(folders: Folders, capacity: int = 4) -> tuple[LoRAStore, Now]:
    """Return a store without a thread."""
    store, now = LoRAStore(folders.read, parts_of, capacity), Now()
    store._thread.shutdown()
    store._thread = now  # type: ignore[assignment]
    return store, now


def in_memory(store: LoRAStore) -> int:
    """Return the number of adapters in host memory."""
    return sum(each.adapter is not None for each in store._contents.values())
