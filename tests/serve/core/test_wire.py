"""Tests of the wire format: decoding returns what was encoded."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig
from jaxinfer.engine.scheduling.stats import EngineStats, Histogram
from jaxinfer.kv.manager import KVUsage
from jaxinfer.lora.usage import LoRAUsage
from jaxinfer.protos.internal import core_pb2 as pb
from jaxinfer.sampling_params import RequestError, SamplingParams, Speculation, StructuredOutputs
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.settings import CoreSettings
from jaxinfer.serve.settings import ServeConfig, ServeConfigError
from jaxinfer.types import FinishReason, LoRARef, PositionLogprobs, Request, SequenceDelta, Thinking, TokenLogprob

# Run-time checks of signatures look at random elements of lists.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
few = settings(max_examples=40, deadline=None)

ids = st.integers(0, 2**31 - 1)
id_lists = st.lists(ids, max_size=5).map(tuple)
counts = st.integers(0, 2**62)
text = st.text(max_size=20)
words = st.none() | st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple)


def through[M](message: M) -> M:
    """Return the message after serialization and parsing."""
    return type(message).FromString(message.SerializeToString())


some_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 1024),
    temperature=st.floats(0, 1e300),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**40),
    min_p=st.floats(0, 1),
    top_n_sigma=st.floats(-1, 1e300),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 1e300, exclude_min=True),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=4),
    bad_words=words,
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1000, 2**40),
    min_tokens=st.integers(0, 1000),
    stop=words,
    stop_token_ids=st.none() | id_lists,
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
    speculation=st.none()
    | st.builds(Speculation, enabled=st.booleans(), max_tokens=st.none() | st.integers(0, 2**31 - 1))
    | st.builds(Speculation, max_tokens=st.none() | st.integers(1, 2**31 - 1), acceptance=st.just("typical")),
    structured_outputs=st.none()
    | st.builds(StructuredOutputs, json=st.sampled_from(['{"type": "null"}', "{}"]))
    | st.builds(StructuredOutputs, json_object=st.just(True))
    | st.builds(StructuredOutputs, regex=some_text)
    | st.builds(StructuredOutputs, choice=st.lists(some_text, min_size=1, max_size=3))
    | st.builds(StructuredOutputs, grammar=some_text, enable_in_reasoning=st.booleans())
    | st.builds(StructuredOutputs, structural_tag=st.just("{}")),
    thinking_token_budget=st.none() | st.integers(0, 2**63 - 1),
)
requests = st.builds(
    Request,
    request_id=text,
    prompt_token_ids=id_lists,
    params=sampling,
    stop_token_ids=st.frozensets(ids, max_size=4),
    bad_words_ids=st.lists(id_lists, max_size=3).map(tuple),
    priority=st.integers(-(2**63), 2**63 - 1),
    tenant=text,
    cache_scope=text,
    cache_salt=text,
    thinking=st.none() | st.builds(Thinking, st.none() | ids, ids, st.booleans()),
    lora=st.none() | st.builds(LoRARef, text, text),
)
candidates = st.builds(TokenLogprob, ids, st.floats(allow_nan=False), st.integers(1, 2**31))
positions = st.builds(PositionLogprobs, candidates, st.lists(candidates, max_size=3).map(tuple))
deltas = st.builds(
    SequenceDelta,
    request_id=st.just("a"),
    index=st.integers(0, 1023),
    token_ids=st.lists(ids, max_size=3),
    logprobs=st.just(()) | st.lists(positions, min_size=1, max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | ids | text,
    prompt_logprobs=st.none() | st.lists(st.none() | positions, max_size=3),
    cached_tokens=st.none() | counts,
    draft_tokens=st.just(0) | counts,
    draft_accepted=st.just(0) | counts,
)
histograms = st.builds(
    Histogram,
    st.lists(st.floats(0, 10), max_size=3).map(tuple),
    st.lists(counts, max_size=4).map(tuple),
    st.floats(0, 1e9),
)
plain = ("running", "compilations", "prompt_tokens", "generated_tokens", "prefix_queries", "prefix_hits")
plain += ("drafts", "draft_tokens", "draft_accepted", "replayed_tokens", "replay_mismatches", "steps")
times = ("time_to_first_token", "inter_token_latency", "e2e_latency", "queue_time", "step_time", "lora_load_time")
by_name = st.dictionaries(text, counts, max_size=3)
stats = st.builds(
    EngineStats,
    **dict.fromkeys(plain, counts),
    **dict.fromkeys(times, histograms),
    waiting=st.dictionaries(text, counts, max_size=2),
    kv=st.none() | st.builds(KVUsage, *[counts] * 6),
    loras=st.none() | st.builds(LoRAUsage, *[counts] * 5, by_name, by_name),
    finished=st.dictionaries(st.sampled_from(FinishReason), counts),
    preemptions=st.dictionaries(text, counts, max_size=2),
    draft_accepted_at=st.lists(counts, max_size=4).map(tuple),
)
values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text, st.lists)
cards = st.builds(
    ModelCard,
    name=text,
    architecture=text,
    dtype=text,
    max_model_len=counts,
    vocab_size=counts,
    eos_token_ids=st.lists(ids, max_size=3),
    defaults=st.dictionaries(text, values, max_size=3),
    engine=st.dictionaries(text, values, max_size=3),
    created=counts,
)


@few
@given(requests)
def test_requests(request):
    assert wire.request_of(through(wire.request_message(request, 0.0)), 0.0) == request


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_ends_of_both_halves_of_the_seeds(seed):
    request = Request("a", (1,), SamplingParams(seed=seed))
    assert wire.request_of(through(wire.request_message(request, 0.0)), 0.0).params.seed == seed


def test_a_deadline_travels_as_the_seconds_that_are_left():
    request = Request("a", (1,), SamplingParams(), deadline=107.5)
    message = through(wire.request_message(request, 100.0))
    assert message.seconds_left == 7.5
    assert wire.request_of(message, 20.0).deadline == 27.5


@pytest.mark.parametrize("changes", [{"priority": 2**63}, {"tenant": "\ud800"}, {"prompt_token_ids": (2**32,)}])
def test_what_cannot_be_sent_is_refused(changes):
    with pytest.raises(RequestError, match="cannot be sent"):
        wire.request_message(dataclasses.replace(Request("a", (1,), SamplingParams()), **changes), 0.0)


def can_be(delta):
    """Return whether a delta is valid: a stop reason requires a finish reason."""
    return delta.finish_reason is not None or delta.stop_reason is None


@few
@given(st.lists(st.tuples(st.integers(1, 2**63), deltas.filter(can_be)), max_size=5))
def test_deltas(numbered):
    message = through(wire.deltas_message(numbered))
    got = [
        (number, SequenceDelta("a", index, [token]))
        for number, index, token in zip(message.streams, message.indexes, message.tokens, strict=True)
    ]
    got += [(delta.stream, wire.delta_of(delta, "a")) for delta in message.others]
    key = repr
    assert sorted(got, key=key) == sorted(numbered, key=key)


def test_a_plain_token_that_drafts_are_told_with_keeps_them():
    delta = SequenceDelta("a", 0, [5], draft_tokens=3, draft_accepted=2)
    (other,) = through(wire.deltas_message([(7, delta)])).others
    assert wire.delta_of(other, "a") == delta


def test_a_plain_delta_is_small():
    message = wire.deltas_message([(number, SequenceDelta("a", 0, [5])) for number in range(100, 200)])
    assert not message.others
    assert message.ByteSize() < 100 * 5


@few
@given(stats)
def test_stats(given_stats):
    assert wire.stats_of(through(wire.stats_message(given_stats))) == given_stats


@few
@given(cards)
def test_cards(card):
    assert wire.card_of(through(wire.card_message(card))) == card


def test_every_field_is_drawn():
    """The strategies draw every field; otherwise a new field that is not sent would have its default on both sides."""
    for strategy, kind in ((sampling, SamplingParams), (deltas, SequenceDelta), (stats, EngineStats)):
        drawn = strategy.wrapped_strategy.kwargs if hasattr(strategy, "wrapped_strategy") else strategy.kwargs
        assert set(drawn) == {field.name for field in dataclasses.fields(kind)}
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) >= {field.name for field in dataclasses.fields(SamplingParams)}


# ---- settings


def test_settings_reach_the_core():
    engine = EngineConfig(max_num_seqs=3, prefill_sizes=(16, 64), seed=2**63 + 1)
    config = ServeConfig(model="demo", dtype="float32", profile_dir="/p", engine=engine)
    told = CoreSettings.of(config, "/s")
    assert CoreSettings.from_json(told.to_json()) == told
    assert (told.socket, told.engine, told.profile_dir) == ("/s", engine, "/p")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object"),
        ('{"model": "m", "socket": "s", "modle": 1}', "modle"),
        ('{"model": "m", "socket": "s", "engine": {"pages": 1}}', "pages"),
        ('{"model": "m", "socket": "s", "engine": 3}', "JSON object"),
        ('{"model": "m"}', "socket"),
    ],
)
def test_settings_that_are_not_known_are_refused(text, reason):
    with pytest.raises(ServeConfigError, match=reason):
        CoreSettings.from_json(text)


def test_settings_are_one_line():
    told = CoreSettings(socket="/s", model="a\nb")
    assert "\n" not in told.to_json()
    assert json.loads(told.to_json())["model"] == "a\nb"
