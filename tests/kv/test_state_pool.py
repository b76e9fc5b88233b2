"""Pools of states: chunks and steps resume from kept states and keep the states at page ends."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv.pool import DecodeAttend, PrefillAttend, StatePool, new_pools, pages_of, with_pages, with_states
from jaxinfer.layers.recurrent import linear_recurrence, recur, short_conv
from jaxinfer.types import CacheSpec, LayerSpec, StateSpec
from pallas_kernels import linear_attention

PAGE, STATES, LENGTH = 16, 10, 53
KEPT = StateSpec((4, 16, 8), exact=True), StateSpec((4, 24, 3))
SPEC = CacheSpec((LayerSpec(), LayerSpec(attends=False, states=KEPT)), 1, 16, page_size=PAGE)
# Second group: the first sequence keeps the states after its second and its last page, the other after every page.
TABLES = jnp.asarray([[[0] * 4] * 2, [[STATES, 3, STATES, 4], [5, 6, 7, 8]]], jnp.int32)


def operands(seed: int) -> dict[str, Any]:
    """Return the inputs of both recurrences for two sequences, [2, LENGTH, ...]."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(2, LENGTH, *shape)), jnp.float32)

    k = normal(2, 16)
    unit = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    delta = normal(2, 16), unit, normal(4, 8), -jnp.abs(normal(4)), jax.nn.sigmoid(normal(4))
    return {"delta": delta, "conv": normal(4, 24)}


RECURRENCES = {"delta": linear_recurrence, "conv": short_conv(jnp.asarray(np.linspace(-1, 1, 384).reshape(4, 24, 4)))}
SPECS = dict(zip(RECURRENCES, KEPT, strict=True))


def prefill(starts: list[int], lengths: list[int], time: int, backend: Any, function: Any, inputs: Any, pool: Any):
    """Prefill one chunk of each sequence, padded with garbage."""

    def rows(x: jax.Array) -> jax.Array:
        cut = [
            jnp.pad(x[i, s : s + n], [(0, time - n), *[(0, 0)] * (x.ndim - 2)], constant_values=9.0)
            for i, (s, n) in enumerate(zip(starts, lengths, strict=True))
        ]
        return jnp.concatenate(cut)

    attend = PrefillAttend(SPEC, TABLES, jnp.array(starts), jnp.array(lengths), backend)
    out, pool = attend.recur(function, jax.tree.map(rows, inputs), pool)
    return out.reshape(2, time, *out.shape[1:]), pool


def run(kind: str, backend: Any = "xla") -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the outputs of two chunks, then steps of one token; the pool before the steps and after."""
    function, inputs = RECURRENCES[kind], operands(0)[kind]
    pool = jnp.full((STATES, *SPECS[kind].shape), 7.0, jnp.float32)
    first, pool = prefill([0, 0], [32, 32], 32, backend, function, inputs, pool)
    second, pool = prefill([32, 32], [18, 20], 32, backend, function, inputs, pool)
    outs, filled = [[*first[0], *second[0, :18]], [*first[1], *second[1, :20]]], pool
    for at in range(50, LENGTH):
        positions = jnp.array([at, at + 2 if at + 2 < LENGTH else -1])
        row = jax.tree.map(lambda x, p=positions: x[jnp.arange(2), p], inputs)
        out, pool = DecodeAttend(SPEC, TABLES, positions, backend).recur(function, row, pool)
        outs[0].append(out[0])
        outs[1] += [out[1]] if at + 2 < LENGTH else []
    return jnp.stack([jnp.stack(each) for each in outs]), filled, pool


@functools.cache
def plain(kind: str) -> jax.Array:
    return recur(None, RECURRENCES[kind], operands(0)[kind], None, SPECS[kind], (2, LENGTH), jnp.float32)[0]


@pytest.mark.parametrize("kind", RECURRENCES)
def test_pieces_are_the_whole(kind):
    outs, _, _ = run(kind)
    np.testing.assert_allclose(outs, plain(kind), atol=2e-5)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_states_are_those_behind_pages(kind):
    _, filled, pool = run(kind)
    function, inputs = RECURRENCES[kind], operands(0)[kind]
    zeros = jnp.zeros((2, *SPECS[kind].shape))
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 64 - LENGTH), *[(0, 0)] * (x.ndim - 2)]), inputs)
    borders = function(padded, zeros, jnp.array([50, 52]), PAGE)[1]
    for place, (sequence, page) in {3: (0, 1), 4: (0, 3), 5: (1, 0), 6: (1, 1), 7: (1, 2), 8: (1, 3)}.items():
        np.testing.assert_allclose(filled[place], borders[sequence, page], atol=2e-5, err_msg=f"state {place}")
    untouched = [place for place in range(STATES) if place not in (3, 4, 5, 6, 7, 8)]
    assert (np.asarray(pool[jnp.array(untouched)]) == 7.0).all(), "a state of nobody was written"


def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Route the calls of pool kernels to XLA; return the list of calls."""
    calls = list[str]()

    def called(name: str, door: Any) -> Any:
        return lambda *operands: (calls.append(name), door(*operands, path="xla"))[1]

    mosaic = type("Choice", (), {"path": "mosaic"})()
    monkeypatch.setattr(linear_attention, "explain", lambda *_, **__: mosaic)
    for name in ("decode", "prefill"):
        monkeypatch.setattr(linear_attention, name, called(name, getattr(linear_attention, name)))
    return calls


# Eight rows: sequence 1 has its own row at 46 and drafts up to 49; a page ends after 47. Sequence 0 has its own row at
# 50 and one draft, which fails. The remaining rows are idle.
OWNERS = jnp.array([0, 1, 2, 0, 1, 1, 1, 7])
POSITIONS = jnp.array([50, 46, -1, 51, 49, 47, 48, -1])


def at_rows(positions: jax.Array, owners: jax.Array | None, backend: Any, kind: str, pool: jax.Array) -> Any:
    """Run the rows of a step; return outputs, pool and the attend object that stores accepted states."""
    of = jnp.minimum(OWNERS, 1)
    attend = DecodeAttend(SPEC, TABLES[:, of], positions, backend, owners)

    @jax.jit
    def compiled(row: Any, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend.recur(RECURRENCES[kind], row, pool)

    return *compiled(jax.tree.map(lambda x: x[of, positions], operands(0)[kind]), pool), attend


def filled(kind: str) -> jax.Array:
    """Return a pool filled up to the known tokens of the rows, with extra slots for drafts."""
    function, inputs = RECURRENCES[kind], operands(0)[kind]
    pool = jnp.full((STATES + 8, *SPECS[kind].shape), 7.0, jnp.float32)
    _, pool = prefill([0, 0], [32, 32], 32, "xla", function, inputs, pool)
    return prefill([32, 32], [18, 14], 32, "xla", function, inputs, pool)[1]


@pytest.mark.parametrize("backend", ["xla", "auto"])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_drafts_are_rows_one_behind_the_other(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch):
    calls = kernels(monkeypatch) if backend == "auto" else []
    before = filled(kind)
    outs, pool, attend = at_rows(POSITIONS, OWNERS, backend, kind, before)
    one, behind = before, dict[int, jax.Array]()
    for at in range(46, 50):
        positions = jnp.where(jnp.arange(8) == 1, at, -1)
        out, one, _ = at_rows(positions, None, backend, kind, one)
        (row,) = np.flatnonzero(np.asarray(POSITIONS) == at)
        np.testing.assert_array_equal(outs[row], out[1], err_msg=f"position {at}")
        behind[at] = one[TABLES[1, 1, at // PAGE]]
    assert ("decode" in calls) == (backend == "auto" and kind == "delta")
    for kept in range(46, 50):
        accepted = jnp.array([True, True, False, False, *(POSITIONS[4:7] <= kept), False])
        (after,) = attend.accept([StatePool((pool,))], accepted)
        np.testing.assert_array_equal(after.states[0][7], behind[min(kept, 47)], err_msg="the page that ends behind 47")
        want = behind[kept] if kept > 47 else before[8]
        np.testing.assert_array_equal(after.states[0][8], want, err_msg="the next page")
        rest = jnp.array([place for place in range(STATES) if place not in (7, 8)])
        np.testing.assert_array_equal(after.states[0][rest], pool[rest])


def test_a_kernel_that_works_on_the_pool_is_given_its_places(monkeypatch):
    want, calls = run("delta"), kernels(monkeypatch)
    outs, _, pool = run("delta", "auto")
    assert calls == ["prefill"] * 2 + ["decode"] * 3
    np.testing.assert_allclose(outs, want[0], atol=2e-5)
    np.testing.assert_allclose(pool, want[2], atol=2e-5)


def test_pages_and_states_are_told_apart():
    def room(state: StateSpec) -> jax.Array:
        return jnp.zeros((STATES, *state.shape), jnp.float32 if state.exact else jnp.bfloat16)

    pools = with_states(SPEC, new_pools(SPEC, 3, PAGE, jnp.dtype("bfloat16")), room)
    assert isinstance(pools[1], StatePool)
    assert [x.dtype.name for x in pools[1].states] == ["float32", "bfloat16"]
    (pages,) = pages_of(pools)
    assert pages is pools[0]
    replaced = with_pages(pools, [pages._replace(data=pages.data + 1)])
    assert float(pages_of(replaced)[0].data.max()) == 1.0
    assert replaced[1] is pools[1]


def test_bytes_of_states():
    assert SPEC.bytes_per_state(2) == 4 * 16 * 8 * 4 + 4 * 24 * 3 * 2
    assert SPEC.bytes_per_state(2, devices=2) == SPEC.bytes_per_state(2) // 2
    assert SPEC.bytes_per_page(PAGE, 2) == 2 * PAGE * 16 * 2, "one layer attends"
    assert SPEC.part(slice(0, 1)).bytes_per_state(2) == 0
    assert SPEC.windows == SPEC.part(slice(0, 1)).windows == (None, 0)
