"""A leader engine: its followers hold bitwise identical device state after every kind of command."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.distributed.leader import HostInputTokens, LeaderExecutor, _digests, follow, report_usage
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution import calibration
from jaxinfer.engine.execution.calibration import measure_costs
from jaxinfer.engine.execution.commands import COMMANDS, Decode, DecodeBatch, SaveSlot
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.scheduling.pages import Costs
from jaxinfer.models.model import Model
from jaxinfer.parallel.group import Group, GroupError
from jaxinfer.parallel.mesh import mesh_for
from jaxinfer.sampling import Sampled
from jaxinfer.types import Request
from tests.fakes import mixed_params, random_head, random_model
from tests.parallel.test_group import SOON, group_of

# Few pages, so that sequences are swapped out and cached prefixes are moved to the host.
SMALL = EngineConfig(
    max_model_len=64,
    max_num_seqs=3,
    page_size=8,
    num_pages=12,
    prefill_sizes=(16,),
    max_prefill_rows=1,
    multi_step=2,
    max_logprobs=3,
    seed=0,
)


def request(number: int) -> Request:
    prompt = tuple((7 * number * place + place) % 97 for place in range(5 + 3 * (number % 7)))
    params = dataclasses.replace(mixed_params(number), max_tokens=24, min_tokens=0, stop_token_ids=())
    return Request(f"r{number}", (1, 2, 3, *prompt), params)


def run(engine: Engine, count: int = 12) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for number in range(count):
        engine.add(request(number))
    while engine.has_work:
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return found


@dataclasses.dataclass
class Pair:
    """A leader engine and the executor of the one follower in its group."""

    engine: Engine
    group: Group
    follower: LocalExecutor
    member: Group
    called: list[str]

    def until_done(self) -> None:
        """Wait until the follower has run all commands sent."""
        for _ in range(int(SOON / 0.05)):
            if self.member._ledger.done == self.group.sent:
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"{self.member._ledger.done} of {self.group.sent}")


OF_DRAFTS, OF_HEADS, OF_ADAPTERS = {"Draft", "DraftPrefill"}, {"HeadDraft"}, {"LoadLora"}
OF_STATES = {"ReadStates"}
OF_IMAGES = {"Encode"}


@pytest.fixture(scope="module")
def pair():
    with paired(random_model(num_hidden_layers=1), SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def drafting():
    """A `Pair` whose engine drafts with a draft model."""
    model = random_model(num_hidden_layers=1)
    drafts = {"speculative": "draft_model", "speculative_adaptive": False, "num_speculative_tokens": 2}
    config = dataclasses.replace(SMALL, multi_step=1, **drafts)
    with paired(model.replace(draft=random_model(seed=1, num_hidden_layers=1)), config) as made:
        yield made


@contextlib.contextmanager
def paired(model: Model, config: EngineConfig) -> Iterator[Pair]:
    mesh, called = mesh_for(config), list[str]()
    follower = LocalExecutor(prepare(model, config, "cpu", mesh), mesh)
    with group_of(timeout=60.0) as (members, ends):
        leader, member = members
        take = member.calls

        def calls():
            for frame in take():
                called.append(frame.kind)
                yield frame

        member.calls = calls
        threading.Thread(target=follow, args=({0: follower}, member), daemon=True).start()
        with pytest.MonkeyPatch.context() as patch:
            # Measured costs may favour recompute, so that nothing would be swapped.
            patch.setattr(calibration, "measure_costs", lambda *given: (measure_costs(*given), Costs())[1])
            make = functools.partial(LeaderExecutor, leader, 0, [0, 1])
            engine = Engine(prepare(model, config, "cpu"), make_executor=make)
        yield Pair(engine, leader, follower, member, called)
        assert not ends.reasons


def same(one: object, other: object) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_what_follows_has_the_same_bits(pair):
    check_bits(pair)
    assert set(pair.called) == set(COMMANDS) - OF_DRAFTS - OF_HEADS - OF_ADAPTERS - OF_STATES - OF_IMAGES


def test_what_follows_drafts_the_same(drafting, pair):
    assert check_bits(drafting) == run(pair.engine)
    assert set(drafting.called) >= OF_DRAFTS


@pytest.mark.parametrize(("method", "paths"), [("medusa", 1), ("eagle", 2)])
def test_what_follows_has_the_same_heads(method, paths, pair):
    model = random_model(num_hidden_layers=1)
    drafts = {"speculative": method, "speculative_tree": paths, "num_speculative_tokens": 2}
    config = dataclasses.replace(SMALL, multi_step=1, speculative_adaptive=False, **drafts)
    with paired(model.replace(draft=random_head(method, model)), config) as heads:
        assert check_bits(heads) == run(pair.engine)
        assert set(heads.called) >= OF_HEADS


def check_bits(pair: Pair) -> dict[tuple[str, int], list[int]]:
    """Run requests, compare all device state of leader and follower, and return the generated tokens."""
    found = run(pair.engine)
    assert sum(map(len, found.values())) > 200
    pair.until_done()
    leader, follower = pair.engine._executor, pair.follower
    assert isinstance(leader, LeaderExecutor)
    leader = leader.local
    runtimes = [*leader.runtimes, *leader.drafting], [*follower.runtimes, *follower.drafting]
    for mine, theirs in zip(*runtimes, strict=True):
        assert same(mine.pools, theirs.pools)
        assert mine.host._pages.keys() == theirs.host._pages.keys()
        assert same(mine.host._pages, theirs.host._pages)
    for mine, theirs in zip(leader.microbatches, follower.microbatches, strict=True):
        assert same((mine.slots, mine.last_tokens, mine.sampler), (theirs.slots, theirs.last_tokens, theirs.sampler))
        assert same(mine.drafted, theirs.drafted)
    assert mine_and_theirs_snapshots(leader, follower)
    return found


def mine_and_theirs_snapshots(leader: LocalExecutor, follower: LocalExecutor) -> bool:
    return leader._snapshots.keys() == follower._snapshots.keys() and same(leader._snapshots, follower._snapshots)


def test_memory_of_both_is_reported(pair):
    assert [device.process for device in pair.engine.usage().devices] == [0]
    reporting = threading.Thread(target=report_usage, args=({0: pair.follower}, pair.member, 0.1), daemon=True)
    reporting.start()
    for _ in range(int(SOON / 0.01)):
        found = pair.engine.usage()
        if len(found.devices) == 2:  # the same device: both are in this process
            own, other = found.devices
            assert own.parts["weights"] == other.parts["weights"] > 0
            assert own.busy_seconds == other.busy_seconds
            return
        threading.Event().wait(0.01)
    raise AssertionError("no report came")


def test_a_snapshot_to_which_nobody_refers_is_dropped_by_all(pair):
    leader, snapshots = pair.engine._executor.local, pair.engine._runner._snapshots
    kept = snapshots.new()
    pair.engine._executor.run(SaveSlot(0, kept.number))
    number = kept.number
    pair.until_done()
    assert number in leader._snapshots
    assert number in pair.follower._snapshots
    del kept
    run(pair.engine, 1)
    pair.until_done()
    assert number not in leader._snapshots
    assert number not in pair.follower._snapshots


def test_nothing_is_sent_where_nothing_is_to_do(pair):
    sent = pair.group.sent
    pair.engine.step()
    assert pair.group.sent == sent


class Promised:
    """Tokens of a step in flight, which records whether the host reads and thus waits for them."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.read = tokens, False

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.read = True
        return np.array(self.tokens, dtype)


def rows(tokens: list[int], positions: list[int], owners: list[int] | None = None) -> DecodeBatch:
    of = None if owners is None else np.int32(owners)
    return DecodeBatch(np.int32(tokens), np.int32(positions), np.int32(positions), np.zeros((1, 3, 2), np.int32), of)


def test_the_host_feeds_what_slots_sampled_last():
    feed = HostInputTokens(3)
    first, second, third = Promised(7, 8, 9), Promised(17, 18, 19), Promised(27, 28, 29)
    feed.sampled(rows([1, 2, 3], [4, 4, -1]), first)
    feed.sampled(rows([-1, 5, 6], [5, 9, 9], [0, 0, 2]), second)  # row 1 is borrowed by slot 0
    given = rows([5, 5, 5], [6, 6, 6])
    np.testing.assert_array_equal(feed.with_tokens(given).tokens, given.tokens)
    np.testing.assert_array_equal(feed.with_tokens(rows([-1, 5, -1], [-1, 6, -1])).tokens, [0, 5, 0])
    assert [each.read for each in (first, second)] == [False] * 2, "nobody waits for what nobody needs"
    np.testing.assert_array_equal(feed.with_tokens(rows([-1, -1, -1], [6, 6, 6])).tokens, [17, 8, 19])
    feed.sampled(rows([-1, -1, -1], [-1, -1, 6]), third)
    np.testing.assert_array_equal(feed.with_tokens(rows([-1, -1, -1], [7, 7, 7])).tokens, [17, 8, 29])


def test_masks_reach_every_stage(monkeypatch):
    """A leader whose first stage is fed by the host sends all that a step has."""
    leader, sent = LeaderExecutor.__new__(LeaderExecutor), list[Decode]()
    leader._host_tokens = [HostInputTokens(3)]

    def answered(command):
        sent.append(command)
        return Sampled(np.zeros(3, np.int32), None)

    monkeypatch.setattr(leader, "_answered", answered)
    masks = np.ones((3, 4), np.int32)
    leader.run(Decode(0, rows([1, 2, 3], [4, 4, -1]), masks))
    assert sent[0].masks is masks


def test_digests_tell_slots_apart():
    pages = np.zeros((2, 3, 40), np.uint8)
    pages[1, 2, 39] = 1
    found = _digests(pages)
    assert found.shape == (2, 3, 4)
    assert len({slot.tobytes() for slot in found.reshape(6, 4)}) == 2
    assert (found[1, 2] != found[0, 0]).any()


@pytest.mark.parametrize(
    ("name", "fields", "match"),
    [
        ("__init__", {}, "process 0 calls __init__"),
        ("SaveSlot", {"slot": 0}, "another version of jaxinfer: it sent what is no SaveSlot: its fields are slot"),
        ("DropSnapshots", {"snapshots": "all"}, "no DropSnapshots: 'all' is no value"),
    ],
)
def test_a_call_that_is_not_known_is_refused(pair, name, fields, match):
    with group_of() as (members, _):
        members[0].call(name, {"replica": 0, "answers": [], "fields": fields}, [])
        with pytest.raises(GroupError, match=match):
            follow({0: pair.follower}, members[1])
