"""The linear attention kernels, interpreted on the CPU with a fake `mma`, against a float64 loop."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.linear_attention.mosaic import decode, prefill
from tests.kernels.linear_cases import (
    STATES,
    assert_close,
    case,
    equal_keys,
    filled,
    part,
    strong_decay,
)

BEYOND = STATES
BF16, FP16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Row 0 updates its state in place, row 1 starts a state that is not stored, row 2 stores to another page.
ROWS = {"read": [1, BEYOND, 3], "write": [1, -1, 0]}


def run(one, module=None, tiles=None):
    module = module or (decode if one.v.ndim == 3 else prefill)
    door = getattr(module, "decode" if one.v.ndim == 3 else "prefill")
    options = {} if tiles is None else {"tiles": module.Tiles(tiles)}
    call = jax.jit(functools.partial(door, interpret=compat.interpret_params(), **options))
    outs, pool = compat.interpreted(lambda: call(*one.arrays))
    return np.asarray(outs), np.asarray(pool)


def cases(fast, slow):
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in fast | slow]
    )


DECODES = {
    "float32": {},
    "bfloat16, heads of two, no beta": {"k_heads": 2, "heads": 4, "dtype": BF16, "values": F32, "delta": False},
}
SLOW_DECODES = {
    "float16, few columns": {"k_heads": 2, "heads": 6, "key": 48, "value": 80, "dtype": FP16},
    "128 keys and values": {"key": 128, "value": 128, "dtype": BF16},
    "256 keys": {"key": 256, "value": 64, "delta": False},
    "16 keys": {"key": 16, "value": 16, "heads": 3},
}


@cases(DECODES, SLOW_DECODES)
def test_decode_equals_float64(name):
    one = case(**ROWS, **(DECODES | SLOW_DECODES)[name])
    assert_close(run(one), one)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [16, 64])
def test_decode_with_other_columns(columns):
    one = case(**ROWS, value=64)
    assert_close(run(one, tiles=columns), one)


def test_no_bit_of_a_row_depends_on_the_others():
    one = case(**ROWS)
    outs, pool = run(one)
    rows = [2, 2, 0]
    company = one._replace(
        **{name: getattr(one, name)[rows] for name in ("q", "k", "v", "decay", "beta", "read")},
        write=np.array([0, BEYOND, -1], np.int32),
    )
    outs_in_company, pool_in_company = run(company)
    assert outs_in_company.tobytes() == outs[rows].tobytes()
    assert pool_in_company[0].tobytes() == pool[0].tobytes()


PREFILLS = {
    "bfloat16, two chunks": ({}, {"read": [1], "write": ([[4, BEYOND]], 16), "dtype": BF16, "heads": 1}),
    "float32, no beta": ({}, {"read": [BEYOND], "write": ([[0, -1]], 16), "delta": False, "heads": 1}),
}
SLOW_PREFILLS = {
    "sequences, heads of two": (
        {"tiles": 32},
        {"read": [1, BEYOND], "write": ([[1, 4], [0, BEYOND]], 32), "k_heads": 2, "heads": 4, "value": 64},
    ),
    "chunks of 64": ({}, {"read": [2], "write": ([[BEYOND, 3]], 64), "dtype": BF16, "values": F32}),
    "64 columns": ({"tiles": 64}, {"read": [2], "write": ([[2]], 32), "value": 128, "key": 128, "dtype": BF16}),
    "64 columns, float32": ({"tiles": 64}, {"read": [2], "write": ([[2]], 16), "value": 64, "key": 128, "heads": 1}),
    "256 keys": ({}, {"read": [2], "write": ([[1]], 16), "key": 256, "dtype": BF16, "delta": False}),
    "float16": ({}, {"read": [2], "write": ([[1]], 32), "dtype": FP16}),
}


@cases(PREFILLS, SLOW_PREFILLS)
def test_prefill_equals_float64(name):
    options, of = (PREFILLS | SLOW_PREFILLS)[name]
    one = case(**of)
    assert_close(run(one, **options), one)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("hard", [equal_keys, strong_decay])
def test_hard_prompts(hard, dtype):
    one = hard(case([1], ([[4, 0]], 32), dtype=dtype))
    assert_close(run(one), one, 5e-6)


def test_tokens_of_zeros_change_no_bit():
    """The state after the 21st token, in the middle of a step, is stored unchanged after every later chunk."""
    whole = case([1], ([[0, 2, 3, 4]], 16), heads=1)
    outs, pool = run(filled(whole, 21))
    assert pool[2].tobytes() == pool[3].tobytes() == pool[4].tobytes() != pool[0].tobytes()
    np.testing.assert_array_equal(outs[:, :21], run(part(whole, slice(0, 1), slice(0, 32)))[0][:, :21])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_bit_of_a_token_depends_on_how_much_a_program_has(dtype):
    """A token's bits do not depend on other sequences, on later chunks, on chunk size or on the columns of a CTA."""
    whole = case([1, BEYOND, 2], (np.arange(3)[:, None] + [[0, BEYOND]], 32), dtype=dtype, value=64)
    outs, _ = run(whole)
    for tiles, size in ((32, 32), (64, 16)):
        own = part(whole, slice(2, 3), slice(0, 32))
        own = own._replace(write=np.full((1, 32 // size), 3, np.int32))
        some, pool = run(own, tiles=tiles)
        np.testing.assert_array_equal(some[0], outs[2, :32])
        np.testing.assert_array_equal(pool[3], run(own)[1][3])


def test_a_prompt_in_two_calls_has_the_same_bits():
    whole = case([1], ([[0, 2]], 16), heads=1)
    outs, pool = run(whole)
    first, second = (part(whole, slice(0, 1), slice(*times)) for times in ((0, 16), (16, 32)))
    head, between = run(first)
    tail, after = run(second._replace(pool=between, read=first.write[:, 0]))
    np.testing.assert_array_equal(np.concatenate([head, tail], axis=1), outs)
    np.testing.assert_array_equal(after, pool)


# --------------------------------------------------------------------------------------------------------------
# Mutations and the tests that must then fail.

DECODE_MUTATIONS = {
    "a head's key": ("lax.div(head, jnp.int32(shape.group))", "jnp.int32(0)"),
    "a block's columns": ('lax.axis_index("part") * shape.columns', 'lax.axis_index("part") * 0'),
    "states that there are not": ("(read >= 0) & (read < shape.states)", "read >= 0"),
    "states below zero": ("(write >= 0) & (write < shape.states)", "write < shape.states"),
    "decay": ("head, columns) * kept", "head, columns) * 1.0"),
    "decay before the key is looked up": ("(state * key).sum(axis=0)", "(state * key).sum(axis=0) / kept"),
    "beta": (".sum(axis=0)) * beta", ".sum(axis=0)) * 1.0"),
    "the new key": ("state = state + key * _along", "state = state + 0 * key * _along"),
}
PREFILL_MUTATIONS = {
    "a head's key": ("lax.div(place.head, jnp.int32(shape.group))", "jnp.int32(0)"),
    "a block's columns": ('lax.axis_index("part") * shape.columns', 'lax.axis_index("part") * 0'),
    "states that there are not": ("(read >= 0) & (read < shape.states)", "read >= 0"),
    "chunks that are not kept": ("& (write >= 0) & (write < shape.states)", ""),
    "the end of a chunk": ("index + 1 == (chunk + 1) * shape.chunk", "index == chunk * shape.chunk"),
    "a chunk": ("lax.div(index, jnp.int32(shape.chunk))", "jnp.int32(0)"),
    "the next step": ("jnp.minimum(index + 1, shape.steps - 1)", "jnp.minimum(index, shape.steps - 1)"),
    "queries behind keys": ("_write(smem.tokens, step.queries, TOKENS)", "_write(smem.tokens, step.queries, 0)"),
    "a token sees itself": ("jnp.where(column < TOKENS, 0, TOKENS - 1)", "jnp.where(column < TOKENS, 0, TOKENS)"),
    "no key is its own past": ("jnp.where(column < TOKENS, 0, ", "jnp.where(column < TOKENS, -1, "),
    "decay between tokens": ("jnp.exp(jnp.minimum(past, 0.0))", "jnp.exp(jnp.minimum(past, 0.0) * 0)"),
    "decay of the state under a key": ("(change - taken * before)", "(change - taken)"),
    "decay of the output": ("out, change = out * before, ", "out, change = out, "),
    "decay to the step's end": ("jnp.exp(last - step.since)", "jnp.exp(0 * step.since)"),
    "decay of the state": ("state * jnp.exp(last)", "state * 1.0"),
    "beta of later keys": ("total = total * _columns(step.beta[0], TOKENS)", "pass"),
    "beta": ("* _rows(step.beta[1], shape.columns)", "* 1.0"),
    "substitution": ("change = change - own * _score(shape, smem, token, 0)", "pass"),
    "the last token": ("for token in range(TOKENS):", "for token in range(TOKENS - 1):"),
    "keys along a product": ("along = pl.ds(first, TOKENS)", "along = pl.ds(0, TOKENS)"),
    "running sums": ("itertools.accumulate(jnp.unstack(steps, axis=-1))", "jnp.unstack(steps, axis=-1)"),
    "the second part": ("value = value - own.astype(value.dtype)", "pass"),
    "products of unlike parts": ("rights[order - part]", "rights[0]"),
}


def mutant(module, old, new):
    source = inspect.getsource(module)
    assert source.count(old) >= 1
    changed = types.ModuleType(module.__name__)
    changed.__dict__.update(module.__dict__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE_MUTATIONS)
def test_a_mutation_of_decode_is_caught(name):
    one = case(**ROWS, k_heads=2, heads=2, value=64)
    with pytest.raises((AssertionError, RuntimeError)):  # or a race, or an out-of-bounds index
        assert_close(run(one, mutant(decode, *DECODE_MUTATIONS[name])), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", PREFILL_MUTATIONS)
def test_a_mutation_of_prefill_is_caught(name):
    one = case([1, BEYOND], ([[BEYOND, 4], [0, -1]], 32), k_heads=2, heads=2, value=64)
    with pytest.raises((AssertionError, RuntimeError)):  # or a race, or an out-of-bounds index
        assert_close(run(one, mutant(prefill, *PREFILL_MUTATIONS[name]), tiles=32), one)


# --------------------------------------------------------------------------------------------------------------
# Rejected operands.


def operands(lead, chunks=None, *, k_heads=1, heads=2, key=64, value=32, dtype=F32, of_pool=F32, states=4):
    def shaped(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    queries, gate = shaped(*lead, k_heads, key), shaped(*lead, heads, dtype=F32)
    write = shaped(*(lead if chunks is None else (lead[0], chunks)), dtype=jnp.int32)
    pool = shaped(states, heads, key, value, dtype=of_pool)
    return [queries, queries, shaped(*lead, heads, value), gate, gate, pool, shaped(lead[0], dtype=jnp.int32), write]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"key": 24}, "24 keys and 32 values"),
        ({"key": 272}, "272 keys"),
        ({"value": 24}, "24 values"),
        ({"states": 0}, "0 states"),
        ({"k_heads": 3, "heads": 4}, "do not fit each other"),
        ({"dtype": jnp.float64}, "float64: float32, bfloat16 or float16"),
        ({"of_pool": BF16}, "states of bfloat16"),
    ],
)
def test_decode_refuses_what_it_cannot_do(options, why):
    assert why in decode.refusal(*operands((3,), **options))
    assert decode.refusal(*operands((3,))) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"key": 48}, "48 keys of float32"),
        ({"key": 256}, "above 128 keys bfloat16"),
        ({"value": 48}, "48 values"),
        ({"chunks": 3}, "64 tokens in 3 chunks"),
        ({"chunks": 8}, "multiples of 16"),
        ({"of_pool": BF16}, "states of bfloat16"),
    ],
)
def test_prefill_refuses_what_it_cannot_do(options, why):
    assert why in prefill.refusal(*operands((3, 64), **{"chunks": 2, **options}))
    assert prefill.refusal(*operands((3, 64), 2, key=256, dtype=BF16)) is None


@pytest.mark.parametrize("module", [decode, prefill])
@pytest.mark.parametrize(
    ("place", "why"),
    [(0, "do not fit"), (2, "do not fit"), (3, "do not fit"), (4, "do not fit"), (5, "do not fit"), (6, "to read")],
)
def test_refuses_shapes_that_do_not_fit(module, place, why):
    ours, others = (
        operands((rows,), **of) if module is decode else operands((rows, 64), 2, **of)
        for rows, of in ((3, {}), (2, {"heads": 4}))
    )
    ours[place] = others[place]
    assert why in module.refusal(*ours)


def test_what_is_refused_is_not_computed():
    with pytest.raises(ValueError, match="24 keys"):
        decode.decode(*case(**ROWS, key=24).arrays)
    with pytest.raises(ValueError, match="24 keys"):
        prefill.prefill(*case([1], ([[1]], 16), key=24).arrays)


def test_tiles():
    assert [prefill.heuristic_tiles(*of).columns for of in ((32, 128, 128), (128, 128, 128), (128, 256, 128))] == [
        32,
        64,
        32,
    ]
    assert prefill.heuristic_tiles(256, 128, 96).columns == 32
    with pytest.raises(ValueError, match="columns"):
        prefill.Tiles(16)
    with pytest.raises(ValueError, match="columns"):
        decode.Tiles(48)
