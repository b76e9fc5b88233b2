"""Packing of the host's operands of a step into one array, and unpacking."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.execution.commands import DecodeBatch, PrefillBatch
from jaxinfer.engine.execution.step import pack, unpack
from jaxinfer.parallel.dp_attention import joined

SIZES = st.integers(1, 5)


def numbers(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-1, 1 << 30, shape, np.int32) for shape in shapes]


def decode_batch(seed: int, groups: int, rows: int, width: int, owned: bool) -> DecodeBatch:
    of_row = (rows,)
    tokens, positions, generated, owners, tables = numbers(seed, *[of_row] * 4, (groups, rows, width))
    return DecodeBatch(tokens, positions, generated, tables, owners if owned else None)


def prefill_batch(seed: int, groups: int, count: int, width: int, size: int) -> PrefillBatch:
    return PrefillBatch(*numbers(seed, (count, size), (count,), (count,), (groups, count, width)))


def same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@given(st.integers(0, 99), SIZES, SIZES, SIZES, st.booleans(), SIZES)
def test_a_batch_is_what_was_packed(seed, groups, rows, width, owned, size):
    for batch in (decode_batch(seed, groups, rows, width, owned), prefill_batch(seed, groups, rows, width, size)):
        packed = pack(batch)
        assert packed.shape == (sum(leaf.size for leaf in jax.tree.leaves(batch)),)
        same(unpack(packed, batch), batch)


@given(st.integers(0, 99), SIZES, SIZES, st.integers(1, 4))
def test_each_rank_has_its_own_part(seed, rows, width, ranks):
    own = [decode_batch(seed + rank, 1, rows, width, owned=True) for rank in range(ranks)]
    parts = np.split(joined([pack(batch) for batch in own]), ranks)
    for batch, part in zip(own, parts, strict=True):
        same(unpack(part, batch), batch)


def test_it_is_a_copy():
    """The packed array is a copy, since the host updates its tables while a step reads its operands."""
    batch = prefill_batch(0, 1, 1, 4, 1)
    packed = pack(PrefillBatch(*(leaf[:0] for leaf in batch[:3]), batch.tables))
    assert not np.shares_memory(packed, batch.tables)


@pytest.mark.parametrize("owned", [False, True])
def test_a_program_unpacks_it(owned):
    batch = decode_batch(7, 2, 3, 4, owned)
    same(jax.jit(lambda packed: unpack(packed, batch))(pack(batch)), batch)
