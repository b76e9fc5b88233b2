"""The device's side of the loop: launches plans, reads results, owns parameters and state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.buckets import group_chunks
from jaxinfer.engine.compiled import compile_programs
from jaxinfer.engine.exactness import proved_lanes
from jaxinfer.engine.scheduler import PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.sequence import Sequence
from jaxinfer.engine.step import DecodeBatch, PrefillBatch, StepState, make_programs
from jaxinfer.kv.pool import new_pools
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, param_sharding, replicated
from jaxinfer.sampling import HostSlots, Logprobs, Sampled, SamplingLimits, new_state
from jaxinfer.types import ParamSpec, PositionLogprobs, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step on its way: the plan and arrays that will hold its results."""

    plan: StepPlan
    sampled: Sampled | None
    prompt: list[Logprobs | None]


class Runner:
    """Owns all device memory of an engine. ``tables`` is the scheduler's, read at each launch."""

    def __init__(self, model: Model, engine: ResolvedEngine, limits: SamplingLimits, tables: np.ndarray) -> None:
        self._engine, self._tables, self._vocab = engine, tables, model.config.vocab_size
        mesh = make_mesh()
        self._everywhere = replicated(mesh)
        specs = model.family.param_specs(model.config)
        self._params = jax.tree.map(
            lambda spec, value: jax.device_put(value, param_sharding(mesh, spec)),
            specs,
            model.params,
            is_leaf=lambda x: isinstance(x, ParamSpec),
        )
        self._host_slots = HostSlots(engine.rows, limits)
        self._slots = jax.device_put(self._host_slots.snapshot(), self._everywhere)
        self._state = self._new_state(model, limits)
        programs = make_programs(model, engine.max_logprobs)
        self._run = compile_programs(programs, engine, self._params, self._slots, self._state)
        self._lanes, self._state = proved_lanes(self._run.prefill, engine, self._params, self._state, self._vocab)

    def _new_state(self, model: Model, limits: SamplingLimits) -> StepState:
        engine = self._engine
        state = StepState(
            pools=new_pools(model.cache_spec, engine.num_pages, engine.page_size, model.dtype),
            last_tokens=jnp.zeros((engine.rows,), jnp.int32),
            slots=new_state(engine.rows, self._vocab, limits),
        )
        return jax.device_put(state, self._everywhere)

    def launch(self, plan: StepPlan) -> Launched | None:
        """Start a step without waiting for it. Programs run in the order of their launch."""
        if not plan:
            return None
        self._admit(plan.admitted)
        prompt = self._prefills(plan.prefills)
        sampled = self._decode(plan) if plan.decodes else None
        return Launched(plan, sampled, prompt)

    def read(self, launched: Launched | None) -> StepResult | None:
        """Wait for a step and bring its results to the host."""
        if launched is None:
            return None
        plan = launched.plan
        prompt = [
            [] if result is None else _prompt_logprobs(prefill, result)
            for prefill, result in zip(plan.prefills, launched.prompt, strict=True)
        ]
        if launched.sampled is None:
            return StepResult(plan, [], [], prompt)
        tokens = np.asarray(launched.sampled.tokens)[[row.sequence.slot for row in plan.decodes]].tolist()
        return StepResult(plan, tokens, _row_logprobs(plan, launched.sampled), prompt)

    def _admit(self, admitted: list[Sequence]) -> None:
        for sequence in admitted:
            self._host_slots.set(sequence.slot, sequence.request, sequence.index)
            if self._host_slots.needs_state(sequence.request):
                prompt, bias = self._host_slots.state_rows(sequence.request, self._vocab)
                self._state = self._run.admit(self._state, np.int32(sequence.slot), prompt, bias)
        if admitted:
            self._slots = jax.device_put(self._host_slots.snapshot(), self._everywhere)

    def _prefills(self, plans: list[PrefillPlan]) -> list[Logprobs | None]:
        """Launch all chunks, several in one program where there is a wide one for their size."""
        results: list[Logprobs | None] = [self._prefill_logprobs(plan) if plan.logprobs else None for plan in plans]
        plain = [plan for plan in plans if not plan.logprobs]
        for group in group_chunks([plan.chunk.size for plan in plain], self._lanes):
            size = plain[group[0]].chunk.size
            lanes = 1 if len(group) == 1 else self._lanes[size]
            batch = self._prefill_batch([plain[index] for index in group], size, lanes)
            self._state = self._run.prefill[size, lanes](self._params, self._state, batch)
        return results

    def _prefill_logprobs(self, plan: PrefillPlan) -> Logprobs:
        start, length, size = plan.chunk
        following = np.zeros(size, np.int32)
        following[:length] = plan.sequence.prompt[start + 1 : start + length + 1]
        batch = self._prefill_batch([plan], size, 1)
        self._state, logprobs = self._run.prefill_logprobs(self._params, self._state, batch, following)
        return logprobs

    def _prefill_batch(self, plans: list[PrefillPlan], size: int, lanes: int) -> PrefillBatch:
        tokens, (starts, lengths) = np.zeros((lanes, size), np.int32), np.zeros((2, lanes), np.int32)
        tables = np.zeros((lanes, self._engine.table_width), np.int32)
        for lane, plan in enumerate(plans):
            starts[lane], lengths[lane], _ = start, length, _ = plan.chunk
            tokens[lane, :length] = plan.sequence.prompt[start : start + length]
            tables[lane] = self._tables[plan.sequence.slot]
        return PrefillBatch(tokens, starts, lengths, tables)

    def _decode(self, plan: StepPlan) -> Sampled:
        tokens, positions, generated = np.full((3, self._engine.rows), -1, np.int32)
        slots = [row.sequence.slot for row in plan.decodes]
        tokens[slots] = [row.token for row in plan.decodes]
        positions[slots] = [row.position for row in plan.decodes]
        generated[slots] = [row.position - row.sequence.prefill_end for row in plan.decodes]
        batch = DecodeBatch(tokens, positions, generated, self._tables.copy())
        self._state, sampled = self._run.decode(self._params, self._slots, self._state, batch)
        for array in jax.tree.leaves(sampled if _wants_logprobs(plan) else sampled.tokens):
            array.copy_to_host_async()
        return sampled


def _wants_logprobs(plan: StepPlan) -> bool:
    return any(row.sequence.params.logprobs is not None for row in plan.decodes)


def _row_logprobs(plan: StepPlan, sampled: Sampled) -> list[PositionLogprobs | None]:
    if not _wants_logprobs(plan):
        return [None] * len(plan.decodes)
    host: Any = jax.tree.map(np.asarray, sampled)
    return [
        None
        if row.sequence.params.logprobs is None
        else _position(
            host.logprobs, row.sequence.slot, int(host.tokens[row.sequence.slot]), row.sequence.params.logprobs
        )
        for row in plan.decodes
    ]


def _prompt_logprobs(plan: PrefillPlan, result: Logprobs) -> list[PositionLogprobs]:
    host, (start, length, _) = jax.tree.map(np.asarray, result), plan.chunk
    prompt, top = plan.sequence.prompt, plan.sequence.params.prompt_logprobs
    assert top is not None
    return [_position(host, row, prompt[start + row + 1], top) for row in range(length)]


def _position(host: Logprobs, row: int, token: int, top: int) -> PositionLogprobs:
    chosen = TokenLogprob(token, float(host.logprob[row]), int(host.rank[row]))
    ids, values = host.top_ids[row, :top].tolist(), host.top_logprobs[row, :top].tolist()
    best = (TokenLogprob(i, value, rank) for rank, (i, value) in enumerate(zip(ids, values, strict=True), start=1))
    return PositionLogprobs(chosen, tuple(best))
