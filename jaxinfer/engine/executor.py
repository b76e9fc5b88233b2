"""All device memory of an engine, and the calls that change it. Everything handed in is an array of the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.compiled import CompiledStage, CompileProgress, compile_stages
from jaxinfer.engine.placement import StageArrays, new_pools_on, new_slots, place_params
from jaxinfer.engine.stages import Stage, cut
from jaxinfer.engine.step import DecodeBatch, PrefillBatch, StepState
from jaxinfer.kv.transfer import TRANSFER_PAGES, HostPages
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import page_sharding, replicated, stages
from jaxinfer.parallel.processes import own_part, put_whole
from jaxinfer.sampling import HostSlots, Logprobs, Sampled, SamplingLimits, SlotParams, SlotState


class Part:
    """What one pipeline stage has: parameters, pools, pages in host memory, executables.

    ``pools`` are donated to each call: whoever calls stores what comes back.
    """

    def __init__(self, stage: Stage, engine: ResolvedEngine, mesh: Mesh) -> None:
        model = stage.model
        self.stage, self.mesh, self.everywhere = stage, mesh, replicated(mesh)
        self.params = place_params(model, mesh)
        self.pools = new_pools_on(model, engine, mesh)
        pages = page_sharding(mesh, model.cache_spec)
        self.host = HostPages(model.cache_spec, engine.host_pages, engine.page_size, model.dtype, pages)
        self.run: CompiledStage

    def arrive(self, x: Array | None) -> Array | None:
        """What the stage before gave, on this one's devices: copied from device to device, nobody waits."""
        return None if x is None else jax.device_put(x, self.everywhere)

    def pass_decode(self, batch: DecodeBatch, arriving: Array) -> Array:
        self.pools, hidden = self.run.decode(self.params, self.pools, batch, arriving)
        return hidden

    def pass_prefill(self, batch: PrefillBatch, arriving: Array | None) -> Array:
        lanes, size = batch.tokens.shape
        self.pools, hidden = self.run.prefill[size, lanes](self.params, self.pools, batch, arriving)
        return hidden


@dataclasses.dataclass
class Turn:
    """What is kept of the slots that decode together, on the last stage.

    ``fed`` is ``last_tokens`` once more, on its way to the first stage; None where that is the last one, too.
    """

    slots: SlotParams
    last_tokens: Array
    sampler: SlotState
    fed: Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """What an executor keeps of a slot, or of all: for it alone to look into."""

    state: SlotState


class Executor:
    """Runs the programs of an engine in the order of the calls, on one or more pipeline stages. Nothing waits.

    With several stages each has programs of its own, and what it gives is copied to the devices of the next. A call
    returns when all are on their way: so a stage works on one step while the stage before works on the next one.

    Args:
        model: in the form of `spread_model`.
        mesh: one replica's.
        progress: of the compilations.

    Attributes:
        parts: one for each stage.
        turns: see `ResolvedEngine.turns`.
    """

    def __init__(
        self,
        model: Model,
        engine: ResolvedEngine,
        limits: SamplingLimits,
        mesh: Mesh,
        progress: CompileProgress | None = None,
    ) -> None:
        self._engine, meshes = engine, stages(mesh)
        self.parts = [Part(stage, engine, own) for stage, own in zip(cut(model, len(meshes)), meshes, strict=True)]
        rows, last = engine.rows // engine.turns, self.parts[-1]
        shown = HostSlots(rows, limits).snapshot()
        self.turns = [
            self._turn(put_whole(shown, last.everywhere), *new_slots(model, rows, limits, last.mesh))
            for _ in range(engine.turns)
        ]
        arrays = [self._arrays(part) for part in self.parts]
        compiled = compile_stages([part.stage for part in self.parts], arrays, engine, progress)
        for part, run in zip(self.parts, compiled, strict=True):
            part.run = run

    def _turn(self, slots: SlotParams, last_tokens: Array, sampler: SlotState) -> Turn:
        return Turn(slots, last_tokens, sampler, self._fed(last_tokens))

    def _fed(self, last_tokens: Array) -> Array | None:
        return None if len(self.parts) == 1 else self.parts[0].arrive(last_tokens)

    def _arrays(self, part: Part) -> StageArrays:
        if not part.stage.last:
            return StageArrays(part.params, part.pools)
        turn = self.turns[0]
        return StageArrays(part.params, part.pools, turn.slots, turn.last_tokens, turn.sampler)

    # ---- steps

    def decode(self, turn: int, batch: DecodeBatch) -> Sampled:
        """One token for each row of a turn."""
        own, last = self.turns[turn], self.parts[-1]
        x = own.fed
        for part in self.parts[:-1]:
            arriving = part.arrive(x)
            assert arriving is not None
            x = part.pass_decode(batch, arriving)
        state, sampled = last.run.decode(last.params, own.slots, self._state(own), batch, last.arrive(x))
        self._keep(own, state)
        return sampled

    def decode_many(self, batch: DecodeBatch, steps: int) -> tuple[Sampled, Array]:
        """Several steps in one call, where there is one stage; also how many ran."""
        own, last = self.turns[0], self.parts[-1]
        assert last.run.decode_many is not None
        state, sampled, ran = last.run.decode_many(last.params, own.slots, self._state(own), batch, np.int32(steps))
        self._keep(own, state)
        return sampled, ran

    def prefill(self, batch: PrefillBatch) -> None:
        """Prompt chunks, one a lane."""
        (lanes, size), last = batch.tokens.shape, self.parts[-1]
        arriving = self._through(batch)
        last.pools = last.run.prefill[size, lanes](last.params, last.pools, batch, arriving)

    def prefill_logprobs(self, batch: PrefillBatch, following: Int32[np.ndarray, " chunk"]) -> Logprobs:
        """One chunk of the largest size, and how probable each token behind it was."""
        last, arriving = self.parts[-1], self._through(batch)
        assert last.run.prefill_logprobs is not None
        last.pools, logprobs = last.run.prefill_logprobs(last.params, last.pools, batch, arriving, following)
        return logprobs

    def _through(self, batch: PrefillBatch) -> Array | None:
        """Chunks through all stages but the last; what arrives there."""
        x = None
        for part in self.parts[:-1]:
            x = part.pass_prefill(batch, part.arrive(x))
        return self.parts[-1].arrive(x)

    def _state(self, turn: Turn) -> StepState:
        return StepState(self.parts[-1].pools, turn.last_tokens, turn.sampler)

    def _keep(self, turn: Turn, state: StepState) -> None:
        self.parts[-1].pools, turn.last_tokens, turn.sampler = state
        turn.fed = self._fed(turn.last_tokens)

    # ---- pages

    def copy(self, source: Int32[np.ndarray, "groups copies"], target: Int32[np.ndarray, "groups copies"]) -> None:
        """Pages to other pages, in all layers; a target beyond the pool is dropped."""
        for part in self.parts:
            part.pools = part.run.copy(part.pools, source, target)

    def export(self, source: Int32[np.ndarray, "groups pages"], hosts: Sequence[int]) -> None:
        """Pages to the host; `settle` waits for them."""
        for part in self.parts:
            part.host.put(hosts, part.run.export(part.pools, source))

    def settle(self, hosts: Sequence[int]) -> None:
        for part in self.parts:
            part.host.settle(hosts)

    def restore(self, hosts: Sequence[int], target: Int32[np.ndarray, "groups pages"]) -> None:
        """Pages back from the host; a target beyond the pool is dropped."""
        for part in self.parts:
            part.pools = part.run.restore(part.pools, part.host.take(hosts, TRANSFER_PAGES), target)

    def pages(self, source: Int32[np.ndarray, "groups pages"]) -> Shaped[np.ndarray, "pages layers *page"]:
        """The bytes of pages in all layers, as far as this process has them. Waits."""
        return np.concatenate([own_part(part.run.export(part.pools, source)) for part in self.parts], axis=1)

    # ---- slots; each is a row of its turn

    def put_slots(self, turn: int, fields: Mapping[str, Shaped[np.ndarray, "rows *shape"]]) -> None:
        """New sampling parameters, by name in `SlotParams`."""
        own = self.turns[turn]
        own.slots = own.slots._replace(**put_whole(dict(fields), self.parts[-1].everywhere))

    def admit(self, slot: int, prompt: Bool[np.ndarray, " vocab"], bias: Float32[np.ndarray, " vocab"]) -> None:
        """What the sampler keeps of a slot begins anew."""
        turn, row, run = self._place(slot)
        assert run.admit is not None
        turn.sampler = run.admit(turn.sampler, row, prompt, bias)

    def keep(self, slot: int) -> Kept:
        """A copy of what the sampler keeps of a slot."""
        turn, row, run = self._place(slot)
        assert run.keep is not None
        return Kept(run.keep(turn.sampler, row))

    def resume(self, slot: int, kept: Kept) -> None:
        """What `keep` gave is that of a slot from now on."""
        turn, row, run = self._place(slot)
        assert run.resume is not None
        turn.sampler = run.resume(turn.sampler, row, kept.state)

    def sampler(self, turn: int) -> Kept:
        """What the sampler keeps of all slots of a turn, on the host. Waits."""
        return Kept(jax.tree.map(np.array, self.turns[turn].sampler))

    def put_sampler(self, turn: int, kept: Kept) -> None:
        """What `sampler` gave holds again."""
        copies = jax.tree.map(np.copy, kept.state)  # what is donated is not the caller's
        self.turns[turn].sampler = put_whole(copies, self.parts[-1].everywhere)

    def _place(self, slot: int) -> tuple[Turn, np.int32, CompiledStage]:
        row, turn = divmod(slot, len(self.turns))
        return self.turns[turn], np.int32(row), self.parts[-1].run

    # ---- what is asked before READY

    def wait(self) -> None:
        """Until all that was called has run."""
        jax.block_until_ready([part.pools for part in self.parts] + [turn.last_tokens for turn in self.turns])

    def temporaries(self) -> int:
        """Bytes that the hungriest program uses on a device while it runs."""
        return max(part.run.temporaries() for part in self.parts)

    def parameters(self) -> int:
        return sum(leaf.size for part in self.parts for leaf in jax.tree.leaves(part.params))

    @property
    def platform(self) -> str:
        return str(self.parts[0].mesh.devices.flat[0].platform)


MakeExecutor = Callable[[Model, ResolvedEngine, SamplingLimits, Mesh, CompileProgress | None], Executor]
"""What an `Executor` is made of, and gives one."""
