"""The engine loop around the scheduler and the fake device. Outputs are compared as they are produced. No jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from jaxinfer.config import EngineConfig, ResolvedEngine, resolve
from jaxinfer.config.images import ImageNeeds
from jaxinfer.engine.core import EngineLoop, new_kv
from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.engine.scheduling.pages import Costs
from jaxinfer.engine.scheduling.plan import StepPlan, StepResult
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.lora.store import LoRAStore
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.spec import Bounded, DeviceDrafter, Drafted, register
from jaxinfer.types import CacheSpec, FinishReason, LayerSpec, PositionLogprobs, Request, SequenceDelta
from tests.engine.fake_device import EOS, VOCAB, Alone, FakeDevice, FakeModel, Launched, position_logprobs
from tests.spec.trees import TreesOfTruth

register("trees", lambda config: DeviceDrafter(1))  # `Loop` replaces it with `TreesOfTruth`

SWAP = Costs(swap_page=0.0, prefill_token=1.0, decode_step=1.0)
RECOMPUTE = Costs(swap_page=1e9, prefill_token=0.0, decode_step=0.0)


@dataclasses.dataclass
class Output:
    """The output so far of one sample."""

    request: Request
    want: Alone
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: FinishReason | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    cached_tokens: int | None = None

    def take(self, delta: SequenceDelta, now: float) -> None:
        """Add a delta, which must continue the isolated run."""
        if self.reason is FinishReason.ABORT is delta.finish_reason and not delta.token_ids:
            return  # all were aborted, and then this one
        assert self.reason is None, f"a delta after the end: {delta}"
        before = len(self.request.prompt_token_ids) + len(self.tokens)
        after = before + len(delta.token_ids)
        assert delta.token_ids == self.want.tokens[before:after], f"{delta} is not {self.want.tokens[before:after]}"
        if self.request.params.logprobs is not None:
            wanted = zip(self.want.tokens[before:after], self.want.logprobs[before - 1 : after - 1], strict=True)
            assert list(delta.logprobs) == [position_logprobs(*pair) for pair in wanted]
        self._take_prompt(delta)
        assert (delta.cached_tokens is None) == bool(self.tokens or not delta.token_ids)
        self.cached_tokens = delta.cached_tokens if self.cached_tokens is None else self.cached_tokens
        self.tokens += delta.token_ids
        self.reason = delta.finish_reason
        if self.reason is FinishReason.ABORT:
            return
        if self.reason is FinishReason.DEADLINE:
            assert self.request.deadline is not None
            assert self.request.deadline <= now
        else:
            assert self.reason == (self.want.reason if after == len(self.want.tokens) else None)

    def _take_prompt(self, delta: SequenceDelta) -> None:
        if self.request.params.prompt_logprobs is None or self.tokens or not delta.token_ids:
            assert delta.prompt_logprobs is None
            return
        prompt = self.request.prompt_token_ids
        wanted = zip(prompt[1:], self.want.logprobs, strict=False)
        assert delta.prompt_logprobs == [None, *(position_logprobs(*pair) for pair in wanted)]


class Loop:
    """The engine's own loop around the fake device; ``now`` is the clock of both."""

    def __init__(
        self,
        engine: ResolvedEngine,
        model: FakeModel,
        costs: Costs | None = None,
        loras: LoRAStore | None = None,
    ) -> None:
        self.engine, self.model, self.now, self.steps = engine, model, 0.0, 0
        self.kv = new_kv(engine, model.windows)
        pools = self.kv._store.pools
        self.device = FakeDevice(
            model,
            engine,
            self.kv.tables,
            self._alone,
            running=lambda: self.scheduler._running,
            cached=lambda group, page: pools[group].owner(page) is not None,
        )
        classes = dict.fromkeys(model.sizes, 0) if model.agree else dict(model.classes)
        self.core = EngineLoop(
            engine,
            self.kv,
            self,
            size_classes=classes,
            decode_agrees=model.agree,
            costs=costs,
            clock=lambda: self.now,
            loras=loras,
        )
        self.scheduler = self.core._scheduler
        if engine.speculative == "trees":
            self.scheduler._drafts._drafter = Bounded(TreesOfTruth(self.truth, VOCAB), VOCAB)
        self.outputs: dict[str, list[Output]] = {}
        self.live: dict[str, int] = {}  # unfinished requests: the step in which each arrived
        self.plan = StepPlan()
        self._stalled = 0  # consecutive steps that launched nothing although there is work
        self.patience = 3  # upper bound of _stalled

    def truth(self, drafted: Drafted) -> list[int]:
        """Return the tokens of the isolated run of a sequence, its prompt first."""
        samples = itertools.chain.from_iterable(self.scheduler._requests.values())
        return self._alone(next(sample for sample in samples if sample.arrival == drafted.number)).tokens

    def _alone(self, sequence: Sequence) -> Alone:
        return self.outputs[sequence.request.request_id][sequence.index].want

    @property
    def busy(self) -> bool:
        return self.core.has_work

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        wants = (self.model.alone(request, index) for index in range(request.params.n))
        self.outputs[request.request_id] = [Output(request, want) for want in wants]
        self.live[request.request_id] = self.steps

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self.scheduler.abort(request_id, index, reason)
        for number, output in enumerate(self.outputs[request_id]):
            if index in (None, number) and output.reason is None:
                output.reason = reason
        self._settle(request_id)

    def step(self) -> StepPlan:
        """Run one step with all checks."""
        self.now += 1.0
        self.steps += 1
        launched = self.core.launch()
        self._stalled = self._stalled + 1 if self.live and not (launched or self.core._pending) else 0
        assert self._stalled < self.patience, f"nobody can go on: {list(self.live)}"
        deltas = self.core.read(launched)
        assert len({(delta.request_id, delta.index) for delta in deltas}) == len(deltas), "two deltas of a sample"
        for delta in deltas:
            self.outputs[delta.request_id][delta.index].take(delta, self.now)
            self._settle(delta.request_id)
        self.scheduler.check()
        return self.plan

    def launch(self, plan: StepPlan) -> Launched | None:
        self.plan = plan
        return self.device.launch(plan)

    def read(self, launched: Launched | None) -> StepResult | None:
        return None if launched is None else launched.result

    def _settle(self, request_id: str) -> None:
        if all(output.reason is not None for output in self.outputs[request_id]):
            self.live.pop(request_id, None)

    def drain(self, limit: int = 5000) -> None:
        """Step until no work is left."""
        for _ in range(limit):
            if not self.busy:
                break
            self.step()
        assert not self.busy, f"somebody starves: {self.live}"
        self.check_idle()

    def check_idle(self) -> None:
        """Check that every request has finished and holds no pages."""
        assert not self.live
        usage = self.kv.usage()
        assert usage.held == 0
        assert usage.free + usage.cached == usage.total
        assert self.scheduler.stats.snapshot().replay_mismatches == 0

    def check_empty(self) -> None:
        """Check that no page is used on the device or the host once the prefix cache is dropped, too."""
        self.check_idle()
        self.kv.reset_prefix_cache()
        usage = self.kv.usage()
        assert usage.free == usage.total, f"pages are lost: {usage}"
        assert usage.host_used == 0, f"host pages are lost: {usage}"

    def run(self, *requests: Request) -> list[list[list[int]]]:
        """Add requests and drain; return the tokens of all samples, in the order of the requests."""
        for request in requests:
            self.add(request)
        self.drain()
        return [[output.tokens for output in self.outputs[request.request_id]] for request in requests]


def make_loop(
    *,
    windows: tuple[int | None, ...] = (None,),
    classes: tuple[int, ...] = (0, 1),
    host_pages: int = 0,
    rows: int = 0,
    costs: Costs | None = None,
    loras: LoRAStore | None = None,
    decode_agrees: bool = False,
    images: ImageNeeds | None = None,
    **changes: Any,
) -> Loop:
    """Return a loop with three slots and 24 pages of 8 tokens, unless ``changes`` override them.

    Args:
        classes: class of each prefill size, in order.
        rows: of the decode program, if more than slots.
        loras: source of adapters, for settings that enable them.
        decode_agrees: all programs are of one class.
        images: of the model's vision tower.
    """
    config = {
        "max_num_seqs": 3,
        "page_size": 8,
        "num_pages": 24,
        "max_model_len": 128,
        "prefill_sizes": (8, 16),
        "max_num_batched_tokens": 19,
        **changes,
    }
    cache = CacheSpec(tuple(LayerSpec(window) for window in windows), kv_heads=1, head_dim=8)
    engine = resolve(EngineConfig(**config), cache, max_position=128, itemsize=4, images=images)
    rows = -(-max(rows, engine.rows) // engine.microbatches) * engine.microbatches
    engine = dataclasses.replace(engine, host_pages=host_pages, rows=rows)
    both_ways = images is not None and images.both_ways
    pairs = tuple(zip(engine.prefill_sizes, classes, strict=True))
    model = FakeModel(windows, engine.prefill_sizes, pairs, engine.exactness == "relaxed", decode_agrees, both_ways)
    return Loop(engine, model, costs, loras)


def make_request(
    name: str, prompt: int | tuple[int, ...], most: int = 8, *, stops: bool = False, **changes: Any
) -> Request:
    """Return a request with ``max_tokens`` ``most`` for a prompt (its tokens, or the number of default tokens)."""
    tokens = tuple((7 * i + i // 5) % 9 for i in range(prompt)) if isinstance(prompt, int) else prompt
    fields = {field.name for field in dataclasses.fields(Request)}
    own = {key: value for key, value in changes.items() if key in fields}
    params = {key: value for key, value in changes.items() if key not in fields}
    sampling = SamplingParams(**{"seed": 0, "max_tokens": most, **params})
    return Request(name, tokens, sampling, frozenset({EOS}) if stops else frozenset(), **own)


def eos_request(loop: Loop, least: int, **changes: Any) -> tuple[Request, int]:
    """Return a request whose isolated run ends by a stop id, and its length, ``least`` to 20 tokens."""
    for seed in range(1000):
        request = make_request("eos", 12, 30, stops=True, seed=seed, **changes)
        want = loop.model.alone(request, 0)
        if want.reason is FinishReason.STOP and least <= len(want.tokens) - 12 <= 20:
            return request, len(want.tokens) - 12
    raise AssertionError("no seed ends so")


# ---- views of a plan


def chunks(plan: StepPlan) -> list[tuple[str, Chunk]]:
    return [(prefill.sequence.request.request_id, prefill.chunk) for prefill in plan.prefills]


def rows(plan: StepPlan) -> list[tuple[str, int]]:
    return [(row.sequence.request.request_id, row.position) for row in plan.decodes]


def ids(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def tokens_of(loop: Loop, name: str) -> list[int]:
    """Return the prompt and all tokens that will be generated."""
    return loop.outputs[name][0].want.tokens
