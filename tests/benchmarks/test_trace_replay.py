"""benchmarks/traces: replays and comparisons on a server with times that can be computed by hand."""

import dataclasses

import pytest

from benchmarks.traces import compare, record, replay
from benchmarks.traces.compare import Goal, Setup
from benchmarks.traces.ideal import BatchingBound, lru_hits, unique_pages
from benchmarks.traces.replay import Arrival, Server, Times, arrivals
from jaxinfer.bench.traces import Trace, TraceError, TraceRequest
from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.benchmarks.scripted_server import ScriptedServer

OUTPUTS = (8, 2, 2, 4, 1, 9, 3, 3)


def trace(outputs: tuple[int, ...] = OUTPUTS, gap: float = 10.0) -> Trace:
    requests = [TraceRequest(i * gap, 9, output, (0, i % 3, i)) for i, output in enumerate(outputs)]
    return Trace("made up", tuple(requests), 4, 1.0, 0)


def setup(opened: list[ScriptedServer], server: ScriptedServer | None = None, **changes: object) -> Setup:
    def open_server(config: EngineConfig) -> Server:
        opened.append(dataclasses.replace(server or ScriptedServer(), settings=config))
        return opened[-1]

    config = EngineConfig(max_num_seqs=2, page_size=4)
    made = Setup(trace(), open_server, config, vocab=100, rounds=3, seed=0, speed=None, outstanding=4, prefix_len=20)
    return dataclasses.replace(made, **changes)


def arrival(due: float, output: int, name: str) -> Arrival:
    params = SamplingParams(max_tokens=output, seed=0)
    return Arrival(due, lambda: Request(name, (1, 2, 3), params))


def test_times_by_hand() -> None:
    server = ScriptedServer(EngineConfig(max_num_seqs=1), hits=1)
    server.time = 100.0  # replays may start at any time
    found = replay.replay(server, [arrival(0.0, 3, "a"), arrival(0.5, 1, "b"), arrival(10.0, 2, "c")])
    assert [(t.due, t.first, t.last, t.tokens) for t in found.times] == [
        (0.0, 1.0, 3.0, 3),
        (0.5, 4.0, 4.0, 1),
        (10.0, 11.0, 12.0, 2),
    ]
    assert server.waited == 6.0
    assert (found.seconds, found.steps, found.output_tokens, found.rate) == (12.0, 6, 6, 0.5)
    figures = found.figures()
    assert figures["ttft"]["p50"] == 1.0
    assert figures["ttft"]["p90"] == pytest.approx(1.0 + 0.8 * 2.5)
    assert figures["tpot"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0, "mean": 1.0}
    assert figures["tokens_per_second"] == pytest.approx(15 / 12)
    assert figures["prefix_hit_rate"] == pytest.approx(3 / 9)
    # after each step: a has 1, 2 of 4, then nothing runs; c has 1 of 4, then nothing
    assert figures["kv_waste"] == pytest.approx(1 - 4 / 12)
    assert "TTFT p50/p90/p99   1000.0 / 3000.0" in replay.describe(figures)


def test_counters_of_an_earlier_replay_do_not_count() -> None:
    server = ScriptedServer(hits=2)
    replay.replay(server, [arrival(0.0, 1, "a")])
    assert replay.replay(server, [arrival(0.0, 1, "b")]).counters.hits == 2


def test_a_limit_of_outstanding_requests() -> None:
    server = ScriptedServer(EngineConfig(max_num_seqs=8))
    found = replay.replay(server, [arrival(0.0, output, str(output)) for output in (2, 3, 4)], outstanding=2)
    assert server.entered == [0.0, 0.0, 2.0]
    assert [times.ttft for times in found.times] == [1.0, 1.0, 1.0]


def test_a_request_of_one_token_has_no_tpot() -> None:
    assert Times(0.0, 3, tokens=1, first=1.0, last=1.0).tpot is None
    assert replay.replay(ScriptedServer(), [arrival(0.0, 1, "a")]).figures()["tpot"] is None


def test_arrivals_are_sped_up_and_prompts_share_blocks() -> None:
    made = list(arrivals(trace(), vocab=1000, seed=1, speed=20.0))
    assert [each.due for each in made[:3]] == [0.0, 0.5, 1.0]
    requests = [each.make() for each in made]
    prompts = [request.prompt_token_ids for request in requests]
    assert prompts[0][:8] == prompts[3][:8] != prompts[1][:8]
    assert prompts[0][:4] == prompts[1][:4]
    assert [request.params.max_tokens for request in requests] == list(OUTPUTS)
    assert all(request.params.ignore_eos and not request.stop_token_ids for request in requests)
    assert {each.due for each in arrivals(trace(), 1000, 1, None)} == {0.0}


def test_static_batching_on_a_perfect_server_is_its_bound() -> None:
    opened: list[ScriptedServer] = []
    result = compare.static_batching(setup(opened))
    bound = BatchingBound.of(OUTPUTS, 2)
    assert [server.settings.batching for server in opened] == ["continuous", "static"]
    assert result["ratio"]["median"] == result["steps_ratio"] == pytest.approx(bound.ratio_here)
    assert result["share_of_a_run_that_ends"] == pytest.approx(1.0)
    assert result["verdict"]["figure"] == pytest.approx(bound.ratio_here / bound.ratio)
    assert result["verdict"]["reached"]
    assert {name: len(runs) for name, runs in result["runs"].items()} == {
        "continuous": 3,
        "static": 3,
        "prompts alone": 3,
    }
    alone, whole, static = (result["runs"][name][0] for name in ("prompts alone", "continuous", "static"))
    assert (alone["output_tokens"], alone["seconds"]) == (8, 4.0)  # eight requests of a token, two at a time
    assert result["decoding_ratio"] == pytest.approx((static["seconds"] - 4.0) / (whole["seconds"] - 4.0))


def test_turns_alternate_and_each_round_has_new_prompts() -> None:
    opened: list[ScriptedServer] = []
    order: list[tuple[str, str]] = []

    class Watched(ScriptedServer):
        def add(self, request: Request) -> None:
            super().add(request)
            order.append((self.settings.exactness, request.request_id))

    compare.exactness(setup(opened, Watched()))
    firsts = [(who, name) for who, name in order if name.endswith("-0")]
    assert [who for who, _ in firsts] == ["relaxed", "exact", "exact", "relaxed", "relaxed", "exact"]
    assert [name for _, name in firsts] == ["0-0", "0-0", "1-0", "1-0", "2-0", "2-0"]


def test_multi_step_lets_nobody_wait() -> None:
    opened: list[ScriptedServer] = []
    result = compare.multi_step(setup(opened))
    assert list(result["runs"]) == ["8 steps", "1 step"]
    assert [server.settings.multi_step for server in opened] == [8, 1]
    assert result["runs"]["1 step"][0]["ttft"]["p99"] == 1.0


def test_cache_goal_is_a_share_of_lru() -> None:
    opened: list[ScriptedServer] = []
    asked = setup(opened, ScriptedServer(hits=3), pool_share=0.5)
    result = compare.against_lru(asked)
    pages = unique_pages(asked.trace, 4) // 2
    assert (opened[0].settings.num_pages, opened[0].settings.swap_space_gib) == (pages, 0.0)
    assert result["verdict"]["figure"] == pytest.approx(3 * 8 / lru_hits(asked.trace, 4, pages).hits)
    alone = dataclasses.replace(asked.trace, requests=asked.trace.requests[:1])
    with pytest.raises(TraceError, match="share no page"):
        compare.against_lru(dataclasses.replace(asked, trace=alone))


def test_a_warm_prefix() -> None:
    opened: list[ScriptedServer] = []
    prompts: list[tuple[int, ...]] = []

    class Cached(ScriptedServer):
        def add(self, request: Request) -> None:
            self.step_seconds = 1.0 if request.prompt_token_ids[:20] in [p[:20] for p in prompts] else 6.0
            prompts.append(request.prompt_token_ids)
            super().add(request)

    result = compare.warm_prefix(setup(opened, Cached()))
    assert result["ttft"] == {"cold": 6.0, "warm": 1.0}
    assert result["verdict"] == {"figure": 6.0, "goal": 5.0, "at_least": True, "reached": True}
    assert len(set(prompts)) == len(prompts) == 2 * 4


def test_goals() -> None:
    assert Goal(2.0).judge(2.0)["reached"]
    assert not Goal(2.0).judge(1.9)["reached"]
    assert Goal(1.1, at_least=False).judge(1.05)["reached"]
    assert not Goal(1.1, at_least=False).judge(1.2)["reached"]


def test_a_record_says_when_it_should_not_be_believed() -> None:
    busy = {"machine": {"used_by_others": 0.5}, "options": {"model": "demo"}}
    assert "NOT QUIET: other programs used 50%" in record.doubts(busy)[0]
    assert record.doubts({**busy, "options": {"model": "none"}}) == []
