"""Multi-process execution: process 0 broadcasts each command, and the executor of each process runs it."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32, UInt8

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.core import EngineMemory, Pace, PauseMode
from jaxinfer.engine.execution.commands import COMMANDS, Command, Decode, DecodeBatch, Executor, ReadPages
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.prepare import Prepared, prepared_weights
from jaxinfer.engine.scheduling.usage import Usage, joined, usage_of
from jaxinfer.models.model import Model
from jaxinfer.parallel import messages
from jaxinfer.parallel.frames import ChannelError, Frame
from jaxinfer.parallel.group import Group, GroupError
from jaxinfer.parallel.mesh import stages
from jaxinfer.parallel.processes import processes_of
from jaxinfer.sampling import Sampled

REPORT_SECONDS = 5.0
"""Seconds between two reports of a process's memory."""


class Answers:
    """Pending results of another process, in the order of the calls."""

    def __init__(self, group: Group, process: int) -> None:
        self._group, self.process = group, process
        self._due: collections.deque[list[Answer]] = collections.deque()

    def of(self, results: Any) -> Any:
        """Replace each leaf of a tree by an `Answer`, which numpy can read."""
        leaves, form = jax.tree.flatten(results)
        due = [Answer(self) for _ in leaves]
        self._due.append(due)
        return jax.tree.unflatten(form, due)

    def take(self) -> None:
        """Receive the oldest pending answers. Blocks."""
        for answer, array in zip(self._due.popleft(), self._group.answer(self.process), strict=True):
            answer.array = array


class Answer:
    """An array sent by another process. Reading it blocks until it arrives."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.array: np.ndarray | None = None

    def copy_to_host_async(self) -> None:
        """Do nothing: the array is already being sent."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        while self.array is None:
            self._answers.take()
        return np.array(self.array, dtype, copy=copy)


class HostInputTokens:
    """Last sampled tokens of a microbatch on the host, for a first stage that the last stage's devices cannot reach."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._newest: collections.deque[tuple[np.ndarray, Any]] = collections.deque()

    def with_tokens(self, batch: DecodeBatch) -> DecodeBatch:
        """Fill in a token for each row. Blocks on the microbatch's last step where a needed token was sampled there."""
        missing = batch.tokens < 0
        if (missing & (batch.positions >= 0)).any():
            self._settle(0)
        return batch._replace(tokens=np.where(missing, self._tokens, batch.tokens))

    def sampled(self, batch: DecodeBatch, tokens: Any) -> None:
        """Record ``tokens`` that the rows of a batch will sample: only a slot's own row counts (see `DecodeBatch`)."""
        slot_rows = batch.positions >= 0
        if batch.owners is not None:
            slot_rows &= batch.owners == np.arange(len(slot_rows))
        self._newest.append((slot_rows, tokens))
        self._settle(2)  # earlier ones were read

    def _settle(self, left: int) -> None:
        while len(self._newest) > left:
            slot_rows, tokens = self._newest.popleft()
            self._tokens[slot_rows] = np.asarray(tokens)[slot_rows]


class LeaderExecutor(Executor):
    """The `Executor` of process 0: runs each command locally, and broadcasts it to the other participating processes.

    Results are whole on its own devices, or an `Answer` of another process; `ReadPages` returns the local heads. A
    command costs a message to each other process, and does not block on any: `wait` waits for the local devices only.
    There is no `digest`: the executables of other processes are not visible here. Weights and memory are those of this
    process alone: `FollowerMemory` has those of another one.

    Args:
        group: the group in which this is process 0.
        replica: the number of the mesh among the replicas of the group.
        processes: participating processes, which have devices of the mesh. Other arguments: see `LocalExecutor`.

    Attributes:
        local: the executor of this process.
    """

    def __init__(
        self,
        group: Group,
        replica: int,
        processes: Collection[int],
        prepared: Prepared,
        mesh: Mesh,
        progress: CompileProgress | None = None,
    ) -> None:
        self._group, self._replica, self._processes = group, replica, processes
        last = processes_of(stages(mesh)[-1])
        self._answers = None if 0 in last else Answers(group, last[0])
        self._staged = mesh.shape["stage"] > 1 and len(processes_of(mesh)) > 1
        engine = prepared.config
        rows, microbatches = engine.rows // engine.microbatches, engine.microbatches
        self._host_tokens = [HostInputTokens(rows) for _ in range(microbatches)] if self._staged else None
        self.local = LocalExecutor(prepared, mesh, progress)
        group.ready()

    def run[Result](self, command: Command[Result]) -> Result:
        if isinstance(command, Decode) and self._host_tokens is not None:
            return cast(Result, self._decode(command, self._host_tokens[command.microbatch]))
        if isinstance(command, ReadPages):
            return cast(Result, self._read_pages(command))
        return self._answered(command)

    def _answered[Result](self, command: Command[Result]) -> Result:
        """Run a command; its results are answers where another process has the last stage."""
        if not command.by_last_stage or self._answers is None:
            return self._run(command)
        return cast(Result, self._answers.of(self._run(command, [self._answers.process])))

    def _run[Result](self, command: Command[Result], answering: Sequence[int] = ()) -> Result:
        fields, arrays = messages.encode(command)
        values = {"replica": self._replica, "answers": list(answering), "fields": fields}
        self._group.call(type(command).__name__, values, arrays, self._processes)
        result = self.local.run(command)
        if self.local.runtimes:
            self._group.launched(result)
        return result

    def _decode(self, command: Decode, host: HostInputTokens) -> Sampled:
        batch = host.with_tokens(command.batch)
        sampled = self._answered(dataclasses.replace(command, batch=batch))
        host.sampled(batch, sampled.tokens)
        return sampled

    def _read_pages(self, command: ReadPages) -> UInt8[np.ndarray, "pages slots bytes"]:
        """Read pages of this process's heads, for comparing two programs bitwise: other processes run the same programs
        on their heads. Other stages run different programs: for these a digest of each slot is appended."""
        others = [number for number in self._processes if number != 0] if self._staged else []
        found = self._run(command, others)
        digests = [self._group.answer(number)[0].view(np.uint8) for number in others]
        return np.concatenate([found, *digests], -1)

    def wait(self) -> None:
        self.local.wait()

    def usage(self) -> Usage:
        """Return the memory of this process's devices, and what `report_usage` of the others has sent last."""
        others = (report.get(str(self._replica)) for report in self._group.reports())
        return joined([self.local.usage(), *(usage_of(each) for each in others if each is not None)])

    def temporaries(self) -> int:
        return self.local.temporaries()

    def stage(self, model: Model, *, drafts: bool = False) -> list[dict[str, Any]]:
        return self.local.stage(model, drafts=drafts)

    def swap(self, weights: Sequence[Any]) -> None:
        self.local.swap(weights)

    def sleep(self, *, cache: bool, weights: bool) -> None:
        self.local.sleep(cache=cache, weights=weights)

    def wake(self) -> None:
        self.local.wake()


class FollowerMemory(EngineMemory):
    """The weights and pools of another process than 0: an `EngineMemory` of its executors, which does nothing itself.

    Args:
        executors: see `follow`.
        config: settings of each replica.
    """

    pace, weight_version, shares_weights = Pace.PAUSED, 0, False

    def __init__(self, executors: Mapping[int, LocalExecutor], config: ResolvedEngine) -> None:
        self._executors, self._config = list(executors.values()), config

    def pause(self, mode: PauseMode = "wait") -> None:
        """Do nothing: only process 0 plans steps."""

    def resume(self) -> None:
        """Do nothing: only process 0 plans steps."""

    def stage(self, model: Model, *, drafts: bool = False) -> list[Any]:
        mesh = self._executors[0].runtimes[0].mesh
        prepared = prepared_weights(model, self._config, mesh.devices.flat[0].platform, mesh)
        return [executor.stage(prepared, drafts=drafts) for executor in self._executors]

    def swap(self, weights: Sequence[list[Any]], version: int, *, restart: bool = True) -> None:
        for number, executor in enumerate(self._executors):
            executor.swap([each[number] for each in weights])
        self.weight_version = version

    def sleep(self, *, cache: bool, weights: bool) -> None:
        for executor in self._executors:
            executor.sleep(cache=cache, weights=weights)

    def wake(self) -> None:
        for executor in self._executors:
            executor.wake()


def report_usage(executors: Mapping[int, LocalExecutor], group: Group, seconds: float = REPORT_SECONDS) -> None:
    """Report the memory of this process's devices to process 0, by replica, until the group is over."""
    while not group.is_over:
        usages = {str(replica): dataclasses.asdict(executor.usage()) for replica, executor in executors.items()}
        group.report(usages)
        time.sleep(seconds)


Change = Callable[..., None]
"""A change of weights or memory, called with the values of process 0's call."""


def follow(
    executors: Mapping[int, LocalExecutor], group: Group, changes: Mapping[str, Change] = MappingProxyType({})
) -> None:
    """Run the commands of process 0 on this process's executors. Does not return while the group lives.

    Raises GroupError for an unknown command of process 0: it runs another version.

    Args:
        executors: executors by replica number, for replicas of which this process has devices.
        changes: calls that are no commands of an executor, by name.
    """
    group.ready()
    for frame in group.calls():
        if frame.kind in changes:
            group.launched()  # it may take longer than a step, and process 0 does not take it for a hang
            changes[frame.kind](**frame.values)
            continue
        executor, command = executors[frame.values["replica"]], _command(frame)
        result: Any = executor.run(command)
        if group.membership.process_id in frame.values["answers"]:
            group.launched(_digests(result) if isinstance(command, ReadPages) else result, wanted=True)
        else:
            group.launched((result, executor.handed))


def _command(frame: Frame) -> Command[Any]:
    kind = COMMANDS.get(frame.kind)
    if kind is None:
        raise GroupError(f"process 0 calls {frame.kind}, which this version of jaxinfer does not have")
    try:
        return messages.decode(kind, frame.values["fields"], frame.arrays)
    except ChannelError as error:
        raise GroupError(f"process 0 runs another version of jaxinfer: {error}") from error


def _digests(pages: UInt8[np.ndarray, "pages slots bytes"]) -> Int32[np.ndarray, "pages slots 4"]:
    """Return a 16-byte digest of each slot's bytes."""
    digests = [hashlib.blake2b(slot.tobytes(), digest_size=16).digest() for page in pages for slot in page]
    return np.frombuffer(b"".join(digests), np.int32).reshape(*pages.shape[:2], 4)
