"""The scheduler against a device that is nothing but arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig, resolve
from jaxinfer.engine.scheduler import Scheduler, StepPlan, StepResult
from jaxinfer.kv.manager import KVManager
from jaxinfer.types import CacheSpec, FinishReason, LayerSpec, Request, RequestError, SamplingParams

CACHE = CacheSpec((LayerSpec(),), kv_heads=1, head_dim=8)
EOS = 9


def make_scheduler(**changes) -> Scheduler:
    settings = {
        "max_num_seqs": 3,
        "page_size": 8,
        "num_pages": 24,
        "prefill_sizes": (8, 16),
        "max_num_batched_tokens": 19,
        **changes,
    }
    engine = resolve(EngineConfig(**settings), CACHE, max_position=128, itemsize=4)
    return Scheduler(engine, KVManager(engine.num_pages, engine.page_size, engine.rows, engine.table_width))


def answer(plan: StepPlan) -> StepResult | None:
    """Each row's token is a function of its position; 9 at every 13th one."""
    if not plan:
        return None
    tokens = [EOS if (row.position + 1) % 13 == 0 else row.position % 7 for row in plan.decodes]
    return StepResult(plan, tokens, [None] * len(tokens), [[] for _ in plan.prefills])


def expected(prompt: int, most: int, stops: bool) -> list[int]:
    out: list[int] = []
    while len(out) < most:
        position = prompt - 1 + len(out)
        out.append(EOS if (position + 1) % 13 == 0 else position % 7)
        if stops and out[-1] == EOS:
            break
    return out


def run(scheduler: Scheduler, arrivals: list[list[Request]], aborts: dict[int, str]) -> dict[str, list[int]]:
    """Step with one launch in flight, as the engine does, checking every plan and every invariant."""
    outputs: dict[str, list[int]] = {}
    computed: dict[tuple[str, int], int] = {}
    pending, step = None, 0
    while scheduler.has_work or pending or arrivals:
        for request in arrivals.pop(0) if arrivals else []:
            scheduler.add(request)
        plan = scheduler.plan()
        check_plan(plan, computed)
        for delta in scheduler.commit(answer(pending) if pending else None):
            outputs.setdefault(f"{delta.request_id}/{delta.index}", []).extend(delta.token_ids)
        pending = plan or None
        if step in aborts:
            scheduler.abort(aborts[step])
        scheduler.check()
        step += 1
        assert step < 5000, "somebody starves"
    return outputs


def check_plan(plan: StepPlan, computed: dict[tuple[str, int], int]) -> None:
    """Every token is computed once, in order, and fits the budget."""
    for sequence in plan.admitted:
        computed[sequence.request.request_id, sequence.index] = 0
    assert sum(p.chunk.size for p in plan.prefills) + len(plan.decodes) <= 16 + 3
    for prefill in plan.prefills:
        key = (prefill.sequence.request.request_id, prefill.sequence.index)
        assert computed[key] == prefill.chunk.start
        computed[key] += prefill.chunk.length
    slots = [row.sequence.slot for row in plan.decodes]
    assert len(set(slots)) == len(slots)
    for row in plan.decodes:
        key = (row.sequence.request.request_id, row.sequence.index)
        assert computed[key] == row.position
        assert (row.token == -1) == (row.position >= len(row.sequence.prompt))
        computed[key] += 1


requests = st.builds(
    lambda prompt, most, n, stops: (prompt, most, n, stops),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 3),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(requests, max_size=3), max_size=6), st.dictionaries(st.integers(0, 60), st.integers(0, 5)))
def test_every_sequence_gets_its_tokens(waves, abort_at):
    number, arrivals, want = 0, [], {}
    for wave in waves:
        arrivals.append([])
        for prompt, most, n, stops in wave:
            params = SamplingParams(n=n, max_tokens=most)
            stop_ids = frozenset({EOS}) if stops else frozenset()
            arrivals[-1].append(Request(str(number), tuple(range(prompt)), params, stop_ids))
            for index in range(n):
                want[f"{number}/{index}"] = expected(prompt, most, stops)
            number += 1
    aborts = {step: str(request) for step, request in abort_at.items()}
    got = run(make_scheduler(), arrivals, aborts)
    for key, tokens in got.items():
        whole = key.split("/")[0] not in aborts.values()
        assert tokens == want[key] if whole else tokens == want[key][: len(tokens)]
    assert {key for key in want if key.split("/")[0] not in aborts.values()} <= got.keys()


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(num_pages=16)
    request = Request("a", tuple(range(100)), SamplingParams(max_tokens=40))
    with pytest.raises(RequestError, match="139 tokens need 18 KV pages, the pool has 16"):
        scheduler.add(request)
    assert not scheduler.has_work


def test_min_tokens_holds_back_the_end():
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=30, min_tokens=5)
    scheduler.add(Request("a", tuple(range(12)), params, frozenset({EOS})))
    pending, finish, tokens = None, None, 0
    while finish is None:
        plan = scheduler.plan()
        for delta in scheduler.commit(answer(pending) if pending else None):
            tokens, finish = tokens + len(delta.token_ids), delta.finish_reason
        pending = plan
    # Output 2 is EOS and too early; the next one, 13 positions on, is taken.
    assert (finish, tokens) == (FinishReason.STOP, 15)
