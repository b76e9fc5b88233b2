"""Linear attention on any platform: the reference against a float64 loop, and the XLA paths against both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_attention
from pallas_kernels.choice import Target
from pallas_kernels.linear_attention import reference, xla
from tests.kernels.linear_cases import (
    STATES,
    assert_close,
    case,
    equal_keys,
    expected,
    filled,
    part,
    strong_decay,
)

DELTA = pytest.mark.parametrize("delta", [True, False], ids=["beta", "no beta"])
BEYOND = STATES
# Row 0 updates its state in place, row 1 starts a state that is not stored, row 2 stores to another page.
ROWS = {"read": [1, BEYOND, 3], "write": [1, -1, 0]}
PROMPTS = {"read": [BEYOND, 2], "write": ([[0, 4], [BEYOND, 2]], 64)}


def plain(one):
    """Return the operands of `chunks`, with the initial states."""
    q, k = (np.repeat(x, one.v.shape[2] // x.shape[2], axis=2) for x in (one.q, one.k))
    known = (one.read < STATES)[:, None, None, None]
    state = np.where(known, one.pool[np.where(one.read < STATES, one.read, 0)], 0)
    return *(x if x is None else jnp.asarray(x) for x in (q, k, one.v, one.decay, one.beta)), jnp.asarray(state)


def chunks(size, *operands):
    """Call `linear_attention.chunks` with all operands in their order."""
    *operands, state = operands
    return linear_attention.chunks(*operands, state=state, size=size)


def assert_near(got, want, bound=2e-6):
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * float(jnp.abs(want).max()))


@DELTA
@pytest.mark.parametrize("of", [ROWS, PROMPTS], ids=["decode", "prefill"])
def test_the_reference_is_the_recurrence(of, delta):
    one = case(**of, k_heads=2, heads=6, key=12, value=20, delta=delta)
    path = reference.decode if one.v.ndim == 3 else reference.prefill
    with jax.enable_x64(True):
        got = jax.jit(path)(*(x if x is None else jnp.asarray(x, jnp.float64) for x in one[:6]), one.read, one.write)
        for mine, other in zip(got, expected(one), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-11, atol=1e-12)


@DELTA
@pytest.mark.parametrize("size", [16, 32, 64])
def test_chunks_are_the_recurrence(size, delta):
    operands = plain(case([1, BEYOND], (np.zeros((2, 128 // size)), size), heads=3, delta=delta))
    outs, states = jax.jit(chunks, static_argnums=0)(size, *operands)
    want, after = reference.scan(*operands)
    assert_near(outs, want)
    assert_near(states, after[:, size - 1 :: size])


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("hard", [equal_keys, strong_decay])
def test_chunks_of_hard_cases(hard, size):
    operands = plain(hard(case([1], (np.zeros((1, 128 // size)), size))))
    outs, states = chunks(size, *operands)
    want, after = reference.scan(*operands)
    assert_near(outs, want, 1e-5)
    assert_near(states, after[:, size - 1 :: size], 1e-5)


@DELTA
def test_a_step_is_one_token_of_chunks(delta):
    q, k, v, decay, beta, state = plain(case([1, 2], (np.zeros((2, 1)), 16), delta=delta))
    for time in range(16):
        now = (x if x is None else x[:, time] for x in (q, k, v, decay, beta))
        out, state = linear_attention.step(*now, state=state)
    outs, states = chunks(16, q, k, v, decay, beta, plain(case([1, 2], (np.zeros((2, 1)), 16)))[5])
    assert_near(out, outs[:, -1])
    assert_near(state, states[:, -1])


def chunks_of(one):
    size = one.v.shape[1] // one.write.shape[1]
    outs, states = jax.jit(chunks, static_argnums=0)(size, *plain(one))
    return np.asarray(outs), np.asarray(states)


@DELTA
@pytest.mark.parametrize("size", [16, 32, 64])
def test_tokens_of_zeros_change_no_bit(size, delta):
    count = 128 // size
    whole = case([1], (np.zeros((1, count)), size), delta=delta)
    first = 64 - 5  # inside a chunk, and all later tokens
    outs, states = chunks_of(filled(whole, first))
    at = (first - 1) // size
    assert all(states[:, i].tobytes() == states[:, at].tobytes() for i in range(at, count))
    np.testing.assert_array_equal(outs[:, :first], chunks_of(whole)[0][:, :first])


@DELTA
def test_no_bit_of_a_token_depends_on_how_much_a_program_has(delta):
    whole = case([1, 3, BEYOND], (np.zeros((3, 4)), 32), heads=3, delta=delta)
    outs, states = chunks_of(whole)
    for sequence in range(3):
        some, after = chunks_of(part(whole, slice(sequence, sequence + 1), slice(0, 64)))
        np.testing.assert_array_equal(some[0], outs[sequence, :64])
        np.testing.assert_array_equal(after[0], states[sequence, :2])


@DELTA
def test_chunks_have_the_gradients_of_the_recurrence(delta):
    operands = plain(case([1], (np.zeros((1, 2)), 16), key=16, value=16, delta=delta))
    given = [x for x in operands if x is not None]

    def loss(path, *given):
        rest = given if delta else (*given[:4], None, given[4])
        outs, states = path(*rest)
        return jnp.sum(jnp.sin(outs)) + jnp.sum(jnp.cos(states[:, -1]))

    of = tuple(range(len(given)))
    got = jax.jit(jax.grad(functools.partial(loss, functools.partial(chunks, 16)), of))(*given)
    want = jax.jit(jax.grad(functools.partial(loss, reference.scan), of))(*given)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other, 1e-5)


@DELTA
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("of", [ROWS, PROMPTS], ids=["decode", "prefill"])
def test_states_in_a_pool(of, dtype, delta):
    one = case(**of, k_heads=2, heads=6, key=32, value=16, dtype=dtype, delta=delta)
    door = linear_attention.decode if one.v.ndim == 3 else linear_attention.prefill
    assert_close(jax.jit(door)(*one.arrays), one)


def test_a_prompt_in_two_calls_has_the_same_bits():
    """The second call starts from the state that the first one stored in the pool."""
    whole = case([1, BEYOND], ([[0, 3], [2, 4]], 16))
    outs, pool = linear_attention.prefill(*whole.arrays, size=16)
    first, second = (part(whole, slice(0, 2), slice(*times)) for times in ((0, 16), (16, 32)))
    head, between = linear_attention.prefill(*first.arrays, size=16)
    tail, after = linear_attention.prefill(*second._replace(pool=between, read=first.write[:, 0]).arrays, size=16)
    np.testing.assert_array_equal(np.concatenate([head, tail], axis=1), outs)
    np.testing.assert_array_equal(after, pool)


@pytest.mark.parametrize("of", [ROWS, {"read": [1], "write": ([[1] * 8], 16)}], ids=["decode", "prefill"])
def test_the_pool_stays_in_place(of):
    one = case(**of)
    pool = jax.ShapeDtypeStruct((400, *one.pool.shape[1:]), jnp.float32)
    door = functools.partial(linear_attention.prefill, size=16) if one.v.ndim == 4 else linear_attention.decode
    program = jax.jit(door, donate_argnums=5).lower(*one.arrays[:5], pool, *one.arrays[6:]).compile()
    assert program.memory_analysis().alias_size_in_bytes == pool.size * 4
    assert program.memory_analysis().temp_size_in_bytes < pool.size


@pytest.mark.parametrize("of", [ROWS, PROMPTS], ids=["decode", "prefill"])
def test_explains_the_path(of):
    one = case(**of).arrays
    assert linear_attention.explain(*one).path == "xla"
    for capability, path in (((8, 0), "mosaic"), ((8, 9), "mosaic"), ((9, 0), "mosaic"), ((10, 0), "xla")):
        assert linear_attention.explain(*one, target=Target("gpu", capability)).path == path
    refused = linear_attention.explain(*one[:5], one[5].astype(jnp.bfloat16), *one[6:], target=Target("gpu", (9, 0)))
    assert (refused.path, "float32 is needed" in refused.why) == ("xla", True)
    assert xla.decode is reference.decode


@pytest.mark.parametrize(
    ("time", "size", "chunks"), [(128, 8, 16), (128, 48, 2), (128, 64, 1), (128, 32, 2), (96, 64, 1)]
)
def test_a_size_that_does_not_fit_is_refused(time, size, chunks):
    one = case([1], ([[0]], time)).arrays
    with pytest.raises(ValueError, match=f"size {size}: {time} tokens"):
        linear_attention.prefill(*one[:7], jnp.zeros((1, chunks), jnp.int32), size=size)
