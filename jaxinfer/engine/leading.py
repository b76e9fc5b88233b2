"""One executor in each process of a group: process 0 calls its own, and tells the others, which call theirs."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, override

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.compiled import CompileProgress
from jaxinfer.engine.executor import Executor, Kept
from jaxinfer.engine.group import Group, GroupError
from jaxinfer.engine.step import DecodeBatch, PrefillBatch
from jaxinfer.models.model import Model
from jaxinfer.parallel.frames import Frame
from jaxinfer.sampling import Logprobs, Sampled, SamplingLimits


class LeadingExecutor(Executor):
    """That of process 0. What it returns lies whole on its own devices, `pages` aside: those are its own parts.

    A call costs a message to each other process, and waits for none of them. What an executor keeps (`Kept`) goes by a
    number: the others keep their own copies, until ours is dropped.

    Args:
        group: of which this is process 0. Others as those of `Executor`.
    """

    def __init__(
        self,
        group: Group,
        model: Model,
        engine: ResolvedEngine,
        limits: SamplingLimits,
        mesh: Mesh,
        progress: CompileProgress | None = None,
    ) -> None:
        self._group, self._numbers = group, itertools.count()
        self._known: weakref.WeakKeyDictionary[Kept, int] = weakref.WeakKeyDictionary()
        self._dropped: collections.deque[int] = collections.deque()
        super().__init__(model, engine, limits, mesh, progress)
        group.ready()

    def _tell(self, name: str, *arrays: np.ndarray, **values: Any) -> None:
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._group.call(name, {**values, "dropped": dropped}, arrays)

    # ---- steps

    @override
    def decode(self, turn: int, batch: DecodeBatch) -> Sampled:
        self._tell("decode", *_arrays(batch), turn=turn)
        sampled = super().decode(turn, batch)
        self._group.launched(sampled)
        return sampled

    @override
    def decode_many(self, batch: DecodeBatch, steps: int) -> tuple[Sampled, Array]:
        self._tell("decode_many", *_arrays(batch), steps=steps)
        results = super().decode_many(batch, steps)
        self._group.launched(results)
        return results

    @override
    def prefill(self, batch: PrefillBatch) -> None:
        self._tell("prefill", *batch)
        super().prefill(batch)
        self._group.launched()

    @override
    def prefill_logprobs(self, batch: PrefillBatch, following: Int32[np.ndarray, " chunk"]) -> Logprobs:
        self._tell("prefill_logprobs", *batch, following)
        logprobs = super().prefill_logprobs(batch, following)
        self._group.launched(logprobs)
        return logprobs

    # ---- pages

    @override
    def copy(self, source: Int32[np.ndarray, "groups copies"], target: Int32[np.ndarray, "groups copies"]) -> None:
        self._tell("copy", source, target)
        super().copy(source, target)
        self._group.launched()

    @override
    def export(self, source: Int32[np.ndarray, "groups pages"], hosts: Sequence[int]) -> None:
        self._tell("export", source, hosts=list(hosts))
        super().export(source, hosts)
        self._group.launched()

    @override
    def settle(self, hosts: Sequence[int]) -> None:
        if hosts:
            self._tell("settle", hosts=list(hosts))
            super().settle(hosts)
            self._group.launched()

    @override
    def restore(self, hosts: Sequence[int], target: Int32[np.ndarray, "groups pages"]) -> None:
        self._tell("restore", target, hosts=list(hosts))
        super().restore(hosts, target)
        self._group.launched()

    @override
    def pages(self, source: Int32[np.ndarray, "groups pages"]) -> Shaped[np.ndarray, "pages layers *page"]:
        """Those heads that lie on this process's devices: whether two programs give the same bits is asked of them,
        and the programs are the others' as well."""
        self._tell("pages", source)
        found = super().pages(source)
        self._group.launched()
        return found

    # ---- slots

    @override
    def put_slots(self, turn: int, fields: Mapping[str, Shaped[np.ndarray, "rows *shape"]]) -> None:
        if fields:
            self._tell("put_slots", *fields.values(), turn=turn, names=list(fields))
            super().put_slots(turn, fields)
            self._group.launched()

    @override
    def admit(self, slot: int, prompt: Bool[np.ndarray, " vocab"], bias: Float32[np.ndarray, " vocab"]) -> None:
        self._tell("admit", prompt, bias, slot=slot)
        super().admit(slot, prompt, bias)
        self._group.launched()

    @override
    def keep(self, slot: int) -> Kept:
        number = next(self._numbers)
        self._tell("keep", slot=slot, number=number)
        return self._numbered(super().keep(slot), number)

    @override
    def resume(self, slot: int, kept: Kept) -> None:
        self._tell("resume", slot=slot, number=self._known[kept])
        super().resume(slot, kept)
        self._group.launched()

    @override
    def sampler(self, turn: int) -> Kept:
        number = next(self._numbers)
        self._tell("sampler", turn=turn, number=number)
        return self._numbered(super().sampler(turn), number)

    @override
    def put_sampler(self, turn: int, kept: Kept) -> None:
        self._tell("put_sampler", turn=turn, number=self._known[kept])
        super().put_sampler(turn, kept)
        self._group.launched()

    def _numbered(self, kept: Kept, number: int) -> Kept:
        self._known[kept] = number
        weakref.finalize(kept, self._dropped.append, number)
        self._group.launched(kept.state)
        return kept


def _arrays(batch: DecodeBatch) -> Iterable[np.ndarray]:
    return (array for array in batch if array is not None)


def follow(executor: Executor, group: Group) -> None:
    """Call what process 0 calls, on this process's executor. Does not return while the group lives.

    Raises:
        GroupError: process 0 calls what there is not: it runs another version.
    """
    group.ready()
    kept: dict[int, Kept] = {}
    for frame in group.calls():
        for number in frame.values["dropped"]:
            kept.pop(number, None)
        if frame.kind in ("keep", "resume", "sampler", "put_sampler"):
            group.launched(_keep(executor, frame, kept))
        else:
            group.launched(_call(executor, frame))


def _keep(executor: Executor, frame: Frame, kept: dict[int, Kept]) -> Any:
    number = frame.values["number"]
    match frame.kind:
        case "keep":
            kept[number] = executor.keep(frame.values["slot"])
            return kept[number].state
        case "sampler":
            kept[number] = executor.sampler(frame.values["turn"])
        case "resume":
            executor.resume(frame.values["slot"], kept[number])
        case "put_sampler":
            executor.put_sampler(frame.values["turn"], kept[number])
    return None


def _call(executor: Executor, frame: Frame) -> Any:
    """The results that tell when it has run; None where a later call's do."""
    values, arrays = frame.values, frame.arrays
    match frame.kind:
        case "decode":
            return executor.decode(values["turn"], DecodeBatch(*arrays))
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
            executor.pages(arrays[0])
            return None
        case "put_slots":
            return executor.put_slots(values["turn"], dict(zip(values["names"], arrays, strict=True)))
        case "admit":
            return executor.admit(values["slot"], *arrays)
    raise GroupError(f"process 0 calls {frame.kind}, which this version of jaxinfer does not have")
