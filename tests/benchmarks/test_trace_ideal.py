"""benchmarks/traces: parsing of traces and their bounds, by hand and against slow but obvious programs."""

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.traces.ideal import BatchingBound, LRUHits, lru_hits, unique_pages
from jaxinfer.bench.datasets import prompt_material
from jaxinfer.bench.prompts import Ids
from jaxinfer.bench.traces import (
    Trace,
    TraceError,
    TraceRequest,
    read_azure,
    read_mooncake,
    scale_azure,
    scale_mooncake,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,300,100
2023-11-16 18:15:48.2500000,60,1
2023-11-16 18:16:46.5000000,1,200
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1024, "output_length": 600, "hash_ids": [0, 7]}
"""
SEED = 3


@pytest.fixture
def azure(tmp_path: pathlib.Path) -> list[TraceRequest]:
    (tmp_path / "azure.csv").write_text(AZURE)
    return read_azure(tmp_path / "azure.csv")


@pytest.fixture
def mooncake(tmp_path: pathlib.Path) -> list[TraceRequest]:
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    return read_mooncake(tmp_path / "mooncake.jsonl")


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.prompt_len, request.output_len) for request in trace.requests]


def test_azure_as_recorded(azure: list[TraceRequest]) -> None:
    assert [request.arrival for request in azure] == pytest.approx([0.0, 1.75, 60.0])
    assert lengths(scale_azure(azure, 400)) == [(300, 100), (60, 1), (1, 200)]


def test_azure_scaled_so_that_the_longest_fits(azure: list[TraceRequest]) -> None:
    trace = scale_azure(azure, 40)
    assert (trace.scale, trace.dropped) == (0.1, 0)
    assert lengths(trace) == [(30, 10), (6, 1), (1, 20)]


def test_whole_numbers_stay_whole(azure: list[TraceRequest]) -> None:
    assert 100 * 0.29 < 29
    assert lengths(scale_azure(azure, 400, scale=0.29))[0] == (87, 29)


def test_azure_scaled_as_asked_drops_what_is_too_long(azure: list[TraceRequest]) -> None:
    trace = scale_azure(azure, 250, scale=1.0)
    assert lengths(trace) == [(60, 1), (1, 200)]
    assert trace.dropped == 1
    with pytest.raises(TraceError, match="no request of the azure trace fits into 3 tokens"):
        scale_azure(azure, 3, scale=1.0)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1), st.integers(2, 2000))
def test_no_azure_request_is_lost_to_rounding(pairs: list[tuple[int, int]], max_len: int) -> None:
    trace = scale_azure([TraceRequest(0.0, *pair, (0,)) for pair in pairs], max_len)
    assert trace.dropped == 0
    assert trace.longest <= max_len
    assert all(prompt >= 1 and output >= 1 for prompt, output in lengths(trace))


def test_mooncake_blocks(mooncake: list[TraceRequest]) -> None:
    trace = scale_mooncake(mooncake, 1000, block_tokens=16)
    assert [request.arrival for request in trace.requests] == [0.0, 2.5]
    assert lengths(trace) == [(2 * 16 + 2, 1), (32, 18)]  # the third block has 76 of 512 tokens
    first, second = (prompt_material(trace, request, Ids(1000), SEED) for request in trace.requests)
    assert (first[:16] == second[:16]).all()
    assert (first[16:32] != second[16:32]).any()
    assert (prompt_material(trace, trace.requests[0], Ids(1000), SEED + 1)[:16] != first[:16]).any()
    assert first.dtype == np.int32
    assert first.max() < 1000


def test_azure_prompts_share_nothing(azure: list[TraceRequest]) -> None:
    trace = scale_azure(azure, 400)
    first, second, _ = (prompt_material(trace, request, Ids(32_000), SEED) for request in trace.requests)
    assert len(first) == 300
    assert (first[:60] != second).any()


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n"])
def test_files_that_are_no_traces(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(TraceError, match="is not an Azure trace"):
        read_azure(tmp_path / "file")
    with pytest.raises(TraceError, match="is not a Mooncake trace"):
        read_mooncake(tmp_path / "file")


def test_mooncake_with_a_block_missing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}')
    with pytest.raises(TraceError, match="600 tokens are not 1 blocks"):
        read_mooncake(tmp_path / "file")


def test_the_real_traces(test_data: pathlib.Path) -> None:
    folder = test_data / "traces"
    azure = read_azure(folder / "azure_2023_conv.csv")
    assert (len(azure), azure[0].prompt_len, azure[-1].arrival) == (19366, 374, pytest.approx(3501.7219))
    outputs = [request.output_len for request in azure]
    assert BatchingBound.of(outputs, 8).ratio == pytest.approx(2.07, abs=0.01)
    assert BatchingBound.of(outputs, 32).ratio == pytest.approx(2.60, abs=0.01)
    mooncake = scale_mooncake(read_mooncake(folder / "mooncake_synthetic.jsonl"), 1 << 20, 512)
    assert (len(mooncake.requests), mooncake.dropped, mooncake.longest) == (3993, 0, 191386)


def test_batching_bound_by_hand() -> None:
    bound = BatchingBound.of([8, 2, 2, 4], batch=2)
    assert (bound.static_steps, bound.full_steps) == (8 + 4, 16 / 2)
    assert bound.continuous_steps == 8  # next to the first one: 2 + 2 + 4
    assert bound.ratio == bound.ratio_here == 1.5
    assert BatchingBound.of([3, 3, 3], batch=2).ratio_here == 1.0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 8))
def test_batching_bound_step_by_step(outputs: list[int], batch: int) -> None:
    waiting, running, steps = list(outputs), list[int](), 0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    assert BatchingBound.of(outputs, batch).continuous_steps == steps


def naive_lru(trace: Trace, page_size: int, pages: int) -> LRUHits:
    """Compute hits by the tokens themselves: a page is all tokens up to its end; evict the least recently used page
    that is no prefix of another."""
    used: dict[bytes, int] = {}
    asked = hits = time = 0
    for request in trace.requests:
        tokens = prompt_material(trace, request, Ids(1 << 30), SEED)
        path = [tokens[:end].tobytes() for end in range(page_size, len(tokens) + 1, page_size)]
        asked += len(tokens) - 1
        for page in path:
            if page not in used or len(page) // 4 > len(tokens) - 1:
                break
            hits += page_size
        for page in reversed(path):
            used[page] = time = time + 1
        while len(used) > pages:
            leaves = [page for page in used if not any(o != page and o.startswith(page) for o in used)]
            del used[min(leaves, key=used.__getitem__)]
    return LRUHits(asked, hits)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw prompts of a few blocks, often with shared prefixes."""
    block = draw(st.integers(1, 6))
    chains = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12))
    cuts = [draw(st.integers(1, block)) for _ in chains]
    requests = [TraceRequest(0.0, (len(c) - 1) * block + cut, 1, tuple(c)) for c, cut in zip(chains, cuts, strict=True)]
    return Trace("drawn", tuple(requests), block, 1.0, 0)


@given(traces(), st.integers(1, 4), st.integers(1, 12))
def test_lru_is_what_it_says(trace: Trace, page_size: int, pages: int) -> None:
    # one-token blocks of a large vocabulary differ, so equal tokens are equal blocks
    assert lru_hits(trace, page_size, pages) == naive_lru(trace, page_size, pages)


@given(traces(), st.integers(1, 4))
def test_unique_pages_are_those_with_different_tokens(trace: Trace, page_size: int) -> None:
    prompts = [prompt_material(trace, request, Ids(1 << 30), SEED) for request in trace.requests]
    pages = {t[:end].tobytes() for t in prompts for end in range(page_size, len(t) + 1, page_size)}
    assert unique_pages(trace, page_size) == len(pages)


def test_lru_by_hand() -> None:
    requests = [TraceRequest(0.0, 9, 1, blocks) for blocks in [(0, 1, 9), (0, 2, 9), (0, 1, 9), (3, 4, 9), (0, 1, 9)]]
    trace = Trace("t", tuple(requests), 4, 1.0, 0)
    assert lru_hits(trace, 4, 100) == LRUHits(5 * 8, 4 + 8 + 8)
    assert lru_hits(trace, 4, 4) == LRUHits(5 * 8, 4 + 8 + 8)  # 3, 4, 0, 1 at the end: 2 was evicted
    assert lru_hits(trace, 4, 2) == LRUHits(5 * 8, 4 + 4)
