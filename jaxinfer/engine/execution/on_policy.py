"""Log probabilities of given tokens by an engine's own programs, as a function that a trainer differentiates.

The value is computed by the functions that an engine compiles, in their shapes: prompts in chunks, generated tokens as
rows of the decode program. The gradient is that of `Model.apply`. docs/rl.md says where both programs have equal bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float32, Int, Int32

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution.commands import DecodeBatch, PrefillBatch, as_text
from jaxinfer.engine.execution.encoder import abstract_cache, text_part
from jaxinfer.engine.execution.placement import (
    abstract_banks,
    abstract_params,
    abstract_pools,
    of_bank,
    targets_of,
    with_copied_heads,
)
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.execution.stages import Stage, cut
from jaxinfer.engine.execution.step import make_decode_logprobs, make_pass_programs, make_prefill, with_adapters
from jaxinfer.engine.scheduling.buckets import next_chunk
from jaxinfer.kv.pool import Pool
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.lora.open import require_banks
from jaxinfer.lora.trainable import traced_parts
from jaxinfer.models.model import Model, require_ids
from jaxinfer.parallel.heads import kv_copies
from jaxinfer.parallel.mesh import replicated, stages, traced_for
from jaxinfer.quant import Unquantized
from jaxinfer.quant.banks import Banked, Banks, lora_targets, slot_specs, without_banks, write
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import NO_STATE, STATE, LoRATarget, ParamSpec

Lengths = Int[Any, " batch"] | None


@dataclasses.dataclass(frozen=True, repr=False)
class ServedPrograms:
    """The programs in which an engine computes tokens, without parameters: a static argument of `jax.jit`. Equal for
    engines with equal models and settings.

    Attributes:
        stages: the model as it is served, its parameters abstract.
        engine: resolved settings.
        classes: prefill sizes, each with the number of its class (`Calibration.size_classes`).
        mesh: the devices of the first stage, on which all are computed.
    """

    stages: tuple[Stage, ...]
    engine: ResolvedEngine
    classes: tuple[tuple[int, int], ...]
    mesh: Mesh

    def __repr__(self) -> str:
        return f"<ServedPrograms of {self.name}: decode rows {self.rows}, chunks {self.sizes}>"

    @property
    def name(self) -> str:
        return type(self.stages[0].model.module).__name__

    @property
    def rows(self) -> int:
        return self.engine.decode_sizes[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.engine.prefill_sizes

    def served_programs(self) -> ServedPrograms:
        """Return these programs, as `LLM.served_programs` does those of an engine."""
        return self

    def refusal(self) -> str | None:
        """Return why `logprobs` would not have the bits that the engine serves, in one sentence; None: it has."""
        engine, spec = self.engine, self.stages[0].model.cache_spec
        if engine.exactness != "exact":
            return f"exactness = {engine.exactness}: a token may then be computed by any of several programs"
        if engine.enable_dp_attention:
            return "enable_dp_attention = True: the programs are those of all ranks together"
        if spec.stateful and engine.speculative is not None:
            return f"speculative = {engine.speculative}: states after drafts are computed in further passes"
        return None

    @property
    def exceptions(self) -> dict[str, str]:
        """Requests that may have other bits than `logprobs`, with the reason."""
        found = {}
        if len({number for _, number in self.classes}) > 1:
            found["requests with prompt_logprobs"] = "their prompts run in chunks of the largest size alone"
        if self.engine.images is not None:
            found["requests with images"] = "tokens are all that is compared"
        return found

    def logprobs(
        self,
        model: Model,
        params: Any,
        tokens: Int[Array, "*batch time"],
        prompt_lengths: Lengths = None,
        lengths: Lengths = None,
        lora: Adapter | None = None,
    ) -> Float32[Array, "batch positions"]:
        """Implement `Model.logprobs`."""
        if (why := self.refusal()) is not None:
            raise RequestError("like", f"cannot be reproduced: {why}")
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise RequestError("like", "cannot be reproduced in a shard_map: shard the arrays that jax.jit takes")
        self._require_same(model, params, tokens)
        lora = None if lora is None else self._accepted(lora)
        batch, time = tokens.shape
        begins = jnp.clip(jnp.asarray(1 if prompt_lengths is None else prompt_lengths, jnp.int32), 1, time)
        ends = jnp.clip(jnp.asarray(time if lengths is None else lengths, jnp.int32), 1, time)
        sequences = GivenTokens(tokens, jnp.broadcast_to(begins, batch), jnp.broadcast_to(ends, batch))
        return _with_gradient(self, model)(params, lora, sequences)

    def _require_same(self, model: Model, params: Any, tokens: Any) -> None:
        """Raise an error unless the model is the served one and the tokens fit its context."""
        require_ids(tokens)
        if tokens.ndim != 2 or not 1 < tokens.shape[1] <= self.engine.max_model_len:
            raise ValueError(
                f"tokens is {tokens.shape}, and must be [batch, time], with 2 to {self.engine.max_model_len} tokens "
                f"(max_model_len of the engine)"
            )
        served = self.stages[0].model
        edits = [getattr(each.module, "overrides", ()) for each in (model, served)]
        if (type(model.module), model.config) != (type(served.module), served.config) or edits[0] != edits[1]:
            raise ValueError(f"like: the engine serves another model, {self.name}")
        jax.eval_shape(functools.partial(self.placed, model), params)

    def _accepted(self, lora: Adapter) -> Adapter:
        """Return the arrays of an adapter alone, as one program serves all; an error if the engine could not serve
        it."""
        if not self.engine.lora_slots:
            raise RequestError("lora", "is not served by this engine: it needs enable_lora")
        if not isinstance(lora, Adapter):
            raise RequestError("lora", f": a {type(lora).__name__} is no jaxinfer.lora.adapter.Adapter")
        try:
            require_banks(lora, declared(self.stages[0].model), self._targets)
        except ValueError as error:
            raise RequestError("lora", f": {error}") from error
        for path, leaf in jax.tree_util.tree_leaves_with_path(lora):
            if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.floating):
                raise RequestError("lora", f": {jax.tree_util.keystr(path)} is {dtype}, and must be floating point")
        return Adapter("", 0, lora.deltas)

    @property
    def _targets(self) -> dict[tuple[str, ...], LoRATarget]:
        """Weights that adapters may change, in the shapes of adapters (without replicated heads)."""
        specs, engine = declared(self.stages[0].model), self.engine
        return lora_targets(specs, specs, engine.max_lora_rank, engine.lora_target_modules)

    def placed(self, model: Model, params: Any) -> list[Any]:
        """Return parameters of a model in the layout of the engine, for each stage.

        Raises:
            ValueError: one is missing, or has another shape or dtype than that of the engine: names the first.
        """
        given = model.replace(params=params)
        given = with_copied_heads(given, self.mesh) if kv_copies(model.cache_spec, self.mesh.shape) > 1 else given
        every = (stage.model for stage in self.stages)
        return [_placed((), text_part(served.specs), given.specs, given.params, served.params) for served in every]

    def spread(self, params: Sequence[Any]) -> list[Any]:
        """Shard parameters of each stage over the devices of the engine, if it has several."""
        return [
            self._constrained(own, jax.tree.map(lambda x: x.sharding, stage.model.params))
            for own, stage in zip(params, self.stages, strict=True)
        ]

    def banks(self, lora: Adapter) -> list[Banks]:
        """Make the adapter banks of each stage, with an adapter in the first slot."""
        arrays = traced_parts(lora, self._targets)
        return [self._banks(stage, arrays) for stage in self.stages]

    def _banks(self, stage: Stage, arrays: Mapping[str, Array]) -> Banks:
        specs, abstract = slot_specs(targets_of(stage, self.engine)), abstract_banks(stage, self.engine, self.mesh)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        made = {part: write(empty[part], jnp.int32(0), of_bank(part, arrays, own)) for part, own in specs.items()}
        banks: Banks = self._constrained(made, jax.tree.map(lambda x: x.sharding, abstract))
        return banks

    def new_pools(self, pages: int, states: int) -> list[list[Pool]]:
        """Make zeroed pools of each stage, sharded as those of the engine."""
        sized = dataclasses.replace(self.engine, num_pages=pages, num_states=states)
        made = [abstract_pools(stage.model, sized, self.mesh) for stage in self.stages]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        return list(self._constrained(zeros, jax.tree.map(lambda x: x.sharding, made)))

    def _constrained(self, tree: Any, shardings: Any) -> Any:
        return tree if self.mesh.size == 1 else lax.with_sharding_constraint(tree, shardings)


def served_programs(prepared: Prepared, classes: Mapping[int, int], mesh: Mesh) -> ServedPrograms:
    """Return the programs of an engine.

    Args:
        classes: see `Calibration.size_classes`.
    """
    model, engine, _ = prepared
    first, *_ = stages(mesh)

    def described(stage: Stage) -> Stage:
        abstract = stage.described_by(text_part(abstract_params(stage.model, first)))
        return dataclasses.replace(abstract, features=0, prompts=False)  # no draft head reads what these compute

    cuts = cut(model, engine.pipeline_parallel_size)
    return ServedPrograms(tuple(map(described, cuts)), engine, tuple(sorted(classes.items())), first)


class GivenTokens(NamedTuple):
    """Token ids, each sequence with its number of prompt tokens and of all tokens."""

    tokens: Int[Array, "batch time"]
    begins: Int32[Array, " batch"]
    ends: Int32[Array, " batch"]

    @property
    def generated(self) -> Bool[Array, "batch positions"]:
        """Whether the token after each position was generated."""
        at = jnp.arange(self.tokens.shape[1] - 1)
        return (at >= self.begins[:, None] - 1) & (at < self.ends[:, None] - 1)


def applied_logprobs(
    model: Model, params: Any, sequences: GivenTokens, lora: Adapter | None = None
) -> Float32[Array, "batch positions"]:
    """Compute log probabilities as `ServedPrograms.logprobs` does, by `Model.apply`."""
    given = model.replace(params=params)
    applied = given if lora is None else given.with_lora(lora)
    logits = jax.nn.log_softmax(applied(sequences.tokens)[:, :-1].astype(jnp.float32))
    chosen = jnp.take_along_axis(logits, sequences.tokens[:, 1:, None], axis=2, mode="clip")[..., 0]
    return jnp.where(sequences.generated, chosen, 0)


def _with_gradient(programs: ServedPrograms, model: Model) -> Callable[[Any, Adapter | None, GivenTokens], Array]:
    """Return a function of parameters and an adapter, with the value of the programs and the gradient of
    `Model.apply`."""
    served, bare = jax.custom_vjp(functools.partial(_computed, programs, model.replace(params=()))), model

    def forward(params: Any, lora: Adapter | None, sequences: GivenTokens) -> Any:
        return served(params, lora, sequences), (params, lora, sequences)

    def backward(kept: Any, cotangent: Any) -> Any:
        params, lora, sequences = kept
        _, pull = jax.vjp(lambda params, lora: applied_logprobs(bare, params, sequences, lora), params, lora)
        return (*pull(cotangent), None)

    served.defvjp(forward, backward)
    return served


@functools.partial(jax.jit, static_argnums=(0, 1))
def _computed(
    programs: ServedPrograms, model: Model, params: Any, lora: Adapter | None, sequences: GivenTokens
) -> Float32[Array, "batch positions"]:
    """Compute prompts chunk by chunk, then generated tokens in steps, into pages of their own.

    Chunks and steps are bodies of loops whose ends are not known to the compiler, so XLA fuses nothing into them or out
    of them.
    """
    outside = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))  # a trainer's mesh may have another size
    with outside, traced_for(programs.mesh):
        weights, work = programs.spread(programs.placed(model, params)), _Work(programs, sequences, lora is not None)
        if lora is not None:
            weights = [Banked(*each) for each in zip(weights, programs.banks(lora), strict=True)]
        pools = work.prompts(weights, work.pools())
        return work.steps(weights, pools)


class _Work:
    """Chunks and decode steps of a batch of sequences, in all stages.

    Args:
        adapted: whether the sequences have an adapter, which is in the first slot of banks.
    """

    def __init__(self, programs: ServedPrograms, sequences: GivenTokens, adapted: bool) -> None:
        self._programs, self._sequences, self._adapted = programs, sequences, adapted
        self._spec, self._page = programs.stages[0].model.cache_spec, programs.engine.page_size
        self._batch, time = sequences.tokens.shape
        self._fed = time - 1  # the last token is not fed
        self._pages = -(-self._fed // self._page)

    def pools(self) -> list[list[Pool]]:
        return self._programs.new_pools(self._batch * self._pages, self._batch)

    def _tables(
        self, of: Int[Array, " rows"], starts: Int[Array, " rows"], lengths: Int[Array, " rows"]
    ) -> Int32[Array, "groups rows width"]:
        """Return the page tables of sequences, in the width of the engine's. A sequence has one state: rows read that
        after the tokens before ``starts``, and replace it by that after their last token."""
        index = np.arange(self._programs.engine.table_width)
        pages = of[:, None] * self._pages + np.minimum(index, self._pages - 1)
        last = (starts + lengths - 1)[:, None] // self._page
        states = jnp.where((index == last) | (index * self._page < starts[:, None]), of[:, None], NO_STATE)
        return jnp.stack([states if window == STATE else pages for window in self._spec.windows]).astype(jnp.int32)

    def prompts(self, weights: Sequence[Any], pools: list[list[Pool]]) -> list[list[Pool]]:
        """Run the chunks of all prompts: each begins at a multiple of the largest size, and the last ends one token
        early."""
        engine, (*_, largest) = self._programs.engine, self._programs.sizes
        cache = abstract_cache(self._programs.stages[0].model, engine, replicated(self._programs.mesh))
        images = None if cache is None else jnp.zeros(cache.shape, cache.dtype)
        firsts, ends = jnp.arange(0, self._fed, largest), self._sequences.begins - 1
        places, count = _compacted(firsts < ends[:, None])
        tokens = jnp.pad(self._sequences.tokens, ((0, 0), (0, largest)))
        sizes = jnp.asarray(self._chosen_sizes())

        def run(index: Array, pools: list[list[Pool]]) -> list[list[Pool]]:
            of, start = places[index] // len(firsts), places[index] % len(firsts) * largest
            length = jnp.minimum(ends[of] - start, largest)
            tables = self._tables(of[None], start[None], length[None])

            def chunk(size: int, pools: list[list[Pool]]) -> list[list[Pool]]:
                own = lax.dynamic_slice(tokens, (of, start), (1, size))
                loras = jnp.zeros(1, jnp.int32) if self._adapted else None
                batch = as_text(PrefillBatch(own, start[None], length[None], tables, loras=loras), engine)
                filled, arriving = self._passed(self._prefill, weights, pools, batch, images)
                return [*filled, self._prefill[-1](weights[-1], pools[-1], batch, arriving)]

            each = [functools.partial(chunk, size) for size in self._programs.sizes]
            return lax.switch(sizes[length], each, pools)

        return lax.fori_loop(0, count, run, pools)

    def _chosen_sizes(self) -> Int32[np.ndarray, " lengths"]:
        """Return, for each length of a chunk, the index of the size that it runs in."""
        sizes, classes = self._programs.sizes, dict(self._programs.classes)
        chunks = (next_chunk(0, length, sizes, classes) for length in range(1, sizes[-1] + 1))
        return np.array([0, *(sizes.index(chunk.size) for chunk in chunks)], np.int32)

    def steps(self, weights: Sequence[Any], pools: list[list[Pool]]) -> Float32[Array, "batch positions"]:
        """Run the positions of all generated tokens as rows of decode steps."""
        tokens, (places, count) = self._sequences.tokens, self._planned()
        none, images = jnp.zeros(self._programs.rows, jnp.int32), self._programs.engine.images
        axes = images is not None and images.axes

        def run(step: Array, carry: tuple[list[list[Pool]], Array]) -> tuple[list[list[Pool]], Array]:
            (pools, found), own = carry, places[step]
            of, at = jnp.maximum(own, 0) // self._fed, jnp.maximum(own, 0) % self._fed
            tables = self._tables(of, at, jnp.ones_like(at))
            loras = jnp.where(own < 0, -1, 0) if self._adapted else None
            positions, shifts = jnp.where(own < 0, -1, at), none if axes else None
            batch = DecodeBatch(tokens[of, at], positions, none, tables, loras=loras, shifts=shifts)
            filled, arriving = self._passed(self._decode, weights, pools, batch, none)
            last, logprobs = self._decode[-1](weights[-1], pools[-1], batch, tokens[of, at + 1], arriving)
            return [*filled, last], found.at[jnp.where(own < 0, found.size, own)].set(logprobs, mode="drop")

        start = pools, jnp.zeros(self._batch * self._fed, jnp.float32)
        return lax.fori_loop(0, count, run, start)[1].reshape(self._batch, self._fed)

    def _planned(self) -> tuple[Int32[Array, "steps rows"], Int32[Array, ""]]:
        """Return the flat place of each row of each step, -1 of an idle row, and the number of steps.

        All rows of a step write their keys before any attends, so they may be positions of one sequence, in order. Of
        a sequence with states they are one position.
        """
        rows = self._programs.rows
        if not self._spec.stateful:
            places, count = _compacted(self._sequences.generated)
            live = jnp.where(jnp.arange(places.size) < count, places, -1)
            padded = jnp.pad(live, (0, -places.size % rows), constant_values=-1)
            return padded.reshape(-1, rows), -(-count // rows)
        of = np.arange(-(-self._batch // rows) * rows).reshape(-1, 1, rows)
        begins, ends = (jnp.pad(x, (0, of.size - self._batch))[of] for x in self._sequences[1:])
        at = begins - 1 + np.arange(self._fed)[:, None]
        places = jnp.where((at < ends - 1) & (of < self._batch), of * self._fed + at, -1).reshape(-1, rows)
        order, count = _compacted(jnp.any(places >= 0, axis=1, keepdims=True))
        return places[order].astype(jnp.int32), count

    def _passed(
        self, programs: Sequence[Callable[..., Any]], weights: Sequence[Any], pools: list[list[Pool]], *given: Any
    ) -> tuple[list[list[Pool]], Any]:
        """Run a batch through all stages but the last; return their pools, and what arrives at the last one."""
        filled, (batch, arriving) = [], given
        for program, own, pages in zip(programs[:-1], weights, pools, strict=False):
            pages, arriving = program(own, pages, batch, arriving)
            filled.append(pages)
        return filled, arriving

    @functools.cached_property
    def _prefill(self) -> list[Callable[..., Any]]:
        *passing, last = self._programs.stages
        backend, spread = self._programs.engine.attention_backend, self._programs.engine.sequence_parallel_norms
        programs = [make_pass_programs(stage, backend, spread_tokens=spread)[1] for stage in passing]
        return self._isolated([*programs, make_prefill(last, backend, spread_tokens=spread)])

    @functools.cached_property
    def _decode(self) -> list[Callable[..., Any]]:
        (*passing, last), engine = self._programs.stages, self._programs.engine
        programs = [make_pass_programs(stage, engine.attention_backend)[0] for stage in passing]
        return self._isolated([*programs, make_decode_logprobs(last, engine.max_logprobs, engine.attention_backend)])

    def _isolated(self, functions: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """Return the programs of all stages as they are compiled in the engine: behind a barrier."""
        return [self._compiled(each, stage) for each, stage in zip(functions, self._programs.stages, strict=True)]

    def _compiled(self, function: Callable[..., Any], stage: Stage) -> Callable[..., Any]:
        engine = self._programs.engine
        targets = targets_of(stage, engine)
        if self._adapted:
            program = with_adapters(function, 2, engine.lora_slots, targets)
        else:
            program = without_banks(function, targets)

        def isolated(*operands: Any) -> Any:
            return lax.optimization_barrier(program(*lax.optimization_barrier(operands)))

        return isolated


def _compacted(wanted: Bool[Array, "batch each"]) -> tuple[Int32[Array, " places"], Int32[Array, ""]]:
    """Return the flat places that are true, before all others, and their number."""
    flat = wanted.reshape(-1)
    return jnp.argsort(~flat, stable=True).astype(jnp.int32), flat.sum(dtype=jnp.int32)


def _placed(path: tuple[str, ...], served: Any, own: Any, given: Any, like: Any) -> Any:
    if isinstance(served, Mapping):
        missing = [name for name in served if name not in given or name not in own]
        if missing:
            raise ValueError(f"params: {'.'.join((*path, missing[0]))} is missing")
        return {name: _placed((*path, name), node, own[name], given[name], like[name]) for name, node in served.items()}
    value = _laid_out(served, own, given)
    found, wanted = (jax.tree.map(lambda x: (tuple(x.shape), str(x.dtype)), tree) for tree in (value, like))
    if found != wanted:
        raise ValueError(f"params: {'.'.join(path)} is {found}, and the engine serves {wanted}")
    return value


def _laid_out(served: Any, own: Any, given: Any) -> Any:
    """Return a weight in the layout in which it is served."""
    kinds = (ParamSpec, Unquantized)
    if not (isinstance(served, kinds) and isinstance(own, kinds)):  # other storages have one layout
        return given
    weight = given.weight if isinstance(own, Unquantized) else given
    here, there = ((spec.weight if isinstance(spec, Unquantized) else spec).inputs for spec in (own, served))
    if here is not None and there is not None and here != there:
        weight = jnp.moveaxis(weight, here, there)
    return dataclasses.replace(served, weight=weight) if isinstance(served, Unquantized) else weight
