"""Which program a prompt token runs in depends on its own prompt alone."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.buckets import next_chunk

SIZES = (8, 32, 64)


@given(st.integers(1, 500), st.booleans())
def test_chunks_cover_the_prompt_once_from_absolute_multiples(end, largest_only):
    start, chunks = 0, []
    while start < end:
        chunk = next_chunk(start, end, SIZES, largest_only=largest_only)
        assert chunk.start % SIZES[-1] == 0
        assert 0 < chunk.length <= chunk.size
        assert chunk.size in (SIZES[-1:] if largest_only else SIZES)
        chunks.append(chunk)
        start += chunk.length
    assert start == end
    assert all(chunk.length == SIZES[-1] for chunk in chunks[:-1])


def test_a_tail_runs_in_the_smallest_size_that_holds_it():
    assert [next_chunk(64, 64 + n, SIZES).size for n in (1, 8, 9, 32, 33, 64, 65)] == [8, 8, 32, 32, 64, 64, 64]
