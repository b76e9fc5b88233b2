"""Mixture of experts: routing rules and the layer, token by token in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.moe import (
    GLU,
    ClampedGLU,
    Experts,
    MoE,
    Routing,
    RoutingRule,
    packed,
    route,
    run_experts,
    unpacked,
)

EXPERTS, D, HIDDEN = 6, 10, 7


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def as32(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def routed(logits: np.ndarray, rule: RoutingRule, correction: np.ndarray | None = None) -> list[dict[int, float]]:
    """Return the experts of each token with their weights."""
    got = route(as32(logits), rule, None if correction is None else as32(correction))
    experts, weights = np.asarray(got.experts).tolist(), np.asarray(got.weights, np.float64).tolist()
    return [dict(zip(*pair, strict=True)) for pair in zip(experts, weights, strict=True)]


def best(scores: np.ndarray, count: int) -> list[int]:
    return np.argsort(-scores)[:count].tolist()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_best_experts_are_chosen_and_weighted(scores: Any, renormalise: bool):
    logits = numbers(0, 20, 9)
    for token, got in zip(logits, routed(logits, RoutingRule(3, scores, renormalise, 2.5)), strict=True):
        all_scores = softmax(token) if scores == "softmax" else 1 / (1 + np.exp(-token))
        chosen = best(all_scores, 3)
        total = all_scores[chosen].sum() if renormalise else 1.0
        assert list(got) == chosen
        assert list(got.values()) == pytest.approx(2.5 * all_scores[chosen] / total, rel=1e-6)


def test_a_softmax_of_the_chosen_ones_alone():
    logits = numbers(1, 20, 9)
    for token, got in zip(logits, routed(logits, RoutingRule(4, "softmax of chosen")), strict=True):
        assert list(got) == best(token, 4)
        assert list(got.values()) == pytest.approx(softmax(token[best(token, 4)]), rel=1e-6)


def test_a_sigmoid_of_the_chosen_ones_alone():
    logits = 30.0 * numbers(6, 20, 9)  # sigmoids saturate to 1, logits still differ
    for token, got in zip(logits, routed(logits, RoutingRule(4, "sigmoid of chosen")), strict=True):
        assert list(got) == best(token, 4)
        assert list(got.values()) == pytest.approx(1 / (1 + np.exp(-token[best(token, 4)])), rel=1e-5)


def test_the_sparsemixer_weighs_each_choice_among_those_near_it():
    logits, near = numbers(7, 40, 6) + 1.0, 0
    for token, got in zip(logits, routed(logits, RoutingRule(2, "sparsemixer", jitter=0.3)), strict=True):
        first, second = best(token, 2)
        expected, left = [], token.copy()
        for chosen in (first, second):
            far = (token[chosen] - token) / np.maximum(np.abs(token), token[chosen]) > 0.6
            near += int((~far).sum() > 1)
            expected.append(softmax(np.where(far, -np.inf, left))[chosen])
            left[chosen] = -np.inf
        assert list(got) == [first, second]
        assert list(got.values()) == pytest.approx(expected, rel=1e-5)
    assert near > 20


def test_a_sum_of_scores_below_the_least_is_not_divided_by():
    rule = RoutingRule(2, renormalise=True, norm_min=0.5)
    logits, below = numbers(8, 30, 9), 0
    for token, got in zip(logits, routed(logits, rule), strict=True):
        scores = softmax(token)[best(token, 2)]
        below += scores.sum() < 0.5
        assert list(got.values()) == pytest.approx(scores / max(scores.sum(), 0.5), rel=1e-5)
    assert 3 < below < 27


def test_a_correction_changes_the_choice_and_not_the_weights():
    logits, correction = numbers(2, 30, 8), 2.0 * numbers(3, 8)
    differs = 0
    for token, got in zip(logits, routed(logits, RoutingRule(2, "sigmoid"), correction), strict=True):
        scores = 1 / (1 + np.exp(-token))
        assert list(got) == best(scores + correction, 2)
        assert list(got.values()) == pytest.approx(scores[list(got)], rel=1e-6)
        differs += best(scores, 2) != list(got)
    assert differs > 5


@pytest.mark.parametrize("top_groups", [1, 2, 3])
@pytest.mark.parametrize(("group_score", "taken"), [("max", 1), ("top2", 2)])
def test_experts_are_chosen_within_the_best_groups(group_score: Any, taken: int, top_groups: int):
    logits, correction = numbers(4, 40, 12), numbers(5, 12) - 3.0  # most scores are below 0
    count = 3 * top_groups - 1  # all experts of the best groups but one
    rule = RoutingRule(count, "sigmoid", groups=4, top_groups=top_groups, group_score=group_score)
    elsewhere = 0
    for token, got in zip(logits, routed(logits, rule, correction), strict=True):
        choice = 1 / (1 + np.exp(-token)) + correction
        of_groups = np.sort(choice.reshape(4, 3))[:, -taken:].sum(axis=1)
        allowed = np.repeat(np.isin(np.arange(4), best(of_groups, top_groups)), 3)
        assert list(got) == best(np.where(allowed, choice, -np.inf), count)
        elsewhere += list(got) != best(choice, count)
    assert elsewhere > 5


# --------------------------------------------------------------------------------------------------------------
# The layer.


def parameters() -> dict[str, Any]:
    return {
        "router": 2.0 * numbers(10, EXPERTS, D),
        "router_bias": numbers(11, EXPERTS),
        "gate_up": numbers(12, EXPERTS, 2, HIDDEN, D),
        "gate_up_bias": numbers(13, EXPERTS, 2, HIDDEN),
        "down": numbers(14, EXPERTS, D, HIDDEN),
        "down_bias": numbers(15, EXPERTS, D),
        "shared": {"gate_up": numbers(16, 2, 5, D), "down": numbers(17, 5, D)},
        "shared_gate": numbers(18, 1, D),
    }


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def expert64(params: dict[str, Any], index: int, x: np.ndarray, bias: bool) -> np.ndarray:
    gate, up = params["gate_up"][index] @ x + bias * params["gate_up_bias"][index]
    if bias:  # gpt-oss
        gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    else:
        hidden = silu(gate) * up
    return params["down"][index] @ hidden + bias * params["down_bias"][index]


def layer64(params: dict[str, Any], x: np.ndarray, bias: bool, shared: bool) -> np.ndarray:
    result = []
    for token in x:
        logits = params["router"] @ token + bias * params["router_bias"]
        weights = softmax(logits)
        weights = softmax(np.where(logits >= np.sort(logits)[-2], logits, -np.inf)) if bias else weights
        total = sum(weights[index] * expert64(params, index, token, bias) for index in best(logits, 2))
        if shared:
            gate, up = params["shared"]["gate_up"] @ token
            own = (silu(gate) * up) @ params["shared"]["down"]
            total = total + own / (1 + np.exp(-(params["shared_gate"] @ token)))
        result.append(total)
    return np.stack(result)


def layer(bias: bool = False, shared: bool = False) -> MoE:
    rule = RoutingRule(2, "softmax of chosen" if bias else "softmax")
    glu = ClampedGLU(1.702, 1.5) if bias else GLU("silu")
    return MoE(rule, glu, bias, shared_activation="silu" if shared else None, shared_gate=shared)


def applied(module: MoE, params: dict[str, Any], x: Any, live: Any = None) -> Any:
    live = jnp.ones(x.shape[:-1], bool) if live is None else live
    return module.apply({"params": jax.tree.map(as32, params)}, x, live)


@pytest.mark.parametrize(("bias", "shared"), [(False, False), (True, False), (False, True)])
def test_the_layer_is_the_equation(bias: bool, shared: bool):
    params, x = parameters(), numbers(20, 3, 8, D)
    got = applied(layer(bias, shared), params, as32(x))
    expected = layer64(params, x.reshape(-1, D), bias, shared)
    np.testing.assert_allclose(np.asarray(got).reshape(-1, D), expected, rtol=0, atol=1e-4)


def test_tokens_that_are_not_live_ask_for_no_expert():
    params, x = parameters(), as32(numbers(21, 12, D))
    live = jnp.arange(12) % 3 == 0
    got = np.asarray(applied(layer(), params, x, live))
    assert (got[~np.asarray(live)] == 0).all()
    assert got[np.asarray(live)].tobytes() == np.asarray(applied(layer(), params, x))[np.asarray(live)].tobytes()


def test_a_tokens_bits_do_not_depend_on_the_other_tokens():
    params, x = parameters(), as32(numbers(22, 12, D))
    expected = np.asarray(applied(layer(shared=True), params, x))[0]
    for seed in range(4):
        others = as32(numbers(30 + seed, 12, D)).at[seed].set(x[0])
        assert np.asarray(applied(layer(shared=True), params, others))[seed].tobytes() == expected.tobytes()


def test_devices_with_some_experts_each_add_up():
    params, x = parameters(), as32(numbers(23, 9, D))
    every = Experts(*(as32(params[name]) for name in ("gate_up", "down", "gate_up_bias", "down_bias")))
    routing = route(as32(numbers(24, 9, EXPERTS)), RoutingRule(3))
    whole = run_experts(x, routing, every, GLU("silu"))
    parts = [
        run_experts(x, routing, Experts(*(w[first : first + 2] for w in every)), GLU("silu"), jnp.int32(first))
        for first in (0, 2, 4)
    ]
    np.testing.assert_allclose(sum(parts[1:], parts[0]), whole, rtol=0, atol=1e-4)


def test_weights_may_be_of_what_experts_see():
    params, x = parameters(), numbers(27, 9, D)
    routing = route(as32(numbers(28, 9, EXPERTS)), RoutingRule(2, "sigmoid of chosen"))
    every = Experts(as32(params["gate_up"]), as32(params["down"]))
    got = run_experts(as32(x), routing, every, GLU("silu"), scaled_inputs=True)
    for token, experts, weights, result in zip(x, routing.experts, np.asarray(routing.weights), got, strict=True):
        expected = np.zeros(D)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            gate, up = params["gate_up"][expert] @ (token * weight)
            expected += params["down"][expert] @ (gate / (1 + np.exp(-gate)) * up)
        np.testing.assert_allclose(result, expected, atol=1e-4)


def test_gradients_reach_the_router_and_the_experts():
    params, x = jax.tree.map(as32, parameters()), as32(numbers(25, 6, D))
    module, weight = layer(), as32(numbers(26, 6, D))
    live = jnp.ones(6, bool)

    def loss(params: dict[str, Any], x: jax.Array) -> jax.Array:
        return (module.apply({"params": params}, x, live) * weight).sum()

    def plain(params: dict[str, Any], x: jax.Array) -> jax.Array:
        """Apply every expert to every token."""
        routing: Routing = route(x @ params["router"].T, module.rule)
        gate_up = jnp.einsum("td,eghd->tegh", x, params["gate_up"])
        every = jnp.einsum("teh,edh->ted", jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1], params["down"])
        chosen = jnp.take_along_axis(every, routing.experts[:, :, None], axis=1)
        return ((routing.weights[:, :, None] * chosen).sum(1) * weight).sum()

    for got, expected in zip(
        jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(params, x)),
        jax.tree.leaves(jax.grad(plain, argnums=(0, 1))(params, x)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tokens_travel_with_their_routing_in_words_of_their_own_width(dtype):
    """Packed values come back bitwise, including NaN, -inf and -0.0."""
    x = as32(numbers(0, 2, 3, D)).astype(dtype).at[0, 0, :3].set(jnp.array([jnp.nan, -jnp.inf, -0.0], dtype))
    weights, experts = as32(numbers(1, 2, 3, 2)), jnp.array([0, 1, 65_537, 2**31 - 1] * 3).reshape(2, 3, 2)
    words = packed(x, weights, experts)
    assert words.dtype == f"uint{8 * x.dtype.itemsize}"
    back = unpacked(words.reshape(6, -1), x.dtype, (D, 2, 2))
    for got, given in zip(back, (x, weights, experts), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(given).tobytes()


class Hopper(jax.sharding.AbstractDevice):
    compute_capability = "9.0"


@pytest.mark.parametrize(("dtype", "kernels"), [(jnp.bfloat16, 2), (jnp.float32, 0)])
@pytest.mark.parametrize("tokens", [3, 600])
def test_on_a_hopper_gpu_experts_are_a_kernel_of_sorted_rows(tokens: int, dtype: Any, kernels: int):
    """In bfloat16 no product of all experts with all tokens, and no loop over tiles; float32 keeps the XLA path."""
    shapes = ((tokens, 64), (EXPERTS, 2, 128, 64), (EXPERTS, 64, 128))
    x, gate_up, down = (jax.ShapeDtypeStruct(dims, dtype) for dims in shapes)
    routing = Routing(jax.ShapeDtypeStruct((tokens, 2), jnp.int32), jax.ShapeDtypeStruct((tokens, 2), jnp.float32))
    device = Hopper(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.make_jaxpr(lambda *a: run_experts(*a, GLU("silu")))(x, routing, Experts(gate_up, down))
    text = str(traced)
    assert text.count("name=grouped_matmul") == kernels
    assert ("dot_general" in text) == (kernels == 0)
