"""Draft trees in a real engine: tokens, logprobs and page bytes equal those of a run without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, EngineConfigError, check, resolve
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution import commands
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.kv.transfer import TRANSFERS
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.spec import Bounded, DeviceDrafter, Drafted, Tree, register
from jaxinfer.types import CacheSpec, LayerSpec, PositionLogprobs, Request
from tests.fakes import random_model
from tests.spec.trees import random_tree

VOCAB, DEPTH, PATHS, PAGE = 97, 3, 3, 16
SETTINGS: dict[str, Any] = {
    "max_num_seqs": PATHS * (1 + DEPTH),
    "max_model_len": 128,
    "page_size": PAGE,
    "prefill_sizes": (16, 64),
    "num_pages": 120,
}
TREES: dict[str, Any] = {
    "speculative": "forest",
    "speculative_tree": PATHS,
    "num_speculative_tokens": DEPTH,
    "speculative_adaptive": False,
}
Found = dict[tuple[str, int], tuple[list[int], list[PositionLogprobs]]]  # by request and sample

register("forest", lambda config: DeviceDrafter(1))  # replaced by `Forest`


# ---- drafters


def wrong(truth: list[int], by: int) -> list[int]:
    return [(token + by) % VOCAB for token in truth]


def in_a_branch(rng: random.Random, truth: list[int]) -> Tree:
    """Return a tree in which the true path is not the main path and leaves it early or late."""
    shared = rng.randrange(len(truth))
    others = [truth[:shared] + wrong(truth[shared:], by) for by in (1, 2)]
    others.insert(rng.choice((1, 2)), truth)
    return Tree.of_paths(others)


def twins(rng: random.Random, truth: list[int]) -> Tree:
    """Return siblings of the same token with different continuations."""
    paths = [truth[:1] + wrong(truth[1:], 1), truth[:2] + wrong(truth[2:], 1), truth]
    tokens, parents = list[int](), list[int]()
    for path in paths:
        parents += [-1, *range(len(tokens), len(tokens) + len(path) - 1)]
        tokens += path
    return Tree(np.array(tokens, np.int32), np.array(parents, np.int32))


def wild(rng: random.Random, truth: list[int]) -> Tree:
    """Return a tree that is too deep and has invalid tokens."""
    deep = [*wrong(truth, 5), *truth, *truth]
    return Tree.of_paths([deep, [truth[0], -1, *truth[1:]], [VOCAB, *truth], [*truth, *deep]])


DRAFTERS: dict[str, Callable[[random.Random, list[int]], Tree]] = {
    "always wrong": lambda rng, truth: Tree.of_paths([wrong(truth, by) for by in (1, 2, 3)]),
    "right in a branch": in_a_branch,
    "twins": twins,
    "wild": wild,
    "random": lambda rng, truth: random_tree(rng, truth, DEPTH, VOCAB),
}


class Forest:
    """A drafter of trees around the tokens of a run without drafts."""

    def __init__(self, said: Sequence[list[int]], kind: str) -> None:
        self._said, self._kind = said, kind

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        known = sequence.tokens.tolist()
        truth = next((said[len(known) :] for said in self._said if said[: len(known)] == known), [])
        return DRAFTERS[self._kind](random.Random(f"{known}"), [*truth, *range(DEPTH)][:DEPTH])

    def end(self, sequence: Drafted) -> None: ...
    def reset(self) -> None: ...


# ---- requests


def request(name: str, length: int, **changes: Any) -> Request:
    own = {key: changes.pop(key) for key in ("stop_token_ids", "bad_words_ids") if key in changes}
    prompt = tuple(np.random.default_rng(length % 3).integers(VOCAB, size=length).tolist())
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "seed": length, "logprobs": 2, **changes})
    return Request(name, prompt, params, frozenset(own.get("stop_token_ids", ())), own.get("bad_words_ids", ()))


def make_requests(plain: Engine) -> list[Request]:
    """Return requests with every parameter that depends on earlier tokens. Barred tokens would be generated."""
    greedy, sampled = request("greedy", 20), request("sampled", 31, temperature=1.0, top_p=0.95)
    said = {name: tokens for (name, _), (tokens, _) in run(plain, [greedy, sampled]).items()}
    words = [(said["greedy"][2],), *(tuple(said["greedy"][at : at + 2]) for at in (5, 7, 9))]
    stops = said["sampled"][1:4]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    return [
        greedy,
        sampled,
        request("penalties", 16, **penalties),
        request("sampled with penalties", 50, temperature=0.8, **penalties),
        request("bad words", 20, bad_words_ids=tuple(words)),
        request("stops", 31, temperature=1.0, top_p=0.95, stop_token_ids=stops),
        request("least tokens", 31, temperature=1.0, top_p=0.95, stop_token_ids=stops, min_tokens=12),
        request("logprobs", 40, temperature=0.5, logprobs=5),
        request("two", 23, n=2, temperature=1.0, frequency_penalty=0.5),
    ]


def run(engine: Engine, requests: list[Request]) -> Found:
    """Run all requests in one batch; afterwards no page is held."""
    found: Found = {(each.request_id, index): ([], []) for each in requests for index in range(each.params.n)}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for delta in engine.read(engine.launch()):
            tokens, logprobs = found[delta.request_id, delta.index]
            tokens += delta.token_ids
            logprobs += delta.logprobs
        engine.check()
    usage = engine.stats().kv
    assert usage.held == 0
    return found


def one_by_one(engine: Engine, requests: list[Request]) -> Found:
    found: Found = {}
    for each in requests:
        found |= run(engine, [each])
        engine.reset_prefix_cache()
    return found


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine_of()


def engine_of(**changes: Any) -> Engine:
    engine = LLM(random_model(), **{**SETTINGS, **changes}).engine
    assert isinstance(engine, Engine)
    assert engine.config.rows == SETTINGS["max_num_seqs"]
    return engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> tuple[list[Request], Found, list[list[int]]]:
    """Return the requests, their results without drafts, and the full sequences with prompts."""
    requests = make_requests(plain)
    plain.reset_prefix_cache()
    found = one_by_one(plain, requests)
    prompts = {each.request_id: list(each.prompt_token_ids) for each in requests}
    return requests, found, [prompts[name] + tokens for (name, _), (tokens, _) in found.items()]


@pytest.fixture(scope="module", params=["roomy", "tight"])
def trees(request: pytest.FixtureRequest) -> Engine:
    """Return an engine that drafts, with pages for all or for a few sequences."""
    return engine_of(**TREES, **({} if request.param == "roomy" else {"num_pages": 14}))


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the slots of winning branches."""
    adopt, slots = SequencePages.adopt, list[int]()

    def noted(self: SequencePages, sequence: Any, slot: int, length: int) -> None:
        slots.append(slot)
        adopt(self, sequence, slot, length)

    monkeypatch.setattr(SequencePages, "adopt", noted)
    return slots


# ---- bitwise identity


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_whatever_is_proposed_tokens_and_logprobs_stay(
    kind: str,
    swap: bool,
    trees: Engine,
    expected: tuple[list[Request], Found, list[list[int]]],
    adopted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, wanted, said = expected
    tight = trees.config.num_pages < SETTINGS["num_pages"]
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: swap)
    trees._scheduler._drafts._drafter = Bounded(Forest(said, kind), VOCAB)
    trees.reset_prefix_cache()
    before = trees.stats()
    assert run(trees, requests) == wanted, "together"
    after = trees.stats()
    if tight:
        name = "swap" if swap else "recompute"
        assert after.preemptions.get(name, 0) > before.preemptions.get(name, 0)
    assert after.replay_mismatches == 0
    if not tight and not swap:
        trees.reset_prefix_cache()
        assert one_by_one(trees, requests) == wanted, "alone"
        cold = trees.stats().prefix_hits
        assert run(trees, requests[:1]) == run(trees, requests[:1]) == dict(list(wanted.items())[:1])
        assert trees.stats().prefix_hits > cold
    stats = trees.stats()
    assert stats.compilations == before.compilations, "nothing compiles while serving"
    assert stats.draft_tokens > before.draft_tokens
    assert (stats.draft_accepted > before.draft_accepted) == (kind != "always wrong")
    room = not tight and not swap  # else a branch may lack a page or a row
    assert bool(adopted) == (kind != "always wrong") or not room


def test_a_branch_that_wins_has_the_bytes_of_a_run_without_drafts(
    plain: Engine, expected: tuple[list[Request], Found, list[list[int]]], adopted: list[int]
) -> None:
    """The bytes match for every token after the prompt: the main path is always wrong."""
    requests, _, said = expected
    engine = engine_of(**TREES)
    for each in (*requests[:3], requests[7]):
        engine._scheduler._drafts._drafter = Bounded(Forest(said, "right in a branch"), VOCAB)
        count = len(adopted)
        tokens, bytes_ = bytes_at_the_end(engine, each)
        assert len(adopted) - count >= 5
        tokens_plain, bytes_plain = bytes_at_the_end(plain, each)
        few = min(len(tokens), len(tokens_plain)) - 1
        assert few > len(each.prompt_token_ids) + 15
        assert tokens[:few] == tokens_plain[:few]
        np.testing.assert_array_equal(bytes_[:few], bytes_plain[:few])


def bytes_at_the_end(engine: Engine, request: Request) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a sequence shortly before its end, and the bytes of its pages."""
    engine.add(request)
    (sequence,) = engine._scheduler._requests[request.request_id]
    while sequence.generated < 20:
        engine.read(engine.launch())
    while engine._pending:
        engine.read(False)
    table = engine._kv.tables[:, sequence.slot, : engine._kv.pages_for(len(sequence.tokens) - 1)]
    source = np.zeros((len(table), TRANSFERS[0]), np.int32)
    source[:, : table.shape[1]] = table
    found = np.asarray(engine._executor.run(commands.ReadPages(source)))[: table.shape[1]]
    tokens = sequence.tokens.tolist()
    engine.abort(request.request_id)
    engine.check()
    return tokens, found.reshape(table.shape[1] * PAGE, -1)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_the_drafters_of_the_package(drafter: str, plain: Engine, adopted: list[int]) -> None:
    engine = engine_of(**{**TREES, "speculative": drafter})
    rng = np.random.default_rng(0)
    for number in range(4):
        prompt = tuple(np.tile(rng.integers(6, size=12), 3).tolist())
        params = SamplingParams(temperature=1.0, top_k=6, allowed_token_ids=list(range(6)), max_tokens=50, seed=number)
        asked = [Request(str(number), prompt, params, frozenset())]
        assert run(engine, asked) == run(plain, asked)
    assert adopted


# ---- settings


def test_a_model_drafts_chains() -> None:
    with pytest.raises(
        EngineConfigError, match="speculative_tree = 2 and speculative = draft_model exclude each other"
    ):
        check(EngineConfig(speculative="draft_model", speculative_tree=2))
    with pytest.raises(EngineConfigError, match="speculative_tree = 0 must be at least 1"):
        check(EngineConfig(speculative="ngram", speculative_tree=0))


@pytest.mark.parametrize(
    ("changes", "rows", "branches"),
    [
        ({"speculative": None, "speculative_tree": 3}, 2, 0),
        ({"speculative_tree": 1}, 5, 0),
        ({"speculative_tree": 2}, 10, 2),
        ({"speculative_tree": 4}, 20, 6),
        ({"speculative_tree": 4, "max_num_seqs": 8}, 20, 10),
    ],
)
def test_one_sequence_has_rows_for_its_tree(changes: dict[str, Any], rows: int, branches: int) -> None:
    config = EngineConfig(**{"speculative": "ngram", "max_num_seqs": 2, **changes})
    engine = resolve(config, CacheSpec((LayerSpec(),), kv_heads=1, head_dim=8), max_position=128, itemsize=4)
    assert (engine.rows, engine.branches) == (rows, branches)
