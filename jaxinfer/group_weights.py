"""Weights and memory of an engine of several processes: each change is made in all, between the same two steps.

New weights are read by each process, which needs only those of its own devices, while the engine computes. Process 0
asks for them by a note, and waits for what all say: if one cannot read them, none serves them. The exchange, sleep and
waking are calls, in order with the steps; each other process answers when it has made the change.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxinfer.engine.core import EngineMemory
from jaxinfer.engine.distributed.leader import Change, FollowerMemory
from jaxinfer.models.model import Model
from jaxinfer.parallel.group import Group
from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.weight_folders import weights_folder
from jaxinfer.served import TAGS, ServedModel, StagedWeights, WeightUpdate, require_level, require_tags
from jaxinfer.weights.fit import checksum_of, leaves_of, own_checksums, wrong

Read = Callable[..., Model]
"""Opens the weights of one or several folders for the served model; raises RequestError if they cannot be served."""


class LeadingWeights(ServedModel[EngineMemory]):
    """Weights and memory in process 0, which leads; the others have `FollowingWeights`.

    Args:
        read: opens weights; called in worker threads.
        root: folder below which all folders are; the other processes look for the same ones below their own.
        Others: see `ServedModel`.
    """

    def __init__(
        self,
        model: Model,
        engine: EngineMemory,
        group: Group,
        read: Read,
        root: str | None,
        *,
        check_finite: bool = False,
    ) -> None:
        super().__init__(model, engine, check_finite=check_finite)
        self._group, self._read, self._root = group, read, root

    def stage(self, weights: Any, **options: Any) -> StagedWeights:
        """Read the weights of folders below the root, in every process. From any thread.

        Args:
            weights: a tuple of folders.

        Raises:
            RequestError: see `ServedModel.stage`; or another process cannot read or place them, and its number.
        """
        if not isinstance(weights, tuple) or self._root is None:
            raise wrong("params", "must be folders below weights_root: each of several processes reads its own shards")
        for name in (name for name, value in options.items() if value):
            raise wrong(name, "is not supported where an engine has several processes")
        root = pathlib.Path(self._root).resolve()
        self._group.note({"stage": [str(pathlib.Path(folder).relative_to(root)) for folder in weights]})
        try:
            try:
                staged = super().stage(self._read(*weights))
            finally:
                told = self._group.notes()
            for process, note in told.items():
                if note["error"] is not None:
                    raise RequestError("path", f": process {process}: {note['error']}")
        except BaseException:
            self._group.note({"drop": True})
            raise
        return staged

    def commit(self, staged: StagedWeights, version: int | None = None) -> WeightUpdate:
        self.require_version(version)
        self._call("exchange")
        update = super().commit(staged, version)
        self._group.notes()
        return update

    def discard(self, staged: StagedWeights) -> None:
        if not staged.served:
            self._group.note({"drop": True})

    def sleep(self, level: int = 1, tags: Iterable[str] = TAGS) -> None:
        require_level(level)
        names = require_tags(tags)
        self._call("sleep", level=level, tags=names)
        super().sleep(level, names)
        self._group.notes()

    def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        names = require_tags(tags)
        self._call("wake_up", tags=names)
        super().wake_up(names)
        self._group.notes()

    def checksums(self) -> dict[str, str]:
        """Return a digest of each served parameter, by path: if no process has all of it, of the digests of all.

        Raises:
            RequestError: processes have different values of a parameter of which each has all.
        """
        self.require_awake()
        self._group.note({"checksums": True})
        own = own_checksums(self.model.params)
        told = [own, *(note["checksums"] for note in self._group.notes().values())]
        return {path: _agreed(path, told) for path, _ in leaves_of(self.model.params)}

    def _call(self, name: str, **values: Any) -> None:
        self._group.call(name, values, ())
        self._group.launched()


def _agreed(path: str, told: list[Mapping[str, tuple[bool, str]]]) -> str:
    found = [each[path] for each in told if path in each]
    digests = [digest for _, digest in found]
    if not all(whole for whole, _ in found):
        return checksum_of([(str(place), digest) for place, digest in enumerate(digests)])
    if len(set(digests)) > 1:
        raise RequestError("checksums", f": {path} is not the same in all processes")
    return digests[0]


class FollowingWeights:
    """Weights and memory in another process than 0, which makes the changes of process 0, too.

    Args:
        read: opens the weights of a folder.
        root: folder below which they are; None: none are read.

    Attributes:
        changes: the calls that `jaxinfer.engine.distributed.leader.follow` makes.
    """

    def __init__(self, served: ServedModel[FollowerMemory], group: Group, read: Read, root: str | None) -> None:
        self._served, self._group, self._read, self._root = served, group, read, root
        self._staged = collections.deque[StagedWeights](maxlen=1)
        self.changes: Mapping[str, Change] = {
            "exchange": self._exchange,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    def listen(self) -> None:
        """Answer the notes of process 0. Does not return."""
        while True:
            (note,) = self._group.notes().values()
            match note:
                case {"stage": [*folders]}:
                    self._group.note({"error": self._stage(folders)})
                case {"checksums": _}:
                    self._group.note({"checksums": own_checksums(self._served.model.params)})
                case {"drop": _}:
                    self._staged.clear()

    def _stage(self, folders: list[str]) -> str | None:
        """Read and place weights; return the reason if that is not possible."""
        try:
            if self._root is None:
                raise RequestError("path", "is not read: this process was started without weights_root")
            paths = [str(weights_folder(pathlib.Path(self._root), folder)) for folder in folders]
            self._staged.append(self._served.stage(self._read(*paths)))
        except (RequestError, RuntimeError, MemoryError, OSError) as error:
            return str(error) or type(error).__name__
        return None

    def _exchange(self) -> None:
        self._served.commit(self._staged.pop())
        self._group.note({})

    def _sleep(self, level: int, tags: list[str]) -> None:
        self._served.sleep(level, tags)
        self._group.note({})

    def _wake_up(self, tags: list[str]) -> None:
        self._served.wake_up(tags)
        self._group.note({})
