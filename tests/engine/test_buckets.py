"""Which program a prompt token runs in depends on its own prompt alone."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.buckets import group_chunks, next_chunk

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


@given(
    st.lists(st.lists(st.sampled_from([8, 32, 64]), max_size=6).map(lambda sizes: sorted(sizes, reverse=True))),
    st.fixed_dictionaries({8: st.integers(1, 9), 32: st.integers(1, 4)}),
)
def test_groups_take_every_chunk_once_and_keep_the_order_of_each_prompt(prompts, lanes):
    sizes = [size for prompt in prompts for size in prompt]
    groups = list(group_chunks(sizes, lanes))
    order = [index for group in groups for index in group]
    assert sorted(order) == list(range(len(sizes)))
    for group in groups:
        assert len({sizes[index] for index in group}) == 1
        assert len(group) <= lanes.get(sizes[group[0]], 1)
    first = 0
    for prompt in prompts:
        places = [order.index(index) for index in range(first, first + len(prompt))]
        assert places == sorted(places)
        first += len(prompt)


def test_a_wide_program_runs_when_more_than_half_of_it_is_filled():
    assert [len(group) for group in group_chunks([8] * 7, {8: 4})] == [4, 3]
    assert [len(group) for group in group_chunks([8] * 6, {8: 4})] == [4, 1, 1]
    assert list(group_chunks([8, 32, 8], {})) == [[1], [0], [2]]
