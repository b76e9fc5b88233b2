"""Mixture of experts: a router selects a few feed-forward networks for each token (Shazeer et al. 2017).

No token is ever dropped, and results are batch-invariant: expert products have fixed shapes
(`pallas_kernels.grouped_matmul`), and a token's outputs are added in the order of the router's selection.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.layers.top_k import top_k
from jaxinfer.parallel.mesh import RULES, traced_dp_ranks, traced_size
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import grouped_matmul, grouped_path, matmul_transposed, partition, plus_bias
from jaxinfer.quant.lora_weight import for_rows, slots_of
from pallas_kernels.grouped_matmul import group, taken


@dataclasses.dataclass(frozen=True)
class RoutingRule:
    """Rule by which router logits become experts and weights.

    Attributes:
        top_k: experts per token.
        scores: "softmax" and "sigmoid" of all logits (Mixtral and Qwen; DeepSeek-V3); "softmax of chosen" and "sigmoid
            of chosen": of the selected logits only (gpt-oss; Llama 4); "sparsemixer": see `_sparsemixer` (PhiMoE).
        renormalise: the selected scores are divided by their sum plus ``norm_added``, or, if ``norm_min`` is set, by
            the larger of it and their sum.
        scale: factor of the weights, applied last.
        groups: number of expert groups, each of consecutive experts.
        top_groups: experts are selected from this many best groups (DeepSeek-V2, Liu et al. 2024).
        group_score: score of a group: its best expert ("max") or the sum of its best two ("top2").
        jitter: sparsemixer: the softmax excludes experts with a relative gap to the best above 2 * jitter.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "softmax of chosen", "sigmoid of chosen", "sparsemixer"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    norm_min: float = 0.0
    jitter: float = 0.0
    norm_added: float = 1e-20


GIVEN = "given_experts"
"""Name of the expert ids that tokens must take, among the parameters of a layer (`with_routing`)."""


class Routing(NamedTuple):
    """Expert ids of each token, and the weights of their outputs."""

    experts: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]


def route(
    logits: Float[Array, "tokens experts"],
    rule: RoutingRule,
    correction: Float[Array, " experts"] | None = None,
    given: Int[Array, "tokens top_k"] | None = None,
) -> Routing:
    """Route tokens to experts, in float32.

    Args:
        correction: bias added to the scores for the selection only, not to the weights (Wang et al. 2024).
        given: experts that tokens take instead of the best ones, with the weights that the scores give them; -1: the
            best. None: all tokens take the best.
    """
    logits = logits.astype(jnp.float32)
    if rule.scores == "sparsemixer":
        return _sparsemixer(logits, rule, given)
    if rule.scores in ("softmax of chosen", "sigmoid of chosen"):
        best, experts = top_k(logits, rule.top_k)
        if given is not None:
            experts = _replaced(experts, given)
            best = jnp.take_along_axis(logits, experts, axis=-1, mode="clip")
        weights = jax.nn.softmax(best, axis=-1) if rule.scores == "softmax of chosen" else jax.nn.sigmoid(best)
        return Routing(experts, weights * rule.scale)
    scores = jax.nn.softmax(logits, axis=-1) if rule.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction.astype(jnp.float32)
    if rule.top_groups < rule.groups:
        choice = _of_best_groups(choice, rule)
    weights, experts = top_k(choice, rule.top_k)
    if given is not None:
        experts = _replaced(experts, given)
    if choice is not scores or given is not None:
        weights = jnp.take_along_axis(scores, experts, axis=-1, mode="clip")
    if rule.renormalise:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (jnp.maximum(total, rule.norm_min) if rule.norm_min else total + rule.norm_added)
    return Routing(experts, weights * rule.scale)


def _replaced(experts: Int[Array, "tokens some"], given: Int[Array, "tokens some"]) -> Int[Array, "tokens some"]:
    return jnp.where(given >= 0, given, experts)


def _sparsemixer(
    logits: Float[Array, "tokens experts"], rule: RoutingRule, given: Int[Array, "tokens top_k"] | None
) -> Routing:
    """Select experts one after another (Liu et al. 2024, SparseMixer-v2): the weight of each is its softmax among the
    remaining experts with a score close to its own."""
    left, chosen, weights = logits, [], []
    for place in range(rule.top_k):
        best = left.max(axis=-1, keepdims=True)
        expert = jnp.argmax(left, axis=-1)[:, None]
        if given is not None:
            expert = _replaced(expert, given[:, place : place + 1])
            best = jnp.take_along_axis(left, expert, axis=-1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2.0 * rule.jitter
        shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        chosen.append(expert)
        weights.append(jnp.take_along_axis(shares, expert, axis=-1))
        left = jnp.where(jnp.arange(logits.shape[-1]) == expert, -jnp.inf, left)
    return Routing(jnp.concatenate(chosen, -1), jnp.concatenate(weights, -1) * rule.scale)


def _of_best_groups(choice: Float[Array, "tokens experts"], rule: RoutingRule) -> Float[Array, "tokens experts"]:
    """Set the scores of experts outside the best groups to -inf."""
    grouped = choice.reshape(choice.shape[0], rule.groups, -1)
    best = top_k(grouped, 1 if rule.group_score == "max" else 2)[0].sum(axis=-1)
    _, chosen = top_k(best, rule.top_groups)
    allowed = jnp.any(chosen[:, :, None] == jnp.arange(rule.groups), axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


@dataclasses.dataclass(frozen=True)
class GLU:
    """Activation of gated experts: act(gate) * up (Shazeer 2020), with the activation in float32."""

    activation: str

    def __call__(self, gate: Float[Array, "... hidden"], up: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        return ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(gate.dtype) * up


@dataclasses.dataclass(frozen=True)
class Ungated:
    """Activation of ungated experts: act(up). Their ``gate_up`` is [experts, 1, hidden, d]."""

    activation: str

    def __call__(self, up: Float[Array, "... hidden"], same: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        del same
        return ACTIVATIONS[self.activation](up.astype(jnp.float32)).astype(up.dtype)


@dataclasses.dataclass(frozen=True)
class ClampedGLU:
    """Activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), gate at most ``limit``, up within +-``limit``."""

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "... hidden"], up: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
        gate32, up32 = jnp.minimum(gate32, self.limit), jnp.clip(up32, -self.limit, self.limit)
        return (gate32 * jax.nn.sigmoid(self.alpha * gate32) * (up32 + 1.0)).astype(gate.dtype)


class Experts(NamedTuple):
    """Weights of experts: of all experts, or of one device's shard.

    Attributes:
        gate_up: [experts, 2, hidden, d].
        down: [experts, d, hidden].
        gate_up_bias: [experts, 2, hidden].
        down_bias: [experts, d].
    """

    gate_up: Any
    down: Any
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


def run_experts(
    x: Float[Array, "tokens d"],
    routing: Routing,
    experts: Experts,
    glu: Callable[[jax.Array, jax.Array], jax.Array],
    first: Int[Array, ""] | int = 0,
    spread: int | None = None,
    *,
    scaled_inputs: bool = False,
) -> Float[Array, "tokens d"]:
    """Return the weighted sum of the selected experts' outputs for each token, float32.

    Args:
        routing: entries with an expert outside ``experts`` add zero, so the results of several devices can be summed.
        first: global index of the first of ``experts``.
        spread: number of experts on all devices; None: ``experts`` are all.
        scaled_inputs: weights multiply the inputs of experts instead of their outputs.
    """
    (tokens, top_k), count = routing.experts.shape, experts.gate_up.shape[0]
    local = routing.experts - first
    local = jnp.where((local >= 0) & (local < count), local, count).reshape(-1)
    path = grouped_path(x, experts.gate_up, experts.down)
    groups = group(local, count, most=tokens, spread=spread, path=path)
    rows = taken(x, groups.entries, top_k)
    if scaled_inputs:
        scales = taken(routing.weights.reshape(-1), groups.entries)
        rows = (rows * scales[..., None]).astype(x.dtype)
    hidden = grouped_matmul(rows, experts.gate_up, groups)
    if experts.gate_up_bias is not None:
        hidden = plus_bias(hidden, groups.of_tiles(experts.gate_up_bias))
    results = grouped_matmul(glu(hidden[:, :, 0], hidden[:, :, -1]), experts.down, groups)
    if experts.down_bias is not None:
        results = plus_bias(results, groups.of_tiles(experts.down_bias))
    places = groups.places.reshape(tokens, top_k)
    results = results.reshape(-1, x.shape[-1])
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(top_k):
        output = results.at[places[:, choice]].get(mode="fill", fill_value=0).astype(jnp.float32)
        total = total + (output if scaled_inputs else routing.weights[:, choice, None] * output)
    return total


@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """Shared expert: a `GatedMLP` applied to all tokens.

    Attributes:
        mlp: parameters by name; with a shard of the hidden dimension, outputs are partial sums.
        gate: [1, d]; the output is multiplied by a sigmoid of its product with the token.
    """

    activation: str
    mlp: Any
    gate: Any = None

    def __call__(self, x: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        mlp: Any = GatedMLP(self.activation, parent=None).apply
        result: jax.Array = mlp({"params": self.mlp}, x)
        if self.gate is None:
            return result
        gate = matmul_transposed(x, self.gate).astype(jnp.float32)
        return (jax.nn.sigmoid(gate) * result.astype(jnp.float32)).astype(x.dtype)


def run_experts_over_ranks(
    x: Float[Array, "tokens d"],
    routing: Routing,
    experts: Experts,
    glu: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    scaled_inputs: bool = False,
) -> Float[Array, "tokens d"]:
    """Run experts under DP attention, where each rank has its tokens and some of the experts, in the dtype of ``x``.

    Two all-to-all exchanges (Lepikhin et al. 2020, GShard): tokens go to the ranks of their experts, and outputs come
    back. Every rank has capacity for every token, so that none is dropped. Partial results are added in rank order: the
    result of a token depends neither on its rank nor on other tokens.

    Args:
        experts: experts of this rank; all ranks have the same number, in rank order.
        scaled_inputs: see `run_experts`.
    """
    ranks, (tokens, d) = traced_dp_ranks(), x.shape
    top_k, count = routing.experts.shape[1], experts.gate_up.shape[0]
    local = routing.experts - count * jnp.arange(ranks).reshape(-1, 1, 1)
    chosen = jnp.where((local >= 0) & (local < count), local, count)
    each, weights = (jnp.broadcast_to(part, (ranks, *part.shape)) for part in (x, routing.weights))
    slots = _slots_among_ranks(experts, tokens)
    numbers = jnp.concatenate([chosen, jnp.broadcast_to(slots, (ranks, *slots.shape))], axis=-1)
    received = lax.all_to_all(packed(each, weights, numbers), "dp_attn", 0, 0)
    widths = (d, top_k, top_k + slots.shape[-1])
    rows, weights, numbers = unpacked(received.reshape(ranks * tokens, -1), x.dtype, widths)
    chosen, experts = numbers[:, :top_k], _of_rows(experts, numbers[:, top_k:])
    run = functools.partial(run_experts, spread=ranks * count, scaled_inputs=scaled_inputs)
    parts = run(rows, Routing(chosen, weights), experts, glu).astype(x.dtype)
    returned = lax.all_to_all(parts.reshape(ranks, tokens, d), "dp_attn", 0, 0)
    return functools.reduce(jnp.add, returned.astype(jnp.float32)).astype(x.dtype)


def _slots_among_ranks(experts: Experts, tokens: int) -> Int[Array, "tokens n"]:
    """Return the index of each token's LoRA adapter among those of all ranks, to send with it; n = 0: no adapters."""
    for weight in (experts.gate_up, experts.down):
        if (slots := slots_of(weight)) is not None:
            own = weight.a.shape[0] // traced_dp_ranks()
            return jnp.where(slots >= 0, slots + own * lax.axis_index("dp_attn"), -1)[:, None]
    return jnp.zeros((tokens, 0), jnp.int32)


def _of_rows(experts: Experts, slots: Int[Array, "rows n"]) -> Experts:
    if not slots.shape[-1]:
        return experts
    gate_up, down = (for_rows(weight, slots[:, 0]) for weight in (experts.gate_up, experts.down))
    return experts._replace(gate_up=gate_up, down=down)


def packed(
    x: Float[Array, "*batch d"], weights: Float[Array, "*batch top_k"], numbers: Int[Array, "*batch n"]
) -> Shaped[Array, "*batch words"]:
    """Pack tokens and their routing into words as wide as the tokens' dtype, for a single exchange.

    Args:
        numbers: expert ids of the tokens, and the indices of their LoRA adapters.
    """
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    parts = (lax.bitcast_convert_type(part, word) for part in (x, weights, numbers.astype(jnp.int32)))
    return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in parts], -1)


def unpacked(
    words: Shaped[Array, "tokens words"], dtype: jnp.dtype, widths: tuple[int, int, int]
) -> tuple[Float[Array, "tokens d"], Float[Array, "tokens top_k"], Int[Array, "tokens n"]]:
    """Unpack the arguments of `packed`: tokens of ``dtype``; ``widths``: elements per token of the three arrays."""
    kinds, found, at = (dtype, jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)), [], 0
    for kind, width in zip(kinds, widths, strict=True):
        each = kind.itemsize // words.dtype.itemsize  # words per element
        part = words[:, at : at + width * each]
        part = part if each == 1 else part.reshape(-1, width, each)
        found.append(lax.bitcast_convert_type(part, kind))
        at += width * each
    x, weights, numbers = found
    return x, weights, numbers


def run_sharded_experts(
    x: Float[Array, "tokens d"],
    routing: Routing,
    experts: Experts,
    glu: Callable[[jax.Array, jax.Array], jax.Array],
    shared: SharedExpert | None = None,
    *,
    scaled_inputs: bool = False,
) -> Float[Array, "tokens d"]:
    """Run experts that are sharded over devices, by expert or by hidden dimension, in the dtype of ``x``.

    Under DP attention, tokens go to their experts (`run_experts_over_ranks`). Otherwise all tokens are on every device,
    and device results, including the shared expert's, are partial sums. ``scaled_inputs``: see `run_experts`.
    """
    scaled = {"scaled_inputs": scaled_inputs}
    if traced_dp_ranks() > 1:
        result = run_experts_over_ranks(x, routing, experts, glu, **scaled)
        return result if shared is None else result + shared(x)
    dealt, within = RULES["expert"], RULES["expert_mlp"]
    if traced_size("expert") * traced_size("expert_mlp") == 1:
        result = run_experts(x, routing, experts, glu, **scaled).astype(x.dtype)
        return result if shared is None else result + shared(x)

    def run_shard(x: jax.Array, routing: Routing, experts: Experts, mlp: Any, gate: Any) -> jax.Array:
        if experts.down_bias is not None:  # add the bias once in the psum
            once = lax.axis_index(within) == 0
            experts = experts._replace(down_bias=jnp.where(once, experts.down_bias, 0))
        count = experts.gate_up.shape[0]
        first, spread = lax.axis_index(dealt) * count, lax.axis_size(dealt) * count
        result = run_experts(x, routing, experts, glu, first, spread, **scaled)
        if shared is not None:
            result = result + dataclasses.replace(shared, mlp=mlp, gate=gate)(x).astype(jnp.float32)
        return lax.psum(result, (*dealt, *within))

    replicated, hidden = PartitionSpec(), PartitionSpec(dealt, None, within)
    biases: tuple[Any, ...] = () if experts.down_bias is None else (hidden, PartitionSpec(dealt))
    expert_specs: Any = (partition(experts.gate_up, hidden), partition(experts.down, hidden), *biases)
    mlp = {"gate_up": PartitionSpec(None, RULES["mlp"]), "down": PartitionSpec(RULES["mlp"])}
    shared_specs = None if shared is None else {name: partition(shared.mlp[name], spec) for name, spec in mlp.items()}
    specs = (replicated, replicated, Experts(*expert_specs), shared_specs, replicated)
    beside = (None, None) if shared is None else (shared.mlp, shared.gate)
    run = jax.shard_map(run_shard, in_specs=specs, out_specs=replicated, check_vma=False)
    return run(x, routing, experts, *beside).astype(x.dtype)


class MoE(Layer):
    """Mixture-of-experts layer: routed experts, and optionally a shared expert.

    Parameters: ``router`` [experts, d], ``gate_up`` [experts, 2, hidden, d], ``down`` [experts, d, hidden]; depending
    on the attributes also ``router_bias`` [experts], ``correction`` [experts], ``gate_up_bias`` [experts, 2, hidden],
    ``down_bias`` [experts, d], ``shared`` (`GatedMLP`) and ``shared_gate`` [1, d].

    Attributes:
        rule: see `RoutingRule`.
        glu: activation of gate and up: `GLU`, `ClampedGLU` or `Ungated`.
        bias: the router and the experts have biases.
        correction: see `route`.
        shared_activation: activation of the shared expert; None: no shared expert.
        shared_gate: the output of the shared expert is multiplied by a sigmoid gate of the token.
        scaled_inputs: see `run_experts`.
    """

    rule: RoutingRule
    glu: Callable[[jax.Array, jax.Array], jax.Array]
    bias: bool = False
    correction: bool = False
    shared_activation: str | None = None
    shared_gate: bool = False
    scaled_inputs: bool = False

    def __call__(self, x: Float[Array, "*batch d"], live: Bool[Array, "*batch"]) -> Float[Array, "*batch d"]:
        """Run the experts of ``live`` tokens; padding tokens select no expert and their results are not used."""
        flat = all_tokens(x).reshape(-1, x.shape[-1])
        routing = self.routed(flat)
        no_expert = jnp.iinfo(jnp.int32).max
        routing = routing._replace(experts=jnp.where(live.reshape(-1, 1), routing.experts, no_expert))
        run = functools.partial(run_sharded_experts, scaled_inputs=self.scaled_inputs)
        mixed = run(self.seen(flat), routing, self.experts(), self.glu, self._shared())
        return own_tokens(mixed.reshape(x.shape))

    def seen(self, x: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        """Return the inputs of the experts; the router reads the unmodified tokens."""
        return x

    def routed(self, x: Float[Array, "tokens d"]) -> Routing:
        """Return the routing of tokens; sows the expert ids in the collection ``routing``."""
        routing = self.routing(x)
        self.sow("routing", "experts", routing.experts)
        return routing

    def given(self) -> Int[Array, "tokens top_k"] | None:
        """Return the experts that tokens must take, see `Model.apply`; None: any."""
        given: Any = self.get_variable("params", GIVEN)
        return None if given is None else given.reshape(-1, given.shape[-1])

    def routing(self, x: Float[Array, "tokens d"]) -> Routing:
        """Route tokens, in float32 whatever the model dtype."""
        logits = matmul_transposed(x.astype(jnp.float32), self.weight("router"))
        if self.bias:
            logits = logits + self.weight("router_bias").astype(jnp.float32)
        return route(logits, self.rule, self.weight("correction") if self.correction else None, self.given())

    def experts(self) -> Experts:
        biases = (self.weight("gate_up_bias"), self.weight("down_bias")) if self.bias else ()
        return Experts(self.weight("gate_up"), self.weight("down"), *biases)

    def _shared(self) -> SharedExpert | None:
        if self.shared_activation is None:
            return None
        gate = self.weight("shared_gate") if self.shared_gate else None
        return SharedExpert(self.shared_activation, self.weight("shared"), gate)


def with_routing(params: Any, routed: Iterator[Int[Array, "*batch top_k"]]) -> Any:
    """Return parameters in which each layer of experts has the next of these expert ids to take, in their order."""
    if not isinstance(params, Mapping):
        return params
    inner = {name: with_routing(value, routed) for name, value in params.items()}
    return {**inner, GIVEN: next(routed)} if "router" in params else inner


def sown_experts(routing: Mapping[str, Any]) -> Int[Array, "tokens layers top_k"]:
    """Return the expert ids in the collection ``routing`` of a decoder, in the order of the layers."""
    layers = sorted(routing, key=lambda name: int(name.removeprefix("layers_")))
    return jnp.stack([each for name in layers for each in jax.tree.leaves(routing[name])], axis=-2)


def layers_of_experts(params: Any) -> int:
    """Return the number of layers of experts with these parameters."""
    if not isinstance(params, Mapping):
        return 0
    return sum(map(layers_of_experts, params.values())) + ("router" in params)
