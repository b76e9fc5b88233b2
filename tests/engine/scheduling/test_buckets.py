"""The program that computes a prompt token depends on its own prompt alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.scheduling.buckets import Chunk, group_chunks, next_chunk, page_code, rule_size

SIZES = (8, 32, 64)
APART = {8: 0, 32: 1, 64: 2}
PAIRED = {8: 0, 32: 1, 64: 1}

all_classes = st.sampled_from([APART, PAIRED, {8: 0, 32: 0, 64: 1}, {8: 0, 32: 0, 64: 0}])


@given(st.integers(1, 500), all_classes, st.booleans())
def test_chunks_cover_the_prompt_once_from_absolute_multiples(end, classes, largest_only):
    start, chunks = 0, []
    while start < end:
        chunk = next_chunk(start, end, SIZES, classes, largest_only=largest_only)
        assert chunk.start % SIZES[-1] == 0
        assert 0 < chunk.length <= chunk.size
        assert chunk.size in (SIZES[-1:] if largest_only else SIZES)
        chunks.append(chunk)
        start += chunk.length
    assert start == end
    assert all(chunk.length == SIZES[-1] for chunk in chunks[:-1])


@given(st.integers(1, 500), st.integers(0, 499), all_classes)
def test_a_chunk_after_a_hit_runs_in_the_class_that_is_due(end, start, classes):
    start %= end
    chunk = next_chunk(start, end, SIZES, classes)
    assert chunk.start == start
    assert 0 < chunk.length <= chunk.size
    for position in range(start, start + chunk.length):
        assert classes[chunk.size] == classes[rule_size(position, end, SIZES)]


@given(st.integers(1, 500), st.integers(0, 499), all_classes)
def test_a_chunk_after_a_hit_ends_where_it_would_end_without(end, start, classes):
    start %= end
    chunk = next_chunk(start, end, SIZES, classes)
    assert chunk.start + chunk.length in (end, start - start % SIZES[-1] + SIZES[-1])


def ranges(pieces: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the ranges of gaps and lengths, as far as they are before ``end``."""
    at, found = 0, list[tuple[int, int]]()
    for gap, length in pieces:
        found.append((at + gap, at + gap + length))
        at += gap + length
    return [(first, last) for first, last in found if last <= end]


pieces_of = st.lists(st.tuples(st.integers(0, 70), st.integers(1, SIZES[-1])), max_size=6)


@settings(deadline=None)
@given(st.integers(1, 250), pieces_of, all_classes, st.booleans())
def test_no_chunk_splits_a_range_and_after_a_hit_the_same_classes_run(end, pieces, classes, last):
    whole, at, due = ranges(pieces, end), 0, list[int]()
    end = whole[-1][1] if last and whole else end
    while at < end:
        chunk = next_chunk(at, end, SIZES, classes, whole=whole)
        due += [classes[chunk.size]] * chunk.length
        at += chunk.length
    for start in range(end):
        chunk = next_chunk(start, end, SIZES, classes, whole=whole)
        stop = start + chunk.length
        assert 0 < chunk.length <= chunk.size
        assert not any(first < stop < last for first, last in whole)
        assert set(due[start:stop]) == {classes[chunk.size]}


@given(st.integers(1, 500), all_classes, st.booleans())
def test_sizes_never_grow_along_a_prompt(end, classes, largest_only):
    start, sizes = end // 3, []
    while start < end:
        chunk = next_chunk(start, end, SIZES, classes, largest_only=largest_only)
        sizes.append(chunk.size)
        start += chunk.length
    assert sizes == sorted(sizes, reverse=True)


def test_a_tail_runs_in_the_smallest_size_that_holds_it():
    tails = [next_chunk(64, 64 + n, SIZES, APART).size for n in (1, 8, 9, 32, 33, 64, 65)]
    assert tails == [8, 8, 32, 32, 64, 64, 64]


def test_what_is_left_of_a_tail_after_a_hit_runs_in_a_smaller_size_of_equal_bits_only():
    # The tail of 60 tokens is due in size 64. After a hit of 50, ten are left.
    assert next_chunk(114, 124, SIZES, APART) == Chunk(114, 10, 64)
    assert next_chunk(114, 124, SIZES, PAIRED) == Chunk(114, 10, 32)
    assert next_chunk(114, 124, SIZES, dict.fromkeys(SIZES, 0)) == Chunk(114, 10, 32)
    assert next_chunk(120, 124, SIZES, dict.fromkeys(SIZES, 0)) == Chunk(120, 4, 8)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 40), all_classes)
def test_pages_of_equal_code_were_computed_by_equal_programs(end, other, page, classes):
    """The code gives for each token of the page: prefill of which size class, or decode."""

    def programs(end):
        positions = range(page * 8, page * 8 + 8)
        return [classes[rule_size(at, end, SIZES)] if at < end else "decode" for at in positions]

    def code(end):
        return page_code(page, 8, end, SIZES, classes)

    assert (code(end) == code(other)) == (programs(end) == programs(other))


@given(
    st.lists(st.lists(st.sampled_from([8, 32, 64]), max_size=6).map(lambda sizes: sorted(sizes, reverse=True))),
    st.fixed_dictionaries({8: st.integers(1, 9), 32: st.integers(1, 4)}),
)
def test_groups_take_every_chunk_once_and_keep_the_order_of_each_prompt(prompts, widths):
    sizes = [size for prompt in prompts for size in prompt]
    groups = list(group_chunks(sizes, widths))
    order = [index for group in groups for index in group]
    assert sorted(order) == list(range(len(sizes)))
    for group in groups:
        assert len({sizes[index] for index in group}) == 1
        assert len(group) <= widths.get(sizes[group[0]], 1)
    first = 0
    for prompt in prompts:
        places = [order.index(index) for index in range(first, first + len(prompt))]
        assert places == sorted(places)
        first += len(prompt)


def test_a_wide_program_runs_when_more_than_half_of_it_is_filled():
    assert [len(group) for group in group_chunks([8] * 7, {8: 4})] == [4, 3]
    assert [len(group) for group in group_chunks([8] * 6, {8: 4})] == [4, 1, 1]
    assert list(group_chunks([8, 32, 8], {})) == [[1], [0], [2]]
