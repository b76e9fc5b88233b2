"""One executor in each process of a group: process 0 calls its own, and tells the others, which call theirs."""

from __future__ import annotations

import collections
import hashlib
import itertools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, override

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt8

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.distributed.group import Group, GroupError
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import Executor, SamplerSnapshot
from jaxinfer.engine.execution.step import DecodeBatch, PrefillBatch
from jaxinfer.models.model import Model
from jaxinfer.parallel.frames import Frame
from jaxinfer.parallel.mesh import stages
from jaxinfer.parallel.processes import processes_of
from jaxinfer.sampling import Logprobs, Sampled, SamplingLimits


class Answers:
    """Results that another process has, in the order of the calls that give them."""

    def __init__(self, group: Group, process: int) -> None:
        self._group, self.process = group, process
        self._due: collections.deque[list[Answer]] = collections.deque()

    def of(self, results: Any) -> Any:
        """What numpy can read in place of each of a tree's leaves, which are None."""
        leaves, form = jax.tree.flatten(results, is_leaf=lambda leaf: leaf is None)
        due = [Answer(self) for _ in leaves]
        self._due.append(due)
        return jax.tree.unflatten(form, due)

    def take(self) -> None:
        """The oldest ones that are due. Waits."""
        for own, array in zip(self._due.popleft(), self._group.answer(self.process), strict=True):
            own.array = array


class Answer:
    """An array that another process sends. Who reads it waits."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.array: np.ndarray | None = None

    def copy_to_host_async(self) -> None:
        """It is on its way."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        while self.array is None:
            self._answers.take()
        return np.array(self.array, dtype, copy=copy)


class HostInputTokens:
    """The tokens that a microbatch sampled last, for a first stage whose devices cannot have them from the last's."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.zeros(rows, np.int32)
        self._newest: collections.deque[tuple[np.ndarray, Any]] = collections.deque()

    def with_tokens(self, batch: DecodeBatch) -> DecodeBatch:
        """With a token in each row. Waits for the microbatch's last step where one was sampled there."""
        missing = batch.tokens < 0
        if (missing & (batch.positions >= 0)).any():
            self._settle(0)
        return batch._replace(tokens=np.where(missing, self._tokens, batch.tokens))

    def sampled(self, batch: DecodeBatch, tokens: Any) -> None:
        """``tokens`` will be those that the rows of a batch sample: a slot's own row tells (see `DecodeBatch`)."""
        own = batch.positions >= 0
        if batch.owners is not None:
            own &= batch.owners == np.arange(len(own))
        self._newest.append((own, tokens))
        self._settle(2)  # those before were read

    def _settle(self, left: int) -> None:
        while len(self._newest) > left:
            own, tokens = self._newest.popleft()
            self._tokens[own] = np.asarray(tokens)[own]


class LeadingExecutor(Executor):
    """That of process 0. What it returns lies whole on its own devices, or is another process's `Answer`; of `pages` it
    gives what is here.

    A call costs a message to each other process that takes part, and waits for none of them. What an executor keeps
    (`SamplerSnapshot`) goes by a number: the others keep their own copies, until ours is dropped.

    Args:
        group: of which this is process 0.
        replica: the number of the mesh, among those of the group.
        processes: those that take part: that have devices of it. Others as those of `Executor`.
    """

    def __init__(
        self,
        group: Group,
        replica: int,
        processes: Collection[int],
        model: Model,
        engine: ResolvedEngine,
        limits: SamplingLimits,
        mesh: Mesh,
        progress: CompileProgress | None = None,
    ) -> None:
        self._group, self._replica, self._processes = group, replica, processes
        self._numbers = itertools.count()
        self._known: weakref.WeakKeyDictionary[SamplerSnapshot, int] = weakref.WeakKeyDictionary()
        self._dropped: collections.deque[int] = collections.deque()
        last = processes_of(stages(mesh)[-1])
        self._answers = None if 0 in last else Answers(group, last[0])
        self._staged = mesh.shape["stage"] > 1 and len(processes_of(mesh)) > 1
        rows, microbatches = engine.rows // engine.microbatches, engine.microbatches
        self._host_tokens = [HostInputTokens(rows) for _ in range(microbatches)] if self._staged else None
        super().__init__(model, engine, limits, mesh, progress)
        group.ready()

    def _broadcast(self, name: str, *arrays: np.ndarray, **values: Any) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        values |= {"replica": self._replica, "dropped": dropped}
        self._group.call(name, values, arrays, self._processes)

    def _launched(self, results: Any = None) -> None:
        """This process's part of a call is on its way."""
        if self.runtimes:
            self._group.launched(results)

    def _with_answers(self, results: Any) -> Any:
        """What a call gives, of which it was told that it is wanted."""
        self._launched(results)
        return results if self._answers is None else self._answers.of(results)

    @property
    def _answering(self) -> list[int]:
        """The process that answers."""
        return [] if self._answers is None else [self._answers.process]

    # ---- steps

    @override
    def decode(self, microbatch: int, batch: DecodeBatch) -> Sampled:
        host = None if self._host_tokens is None else self._host_tokens[microbatch]
        batch = batch if host is None else host.with_tokens(batch)
        self._broadcast("decode", *_arrays(batch), microbatch=microbatch, answers=self._answering)
        sampled: Sampled = self._with_answers(super().decode(microbatch, batch))
        if host is not None:
            host.sampled(batch, sampled.tokens)
        return sampled

    @override
    def decode_many(self, batch: DecodeBatch, steps: int) -> tuple[Sampled, Array]:
        self._broadcast("decode_many", *_arrays(batch), steps=steps, answers=self._answering)
        results: tuple[Sampled, Array] = self._with_answers(super().decode_many(batch, steps))
        return results

    @override
    def prefill(self, batch: PrefillBatch) -> None:
        self._broadcast("prefill", *batch)
        super().prefill(batch)
        self._launched()

    @override
    def prefill_logprobs(self, batch: PrefillBatch, following: Int32[np.ndarray, " chunk"]) -> Logprobs:
        self._broadcast("prefill_logprobs", *batch, following, answers=self._answering)
        logprobs: Logprobs = self._with_answers(super().prefill_logprobs(batch, following))
        return logprobs

    # ---- pages

    @override
    def copy(self, source: Int32[np.ndarray, "groups copies"], target: Int32[np.ndarray, "groups copies"]) -> None:
        self._broadcast("copy", source, target)
        super().copy(source, target)
        self._launched()

    @override
    def export(self, source: Int32[np.ndarray, "groups pages"], hosts: Sequence[int]) -> None:
        self._broadcast("export", source, hosts=list(hosts))
        super().export(source, hosts)
        self._launched()

    @override
    def settle(self, hosts: Sequence[int]) -> None:
        if hosts:
            self._broadcast("settle", hosts=list(hosts))
            super().settle(hosts)
            self._launched()

    @override
    def restore(self, hosts: Sequence[int], target: Int32[np.ndarray, "groups pages"]) -> None:
        self._broadcast("restore", target, hosts=list(hosts))
        super().restore(hosts, target)
        self._launched()

    @override
    def pages(self, source: Int32[np.ndarray, "groups pages"]) -> UInt8[np.ndarray, "pages slots bytes"]:
        """Whether two programs give the same bits is asked of them. Of heads those on this process's devices do, as the
        others' programs are the same; of other stages, whose programs are others, a digest of each slot is added."""
        others = [number for number in self._processes if number != 0] if self._staged else []
        self._broadcast("pages", source, answers=others)
        found = super().pages(source)
        self._launched()
        digests = [self._group.answer(number)[0].view(np.uint8) for number in others]
        return np.concatenate([found, *digests], -1)

    # ---- slots

    @override
    def set_slots(self, microbatch: int, fields: Mapping[str, Shaped[np.ndarray, "rows *shape"]]) -> None:
        if fields:
            self._broadcast("set_slots", *fields.values(), microbatch=microbatch, names=list(fields))
            super().set_slots(microbatch, fields)
            self._launched()

    @override
    def admit(self, slot: int, prompt: Bool[np.ndarray, " vocab"], bias: Float32[np.ndarray, " vocab"]) -> None:
        self._broadcast("admit", prompt, bias, slot=slot)
        super().admit(slot, prompt, bias)
        self._launched()

    @override
    def save_slot(self, slot: int) -> SamplerSnapshot:
        number = next(self._numbers)
        self._broadcast("save_slot", slot=slot, number=number)
        return self._numbered(super().save_slot(slot), number)

    @override
    def restore_slot(self, slot: int, kept: SamplerSnapshot) -> None:
        self._broadcast("restore_slot", slot=slot, number=self._known[kept])
        super().restore_slot(slot, kept)
        self._launched()

    @override
    def save_sampler(self, microbatch: int) -> SamplerSnapshot:
        number = next(self._numbers)
        self._broadcast("save_sampler", microbatch=microbatch, number=number)
        return self._numbered(super().save_sampler(microbatch), number)

    @override
    def restore_sampler(self, microbatch: int, kept: SamplerSnapshot) -> None:
        self._broadcast("restore_sampler", microbatch=microbatch, number=self._known[kept])
        super().restore_sampler(microbatch, kept)
        self._launched()

    def _numbered(self, kept: SamplerSnapshot, number: int) -> SamplerSnapshot:
        self._known[kept] = number
        weakref.finalize(kept, self._dropped.append, number)
        self._launched(kept.state)
        return kept


def _arrays(batch: DecodeBatch) -> Iterable[np.ndarray]:
    return (array for array in batch if array is not None)


def follow(executors: Mapping[int, Executor], group: Group) -> None:
    """Call what process 0 calls, on this process's executors. Does not return while the group lives.

    Args:
        executors: by the numbers of replicas of which this process has devices.

    Raises:
        GroupError: process 0 calls what there is not: it runs another version.
    """
    group.ready()
    kept: dict[int, dict[int, SamplerSnapshot]] = {number: {} for number in executors}
    for frame in group.calls():
        number, wanted = frame.values["replica"], group.membership.process_id in frame.values.get("answers", ())
        executor, own = executors[number], kept[number]
        for dropped in frame.values["dropped"]:
            own.pop(dropped, None)
        if frame.kind in ("save_slot", "restore_slot", "save_sampler", "restore_sampler"):
            group.launched(_keep(executor, frame, own))
            continue
        results = _call(executor, frame)
        group.launched(results if wanted else (results, executor.handed), wanted)


def _keep(executor: Executor, frame: Frame, kept: dict[int, SamplerSnapshot]) -> Any:
    number = frame.values["number"]
    match frame.kind:
        case "save_slot":
            kept[number] = executor.save_slot(frame.values["slot"])
            return kept[number].state
        case "save_sampler":
            kept[number] = executor.save_sampler(frame.values["microbatch"])
        case "restore_slot":
            executor.restore_slot(frame.values["slot"], kept[number])
        case "restore_sampler":
            executor.restore_sampler(frame.values["microbatch"], kept[number])
    return None


def _call(executor: Executor, frame: Frame) -> Any:
    """The results that tell when it has run; None where a later call's do."""
    values, arrays = frame.values, frame.arrays
    match frame.kind:
        case "decode":
            return executor.decode(values["microbatch"], DecodeBatch(*arrays))
        case "decode_many":
            return executor.decode_many(DecodeBatch(*arrays), values["steps"])
        case "prefill":
            return executor.prefill(PrefillBatch(*arrays))
        case "prefill_logprobs":
            return executor.prefill_logprobs(PrefillBatch(*arrays[:-1]), arrays[-1])
        case "copy":
            return executor.copy(*arrays)
        case "export":
            return executor.export(arrays[0], values["hosts"])
        case "settle":
            return executor.settle(values["hosts"])
        case "restore":
            return executor.restore(values["hosts"], arrays[0])
        case "pages":
            return _digests(executor.pages(arrays[0]))
        case "set_slots":
            return executor.set_slots(values["microbatch"], dict(zip(values["names"], arrays, strict=True)))
        case "admit":
            return executor.admit(values["slot"], *arrays)
    raise GroupError(f"process 0 calls {frame.kind}, which this version of jaxinfer does not have")


def _digests(pages: UInt8[np.ndarray, "pages slots bytes"]) -> Int32[np.ndarray, "pages slots 4"]:
    """16 bytes for each slot, which differ where its own do."""
    digests = [hashlib.blake2b(slot.tobytes(), digest_size=16).digest() for page in pages for slot in page]
    return np.frombuffer(b"".join(digests), np.int32).reshape(*pages.shape[:2], 4)
