"""The runner alone, with plans made by hand: every kind of step is bitwise identical to plain steps."""

import dataclasses
import functools
import itertools
from array import array
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, resolve
from jaxinfer.engine.execution.calibration import calibrate
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.execution.runner import Runner, WrongTokenError
from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.engine.scheduling.plan import DecodePlan, Preempted, PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.scheduling.sequence import Sequence, needs_sampler_state
from jaxinfer.kv.manager import Swapped
from jaxinfer.kv.radix import PageKeys
from jaxinfer.kv.store import Copy, Export, Import
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling import SamplingLimits, SlotState
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.fakes import random_model

PAGE, PAGES, ROWS, WIDTH = 16, 40, 6, 6
CONFIG = {"max_num_seqs": ROWS, "page_size": PAGE, "num_pages": PAGES, "max_model_len": 96, "prefill_sizes": (16, 32)}
# The second of two layers has a window of 24 tokens: two cache groups.
MODEL = functools.partial(
    random_model,
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    num_hidden_layers=2,
    use_sliding_window=True,
    sliding_window=24,
    max_window_layers=1,
)
LIMITS = SamplingLimits(max_logprobs=20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=3, seed=0)
PENALISED = dataclasses.replace(GREEDY, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={3: 2.0})
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.95, seed=9)
PROMPT = np.random.default_rng(0).integers(0, 97, 38).tolist()

Rows = list[list[tuple[Any, Any]]]


class Bench:
    """A runner, its tables, and sequences with their own pages."""

    def __init__(self, **changes: Any) -> None:
        model = MODEL()
        engine = resolve(EngineConfig(**{**CONFIG, **changes}), model.cache_spec, max_position=256, itemsize=4)
        self.tables = np.zeros((len(model.cache_spec.windows), ROWS, WIDTH), np.int32)
        prepared = Prepared(model, engine, LIMITS)
        self.executor = LocalExecutor(prepared, make_mesh())
        self.calibration = calibrate(self.executor, prepared, "cpu")
        batches = self.calibration.prefill_batches
        self.runner = Runner(
            self.executor, engine, LIMITS, self.tables, model.config.vocab_size, batches, engine.decode_sizes
        )

    def sampler(self) -> SlotState:
        """Return a copy of the sampler state of all slots."""
        return jax.tree.map(np.array, self.executor.microbatches[0].sampler)

    def sequence(self, slot: int, params: SamplingParams = GREEDY, first_page: int = 0, **of_request: Any) -> Sequence:
        """Return a sequence in ``slot`` with pages from ``first_page`` on, reversed for the second group."""
        request = Request("r", tuple(PROMPT), params, **of_request)
        self.give(slot, first_page)
        return Sequence(
            request,
            0,
            1,
            tokens=array("i", PROMPT),
            keys=PageKeys(b"", PAGE),
            prefill_end=len(PROMPT) - 1,
            final_length=len(PROMPT) + 39,
            slot=slot,
            stateful=needs_sampler_state(request),
        )

    def give(self, slot: int, first_page: int) -> None:
        own = np.arange(first_page, first_page + WIDTH)
        self.tables[:, slot] = own, own[::-1]

    def run(self, **plan: Any) -> Rows:
        return rows(self.step(**plan))

    def step(self, **plan: Any) -> StepResult:
        result = self.runner.read(self.runner.launch(StepPlan(**plan)))
        assert result is not None
        return result

    def start(self, *sequences: Sequence) -> None:
        """Admit sequences and compute their prompts."""
        prefills = [
            PrefillPlan(sequence, Chunk(start, min(sequence.prefill_end - start, 32), 32), False)
            for sequence in sequences
            for start in range(0, sequence.prefill_end, 32)
        ]
        self.step(admitted=list(sequences), prefills=prefills)

    def generate(self, count: int, *sequences: Sequence) -> Rows:
        """Append and return the tokens and logprobs of plain steps, one row per sequence."""
        seen: Rows = [[] for _ in sequences]
        for _ in range(count):
            plans = [DecodePlan(s, s.slot, len(s.tokens) - 1, s.tokens[-1]) for s in sequences]
            for sequence, mine, new in zip(sequences, seen, self.run(decodes=plans), strict=True):
                mine += new
                sequence.tokens.append(new[0][0])
        return seen

    def kept(self, sequence: Sequence) -> list[np.ndarray]:
        """Return keys and values of a sequence in all layers, by group, up to the last token fed."""
        pools, length = self.executor.runtimes[-1].pools, len(sequence.tokens) - 1
        return [
            np.concatenate(np.asarray(pool.data)[self.tables[group, sequence.slot]], axis=2)[:, :, :length]
            for group, pool in enumerate(pools)
        ]


def rows(result: StepResult) -> Rows:
    """Return each row's tokens with their log probabilities, None where none were requested."""
    pairs = zip(result.tokens, result.logprobs, strict=True)
    return [list(zip(tokens, logprobs or [None] * len(tokens), strict=True)) for tokens, logprobs in pairs]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(multi_step=4)


@pytest.fixture(scope="module")
def drafting() -> Bench:
    return Bench(speculative="ngram")


def generated(bench: Bench, params: SamplingParams, count: int, slot: int = 0) -> tuple[Sequence, Rows]:
    sequence = bench.sequence(slot, params)
    bench.start(sequence)
    return sequence, bench.generate(count, sequence)


def test_a_row_has_tokens_and_what_was_asked_for(bench):
    asking, silent = bench.sequence(0), bench.sequence(2, dataclasses.replace(GREEDY, logprobs=None), 8)
    bench.start(asking, silent)
    result = bench.step(decodes=[DecodePlan(silent, 2, 37, PROMPT[-1]), DecodePlan(asking, 0, 37, PROMPT[-1])])
    assert result.tokens[0] == result.tokens[1]
    assert result.logprobs[0] == ()
    (position,) = result.logprobs[1]
    assert position.chosen == position.top[0]
    assert position.chosen.token_id == result.tokens[1][0]
    assert [best.rank for best in position.top] == [1, 2, 3]
    alone = bench.step(decodes=[DecodePlan(silent, 2, 37, PROMPT[-1])])
    assert (alone.tokens, alone.logprobs) == (result.tokens[:1], [()])


def test_prompt_logprobs_come_with_their_tokens(bench):
    sequence = bench.sequence(0, dataclasses.replace(GREEDY, prompt_logprobs=2))
    plan = PrefillPlan(sequence, Chunk(32, 5, 32), True)
    result = bench.step(admitted=[sequence], prefills=[plan])
    (positions,) = result.prompt_logprobs
    assert [position.chosen.token_id for position in positions] == PROMPT[33:38]
    assert all(len(position.top) == 2 for position in positions)


# ---- several steps in one call


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
def test_several_steps_at_once_are_single_steps(bench, params):
    assert bench.calibration.multi_step == 4
    want, singly = generated(bench, params, 5)
    bits = bench.kept(want)
    sequence = bench.sequence(3, params, 10)
    bench.start(sequence)
    (first,) = bench.run(decodes=[DecodePlan(sequence, 3, 37, PROMPT[-1])], steps=1)
    (more,) = bench.run(decodes=[DecodePlan(sequence, 3, 38, -1)], steps=3)
    token = more[-1][0]  # a run may stop early: the host feeds the token after it
    (last,) = bench.run(decodes=[DecodePlan(sequence, 3, 41, token)], steps=1)
    assert [first + more + last] == singly
    sequence.tokens = want.tokens
    assert equal(bench.kept(sequence), bits)


def test_steps_end_where_a_row_ends(bench):
    """Steps end at a row's own stop ids only, and not before its min_tokens."""
    _, ((*tokens,),) = generated(bench, SAMPLED, 4)
    stop = tokens[1][0]
    assert stop != tokens[0][0]
    never = {token for token, _ in tokens}
    for stops, ran in [({stop}, 2), ({96} - never, 4), (set(), 4)]:
        one = bench.sequence(1, SAMPLED, 8, stop_token_ids=frozenset(stops))
        other = bench.sequence(2, SAMPLED, 16)
        bench.start(one, other)
        plans = [DecodePlan(s, s.slot, 37, PROMPT[-1]) for s in (other, one)]
        result = bench.run(decodes=plans, steps=4)
        assert [len(row) for row in result] == [ran, ran]
        assert result[0] == list(tokens[:ran])


def test_what_is_generated_counts_within_a_run_of_steps(bench):
    """A run of steps counts its own tokens: stop ids are barred for two tokens; after that most tokens are stop ids."""
    params, stops = dataclasses.replace(SAMPLED, min_tokens=2), frozenset(range(30, 90))
    want = bench.sequence(0, params, stop_token_ids=stops)
    bench.start(want)
    (singly,) = bench.generate(3, want)
    assert [token in stops for token, _ in singly] == [False, False, True]
    sequence = bench.sequence(1, params, 8, stop_token_ids=stops)
    bench.start(sequence)
    assert bench.run(decodes=[DecodePlan(sequence, 1, 37, PROMPT[-1])], steps=4) == [singly]


# ---- rows that verify drafts


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, dataclasses.replace(SAMPLED, min_tokens=30)])
def test_rows_of_one_sequence_are_single_steps(drafting, params):
    stops = {"stop_token_ids": frozenset(range(50))} if params.min_tokens else {}
    want = drafting.sequence(0, params, **stops)
    other = drafting.sequence(1, PENALISED, 8)
    drafting.start(want, other)
    singly = drafting.generate(4, want, other)
    bits = drafting.kept(want)

    sequence, other = drafting.sequence(4, params, 16, **stops), drafting.sequence(1, PENALISED, 8)
    drafting.start(sequence, other)
    drafts = [DecodePlan(sequence, row, 37 + i, want.tokens[37 + i]) for i, row in enumerate((4, 0, 5, 2))]
    together = drafting.run(decodes=[*drafts, DecodePlan(other, 1, 37, PROMPT[-1])])
    assert [row[0] for row in together[:4]] == singly[0]
    assert together[4] == singly[1][:1]
    sequence.tokens = want.tokens
    assert equal(drafting.kept(sequence), bits)


def test_a_borrowed_row_leaves_the_slot_as_it_is(drafting):
    """The sequence of the slot pauses for a step and then continues as if its row had not been borrowed."""
    owner = drafting.sequence(2, PENALISED)
    drafting.start(owner)
    want = drafting.generate(6, owner)

    owner, guest = drafting.sequence(2, PENALISED), drafting.sequence(0, SAMPLED, 8)
    drafting.start(owner, guest)
    first = drafting.generate(3, owner)
    (microbatch,) = drafting.executor.microbatches
    before, last = drafting.sampler(), np.asarray(microbatch.last_tokens)
    rows = [DecodePlan(guest, 0, 37, PROMPT[-1]), DecodePlan(guest, 2, 38, 5)]
    drafting.run(decodes=rows)
    after = drafting.sampler()
    assert equal([x[2] for x in before], [x[2] for x in after])
    assert last[2] == np.asarray(microbatch.last_tokens)[2]
    assert not equal([x[0] for x in before], [x[0] for x in after])
    assert [first[0] + drafting.generate(3, owner)[0]] == want


# ---- page transfers


@pytest.mark.parametrize("params", [GREEDY, PENALISED])
def test_a_sequence_goes_on_after_a_swap(bench, params):
    """Other sequences use its pages and its slot meanwhile, and it returns to different ones."""
    _, want = generated(bench, params, 9)
    sequence, _ = generated(bench, params, 4)
    exports = [Export(tuple(map(int, bench.tables[:, 0, page])), 5 + page) for page in range(3)]
    sequence.swapped = Swapped((5, 6, 7), (0, 0), 0)
    other = bench.sequence(0, PENALISED, 0)
    bench.step(exports=exports, preempted=[Preempted(sequence, 0)], admitted=[other])
    assert (sequence.sampler_state is not None) is sequence.stateful
    bench.start(other)
    bench.generate(3, other)

    sequence.slot, sequence.swapped = 5, None
    bench.give(5, 20)
    imports = [Import(5 + page, tuple(map(int, bench.tables[:, 5, page]))) for page in range(3)]
    plans = [DecodePlan(sequence, 5, 41, sequence.tokens[-1])]
    (first,) = bench.run(imports=imports, admitted=[sequence], decodes=plans)
    sequence.tokens.append(first[0][0])
    assert sequence.sampler_state is None
    assert [first + bench.generate(4, sequence)[0]] == [want[0][4:]]


def test_a_page_comes_back_in_the_step_that_sent_it(bench):
    sequence, _ = generated(bench, GREEDY, 4)
    want = bench.generate(3, sequence)
    sequence.tokens = sequence.tokens[:-3]
    page, place = int(bench.tables[0, 0, 0]), int(bench.tables[1, 0, 0])
    bench.step(exports=[Export((page, place), 1)], imports=[Import(1, (30, 31))])
    bench.tables[:, 0, 0] = 30, 31
    assert bench.generate(3, sequence) == want


def test_nobody_waits_for_pages_that_move(bench):
    """Steps that export pages and steps that import them return before earlier work of the device is done."""
    stage = bench.executor.runtimes[-1]

    @functools.partial(jax.jit, donate_argnums=0)
    def busy(pools: Any, turns: jax.Array) -> tuple[Any, jax.Array]:
        x = jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), jnp.eye(256))
        return jax.tree.map(lambda pool: jnp.where(x[0, 0] > 2, 0, pool), pools), x

    for turns in (2**number for number in range(6, 14)):
        stage.pools, done = busy(stage.pools, turns)
        bench.step(exports=[Export((page, page), page) for page in range(7)])
        bench.step(imports=[Import(page, (page, page)) for page in range(7)])
        if not done.is_ready():
            return
    pytest.fail("a step waited for pages")


def test_more_pages_than_a_call_moves(bench):
    pools, rng = bench.executor.runtimes[-1].pools, np.random.default_rng(1)
    data = [rng.standard_normal(pool.data.shape, np.float32) for pool in pools]
    spoiled = [pool._replace(data=new.copy()) for pool, new in zip(pools, data, strict=True)]
    bench.executor.runtimes[-1].pools = jax.device_put(spoiled, bench.executor.runtimes[-1].replicated)
    bench.step(exports=[Export((page, page + 1 if page % 2 else -1), page) for page in range(11)])
    bench.step(copies=[Copy((page, page), (page + 20, page + 21 if page % 2 else -1)) for page in range(11)])
    want = [new.copy() for new in data]
    for page in range(11):
        for layer in range(2) if page % 2 else range(1):
            want[layer][page + 20 + layer] = data[layer][page]
    assert equal([pool.data for pool in bench.executor.runtimes[-1].pools], want)
    bench.step(imports=[Import(page, (39 - page, 10 + page if page % 2 else -1)) for page in range(3)])
    for page in range(3):
        want[0][39 - page] = data[0][page]
    want[1][11] = data[1][2]
    assert equal([pool.data for pool in bench.executor.runtimes[-1].pools], want)


def test_a_copied_page_goes_on_as_its_own(bench):
    """The second sequence shares two full pages and copies the third, at 37 tokens."""
    first, want = generated(bench, GREEDY, 6)
    bits = bench.kept(first)
    second = bench.sequence(1, GREEDY, 12)
    bench.tables[:, 1, :2] = bench.tables[:, 0, :2]
    source, target = (tuple(map(int, bench.tables[:, slot, 2])) for slot in (0, 1))
    (start,) = bench.run(
        copies=[Copy(source, target)], admitted=[second], decodes=[DecodePlan(second, 1, 37, PROMPT[-1])]
    )
    second.tokens.append(start[0][0])
    assert [start + bench.generate(5, second)[0]] == want
    assert equal(bench.kept(first), bits)
    assert equal(bench.kept(second), bits)


def test_a_chunk_goes_on_within_a_page(bench):
    """A prompt resumed at any token, in the program that was due, is bitwise identical to the whole prompt."""
    assert bench.calibration.exact_resume
    whole, want = generated(bench, GREEDY, 2)
    bits = bench.kept(whole)
    for at, end in itertools.product((1, 15, 17, 31), (32,)):
        sequence = bench.sequence(1, GREEDY, 12)
        chunks = [Chunk(0, at, 32), Chunk(at, end - at, 32), Chunk(32, 5, 32)]
        for chunk in chunks:
            bench.step(admitted=[sequence], prefills=[PrefillPlan(sequence, chunk, False)])
        assert bench.generate(2, sequence) == want
        assert equal(bench.kept(sequence), bits)


def test_nothing_of_this_compiles(bench, drafting):
    with count_compilations() as seen:
        test_several_steps_at_once_are_single_steps(bench, PENALISED)
        test_a_sequence_goes_on_after_a_swap(bench, PENALISED)
        test_a_copied_page_goes_on_as_its_own(bench)
        test_rows_of_one_sequence_are_single_steps(drafting, SAMPLED)
    assert seen.count == 0


def test_costs_are_measured(bench):
    costs = bench.calibration.costs
    assert 0 < costs.prefill_token < costs.decode_step < 1
    assert 0 < costs.swap_page < 1


@pytest.mark.parametrize(
    ("slot", "arrival", "position"),
    [(1, 1, len(PROMPT)), (0, 2, len(PROMPT)), (0, 1, len(PROMPT) + 1)],
    ids=["another slot", "another sequence", "another position"],
)
def test_a_token_is_asked_of_the_slot_that_sampled_it(bench, slot, arrival, position):
    sequence = bench.sequence(0)
    bench.start(sequence)
    bench.run(decodes=[DecodePlan(sequence, 0, len(PROMPT) - 1, PROMPT[-1])])
    asking = dataclasses.replace(sequence, slot=slot, arrival=arrival)
    with pytest.raises(WrongTokenError, match=rf"of sequence {arrival} at position {position}; its slot sampled"):
        bench.run(decodes=[DecodePlan(asking, slot, position, -1)])
    bench.run(decodes=[DecodePlan(sequence, 0, len(PROMPT), -1)])
