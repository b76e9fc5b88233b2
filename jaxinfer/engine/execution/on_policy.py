"""Log probabilities of given tokens by an engine's own programs, as a function that a trainer differentiates.

The value is computed by the functions that an engine compiles, in their shapes: prompts in chunks, generated tokens as
rows of the decode program. The gradient is that of `Model.apply`. docs/rl.md says where both programs have equal bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
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
from jaxinfer.engine.execution.placement import abstract_params, abstract_pools, targets_of
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.execution.stages import Stage, cut
from jaxinfer.engine.execution.step import make_decode_logprobs, make_prefill
from jaxinfer.engine.scheduling.buckets import next_chunk
from jaxinfer.kv.pool import Pool
from jaxinfer.models.model import Model, require_ids
from jaxinfer.parallel.mesh import replicated, traced_for
from jaxinfer.quant import Unquantized
from jaxinfer.quant.banks import without_banks
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import NO_STATE, STATE, ParamSpec

Lengths = Int[Any, " batch"] | None


@dataclasses.dataclass(frozen=True, repr=False)
class ServedPrograms:
    """The programs in which an engine computes tokens, without parameters: a static argument of `jax.jit`. Equal for
    engines with equal models and settings.

    Attributes:
        stage: the model as it is served, its parameters abstract.
        engine: resolved settings.
        classes: prefill sizes, each with the number of its class (`Calibration.size_classes`).
        mesh: the devices of the engine.
    """

    stage: Stage
    engine: ResolvedEngine
    classes: tuple[tuple[int, int], ...]
    mesh: Mesh

    def __repr__(self) -> str:
        return f"<ServedPrograms of {self.stage.model.name or 'a model'}: decode rows {self.rows}, chunks {self.sizes}>"

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
        engine, spec = self.engine, self.stage.model.cache_spec
        if engine.exactness != "exact":
            return f"exactness = {engine.exactness}: a token may then be computed by any of several programs"
        if engine.pipeline_parallel_size > 1:
            return f"pipeline_parallel_size = {engine.pipeline_parallel_size}: no single program has all layers"
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
        if self.engine.lora_slots:
            found["requests with adapters"] = "their rows take adapters from banks, which a trainer does not have"
        return found

    def logprobs(
        self,
        model: Model,
        params: Any,
        tokens: Int[Array, "*batch time"],
        prompt_lengths: Lengths = None,
        lengths: Lengths = None,
    ) -> Float32[Array, "batch positions"]:
        """Implement `Model.logprobs`."""
        if (why := self.refusal()) is not None:
            raise RequestError("like", f"cannot be reproduced: {why}")
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise RequestError("like", "cannot be reproduced in a shard_map: shard the arrays that jax.jit takes")
        self._require_same(model, params, tokens)
        batch, time = tokens.shape
        begins = jnp.clip(jnp.asarray(1 if prompt_lengths is None else prompt_lengths, jnp.int32), 1, time)
        ends = jnp.clip(jnp.asarray(time if lengths is None else lengths, jnp.int32), 1, time)
        sequences = GivenTokens(tokens, jnp.broadcast_to(begins, batch), jnp.broadcast_to(ends, batch))
        return _with_gradient(self, model)(params, sequences)

    def _require_same(self, model: Model, params: Any, tokens: Any) -> None:
        """Raise an error unless the model is the served one and the tokens fit its context."""
        require_ids(tokens)
        if tokens.ndim != 2 or not 1 < tokens.shape[1] <= self.engine.max_model_len:
            raise ValueError(
                f"tokens is {tokens.shape}, and must be [batch, time], with 2 to {self.engine.max_model_len} tokens "
                f"(max_model_len of the engine)"
            )
        served = self.stage.model
        edits = [getattr(each.module, "overrides", ()) for each in (model, served)]
        if (type(model.module), model.config) != (type(served.module), served.config) or edits[0] != edits[1]:
            raise ValueError(f"like: the engine serves another model, {served.name or type(served.module).__name__}")
        jax.eval_shape(functools.partial(self.placed, model), params)

    def placed(self, model: Model, params: Any) -> Any:
        """Return parameters of a model in the layout of the engine.

        Raises:
            ValueError: one is missing, or has another shape or dtype than that of the engine: names the first.
        """
        served = self.stage.model
        return _placed((), text_part(served.specs), model.specs, params, served.params)

    def spread(self, params: Any) -> Any:
        """Shard parameters over the devices of the engine, if it has several."""
        return self._constrained(params, jax.tree.map(lambda x: x.sharding, self.stage.model.params))

    def new_pools(self, pages: int, states: int) -> list[Pool]:
        """Make zeroed pools, sharded as those of the engine."""
        sized = dataclasses.replace(self.engine, num_pages=pages, num_states=states)
        made = abstract_pools(self.stage.model, sized, self.mesh)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        return list(self._constrained(zeros, jax.tree.map(lambda x: x.sharding, made)))

    def _constrained(self, tree: Any, shardings: Any) -> Any:
        return tree if self.mesh.size == 1 else lax.with_sharding_constraint(tree, shardings)


def served_programs(prepared: Prepared, classes: Mapping[int, int], mesh: Mesh) -> ServedPrograms:
    """Return the programs of an engine, those of the last pipeline stage if it has several.

    Args:
        classes: see `Calibration.size_classes`.
    """
    model, engine, _ = prepared
    stage = cut(model, engine.pipeline_parallel_size)[-1]
    abstract = stage.described_by(text_part(abstract_params(stage.model, mesh)))
    whole = dataclasses.replace(abstract, features=0, prompts=False)  # no draft head reads what these compute
    return ServedPrograms(whole, engine, tuple(sorted(classes.items())), mesh)


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


def applied_logprobs(model: Model, params: Any, sequences: GivenTokens) -> Float32[Array, "batch positions"]:
    """Compute log probabilities as `ServedPrograms.logprobs` does, by `Model.apply`."""
    logits = jax.nn.log_softmax(model.apply(params, sequences.tokens)[:, :-1].astype(jnp.float32))
    chosen = jnp.take_along_axis(logits, sequences.tokens[:, 1:, None], axis=2, mode="clip")[..., 0]
    return jnp.where(sequences.generated, chosen, 0)


def _with_gradient(programs: ServedPrograms, model: Model) -> Callable[[Any, GivenTokens], Array]:
    """Return a function of parameters with the value of the programs and the gradient of `Model.apply`."""
    served, bare = jax.custom_vjp(functools.partial(_computed, programs, model.replace(params=()))), model

    def forward(params: Any, sequences: GivenTokens) -> Any:
        return served(params, sequences), (params, sequences)

    def backward(kept: Any, cotangent: Any) -> Any:
        params, sequences = kept
        _, pull = jax.vjp(lambda params: applied_logprobs(bare, params, sequences), params)
        return (*pull(cotangent), None)

    served.defvjp(forward, backward)
    return served


@functools.partial(jax.jit, static_argnums=(0, 1))
def _computed(
    programs: ServedPrograms, model: Model, params: Any, sequences: GivenTokens
) -> Float32[Array, "batch positions"]:
    """Compute prompts chunk by chunk, then generated tokens in steps, into pages of their own.

    Chunks and steps are bodies of loops whose ends are not known to the compiler, so XLA fuses nothing into them or out
    of them.
    """
    outside = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))  # a trainer's mesh may have another size
    with outside, traced_for(programs.mesh):
        params, work = programs.spread(programs.placed(model, params)), _Work(programs, sequences)
        pools = work.prompts(params, work.pools())
        return work.steps(params, pools)


class _Work:
    """Chunks and decode steps of a batch of sequences."""

    def __init__(self, programs: ServedPrograms, sequences: GivenTokens) -> None:
        self._programs, self._sequences, self._stage = programs, sequences, programs.stage
        self._spec, self._page = self._stage.model.cache_spec, programs.engine.page_size
        self._batch, time = sequences.tokens.shape
        self._fed = time - 1  # the last token is not fed
        self._pages = -(-self._fed // self._page)

    def pools(self) -> list[Pool]:
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

    def prompts(self, params: Any, pools: list[Pool]) -> list[Pool]:
        """Run the chunks of all prompts: each begins at a multiple of the largest size, and the last ends one token
        early."""
        engine, (*_, largest) = self._programs.engine, self._programs.sizes
        cache = abstract_cache(self._stage.model, engine, replicated(self._programs.mesh))
        images = None if cache is None else jnp.zeros(cache.shape, cache.dtype)
        firsts, ends = np.arange(0, self._fed, largest), self._sequences.begins - 1
        places, count = _compacted(firsts < ends[:, None])
        tokens = jnp.pad(self._sequences.tokens, ((0, 0), (0, largest)))
        sizes = jnp.asarray(self._chosen_sizes())

        def run(index: Array, pools: list[Pool]) -> list[Pool]:
            of, start = places[index] // len(firsts), places[index] % len(firsts) * largest
            length = jnp.minimum(ends[of] - start, largest)
            tables = self._tables(of[None], start[None], length[None])

            def chunk(size: int, pools: list[Pool]) -> list[Pool]:
                own = lax.dynamic_slice(tokens, (of, start), (1, size))
                batch = PrefillBatch(own, start[None], length[None], tables)
                filled: list[Pool] = self._prefill(params, pools, as_text(batch, engine), images)
                return filled

            each = [functools.partial(chunk, size) for size in self._programs.sizes]
            return lax.switch(sizes[length], each, pools)

        return lax.fori_loop(0, count, run, pools)

    def _chosen_sizes(self) -> Int32[np.ndarray, " lengths"]:
        """Return, for each length of a chunk, the index of the size that it runs in."""
        sizes, classes = self._programs.sizes, dict(self._programs.classes)
        chunks = (next_chunk(0, length, sizes, classes) for length in range(1, sizes[-1] + 1))
        return np.array([0, *(sizes.index(chunk.size) for chunk in chunks)], np.int32)

    def steps(self, params: Any, pools: list[Pool]) -> Float32[Array, "batch positions"]:
        """Run the positions of all generated tokens as rows of decode steps."""
        tokens, (places, count) = self._sequences.tokens, self._planned()
        none, images = jnp.zeros(self._programs.rows, jnp.int32), self._programs.engine.images
        axes = images is not None and images.axes

        def run(step: Array, carry: tuple[list[Pool], Array]) -> tuple[list[Pool], Array]:
            (pools, found), own = carry, places[step]
            of, at = jnp.maximum(own, 0) // self._fed, jnp.maximum(own, 0) % self._fed
            tables = self._tables(of, at, jnp.ones_like(at))
            batch = DecodeBatch(tokens[of, at], jnp.where(own < 0, -1, at), none, tables, shifts=none if axes else None)
            pools, logprobs = self._decode(params, pools, batch, tokens[of, at + 1])
            return pools, found.at[jnp.where(own < 0, found.size, own)].set(logprobs, mode="drop")

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

    @functools.cached_property
    def _prefill(self) -> Callable[..., Any]:
        engine = self._programs.engine
        run = make_prefill(self._stage, engine.attention_backend, spread_tokens=engine.sequence_parallel_norms)
        return self._isolated(run)

    @functools.cached_property
    def _decode(self) -> Callable[..., Any]:
        engine = self._programs.engine
        return self._isolated(make_decode_logprobs(self._stage, engine.max_logprobs, engine.attention_backend))

    def _isolated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a program of the engine, for rows without adapters, as it is compiled there: behind a barrier."""
        program = without_banks(function, targets_of(self._stage, self._programs.engine))

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
    here, there = (spec.weight.inputs if isinstance(spec, Unquantized) else spec.inputs for spec in (own, served))
    if here != there:
        weight = jnp.moveaxis(weight, here, there)
    return dataclasses.replace(served, weight=weight) if isinstance(served, Unquantized) else weight
