"""Tests of the messages: each arrives as it was sent, whatever the values of its fields, and nothing else arrives."""

import contextlib
import dataclasses
import enum
import itertools
import types
import typing
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.sampling_params import LOGPROBS_MODES, RequestError, SamplingParams, Speculation, StructuredOutputs
from jaxinfer.serve.core import messages
from jaxinfer.serve.core.messages import MessageError, decode_from_core, decode_request, decode_to_core, encode
from jaxinfer.types import FinishReason, ImageInput, PlacedImage, Request, SequenceDelta
from tests.serve import fake_engine as fake

# Run-time checks of signatures look at random elements of lists.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
few = settings(max_examples=40, deadline=None)
TO_CORE, FROM_CORE = typing.get_args(messages.ToCore), typing.get_args(messages.FromCore)

ids = st.integers(0, 2**31 - 1)
words = st.none() | st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple)
some_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 1024),
    temperature=st.floats(0, 1e300),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**40),
    min_p=st.floats(0, 1),
    top_n_sigma=st.floats(0, 5) | st.just(-1.0),
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
    stop_token_ids=st.none() | st.lists(ids, max_size=5),
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
    forced_token_ids=st.none(),  # as the next one, below: they exclude others
    logprobs_mode=st.just(LOGPROBS_MODES[0]),
    logprob_token_ids=st.none() | st.lists(ids, min_size=1, max_size=4),
    return_entropy=st.booleans(),
    return_sampling_mask=st.booleans(),
    return_routed_experts=st.booleans(),
)
forced = st.builds(
    SamplingParams,
    forced_token_ids=st.lists(ids, min_size=1, max_size=4),
    logprobs_mode=st.sampled_from(LOGPROBS_MODES),
    logprobs=st.none() | st.integers(-1, 20),
)
PLAIN = {
    type(None): st.none(),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    SamplingParams: sampling | forced,
}
PLAIN[ImageInput] = st.builds(
    lambda rows, columns, seed, digest: ImageInput(
        np.random.default_rng(seed).integers(0, 256, (rows * columns, 3), np.uint8), (1, rows, columns), digest
    ),
    *(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), some_text),
)
PLAIN[typing.Any] = st.recursive(st.one_of(*(PLAIN[kind] for kind in (type(None), bool, int, float, str))), st.lists)


def values(kind) -> st.SearchStrategy:
    """Return a strategy of the values of a type: of every field of a record, whatever its default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    match origin or kind:
        case typing.Literal:
            return st.sampled_from(arguments)
        case types.UnionType | typing.Union:
            return st.one_of(*map(values, arguments))
        case known if known in PLAIN:
            return PLAIN[known]
        case container if container is Mapping:
            return st.dictionaries(*map(values, arguments), max_size=3)
        case container if container is tuple and arguments[-1] is not ...:
            return st.tuples(*map(values, arguments))
        case container if container in (tuple, frozenset):
            return st.lists(values(arguments[0]), max_size=3).map(container)
        case container if container in (list, Sequence):
            return st.lists(values(arguments[0]), max_size=3)
        case record if issubclass(record, enum.Enum):
            return st.sampled_from(record)
    return st.builds(
        kind, **{name: values(hint) for name, hint in typing.get_type_hints(kind).items() if name[0] != "_"}
    )


# ---- every message


@pytest.mark.parametrize("kind", TO_CORE + FROM_CORE)
def test_each_message_arrives_as_it_was_sent(kind):
    decode = decode_to_core if kind in TO_CORE else decode_from_core

    @few
    @given(values(kind))
    def check(message):
        arrived = decode(encode(message))
        assert type(arrived) is kind
        assert arrived == message

    check()


def test_every_declared_message_is_of_one_direction():
    assert {*TO_CORE, *FROM_CORE} == set(messages.Message.__subclasses__())
    assert not {*TO_CORE} & {*FROM_CORE}


def test_numbers_of_numpy_and_read_only_mappings_can_be_sent():
    waiting, count = types.MappingProxyType({"slots": np.int64(3)}), np.int64(7)
    stats = dataclasses.replace(fake.FakeEngine().stats(), waiting=waiting, steps=count)
    answer = decode_from_core(encode(messages.Answer(1, stats)))
    assert isinstance(answer.value, EngineStats)
    assert (answer.value.waiting, answer.value.steps) == ({"slots": 3}, 7)
    assert decode_from_core(encode(messages.Pulse(1, np.float64(0.5)))).busy == 0.5


def test_other_objects_cannot_be_sent():
    with pytest.raises(TypeError, match="object"):
        encode(messages.Answer(1, object()))


# ---- what is no message


@pytest.mark.parametrize("decode", [decode_to_core, decode_from_core])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80\x04K\x01.",  # a pickle
        *map(
            encode,
            [
                None,
                {"number": 1},
                [],
                ["Other", 1],
                ["Leave"],
                ["Leave", "1"],
                ["Leave", 1.5],
                ["Leave", None],
                ["Abort", "a", [1]],
                ["Ask", 1, "anything"],
                ["Submit", 1, "text"],
                ["ReleaseLora", ["name"]],
                ["StartupEvent", "sleeping"],
                ["Accepted", 1, "seed"],
                ["Answer", 1, 0.5],
                ["Answer", 1, {"running": 1}],
                ["Deltas", [1], [0], [2], [[1, {"request_id": "a", "index": 0, "token_ids": ["x"]}]]],
                ["Part", 1, 0, [[[1, 2.0], []]]],
                ["KvEvents", 0, False, [["GPU", None, ["text"], b""]]],
            ],
        ),
        b"\x92\xa5Leave" + b"\x91" * 100_000,
        b"\x94\xa6Deltas\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_no_message_is_refused(decode, data):
    with pytest.raises(MessageError):
        decode(data)


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(MessageError):
        decode_from_core(encode(messages.Stop()))
    with pytest.raises(MessageError):
        decode_to_core(encode(messages.Pulse()))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_a_message_or_refused(data):
    whole = encode(data.draw(st.one_of(*map(values, TO_CORE + FROM_CORE))))
    place = data.draw(st.integers(0, len(whole)))
    damaged = whole[:place] + data.draw(st.binary(max_size=3)) + whole[place + data.draw(st.integers(0, 3)) :]
    for decode, kinds in ((decode_to_core, TO_CORE), (decode_from_core, FROM_CORE)):
        with contextlib.suppress(MessageError):
            assert isinstance(decode(damaged), kinds)


# ---- requests


@settings(max_examples=100, deadline=None)
@given(values(Request))
def test_requests(request):
    arrived = decode_request(encode_request(request), 0.0)
    assert type(arrived) is Request
    assert arrived == request


def test_pixels_of_an_image_arrive():
    patches = np.random.default_rng(0).integers(0, 256, (6, 8), np.uint8)
    for pixels in (patches, patches[:, ::2], patches.T):
        image = ImageInput(pixels, (1, 2, 3), "digest", tiles=(2, 1))
        request = Request("a", (1,), SamplingParams(), images=(PlacedImage(0, 1, image),))
        ((start, stop, arrived),) = decode_request(encode_request(request), 0.0).images
        assert (start, stop, arrived.digest, arrived.grid, arrived.tiles) == (0, 1, "digest", (1, 2, 3), (2, 1))
        assert arrived.patches.dtype == np.uint8
        np.testing.assert_array_equal(arrived.patches, pixels)


@pytest.mark.parametrize(
    "patches", [["uint8", [2, 3], b"12345"], ["float32", [1, 1], b"1234"], ["uint8", [6], b"123456"], [[1, 2], [3, 4]]]
)
def test_what_are_no_pixels_is_refused(patches):
    fields = {"request_id": "a", "prompt_token_ids": [1], "params": {}}
    image = {"patches": patches, "grid": [1, 2, 3], "digest": "d"}
    with pytest.raises(RequestError, match="cannot be read"):
        decode_request(encode({**fields, "images": [[0, 1, image]]}), 0.0)


def encode_request(request: Request) -> bytes:
    return messages.encode_request(request, 0.0)


def test_every_sampling_parameter_is_drawn():
    """Otherwise a field would have its default on both sides."""
    drawn = sampling.wrapped_strategy.kwargs if hasattr(sampling, "wrapped_strategy") else sampling.kwargs
    assert set(drawn) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_a_new_sampling_parameter_arrives(monkeypatch):
    field = ("novelty", float, dataclasses.field(default=-1.0))
    extended = dataclasses.make_dataclass("Extended", [field], bases=(SamplingParams,), frozen=True, kw_only=True)
    monkeypatch.setattr(messages, "SamplingParams", extended)
    request = Request("a", (1,), extended(novelty=2.5, top_k=7))
    assert decode_request(encode_request(request), 0.0) == request


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_arrives(seed):
    request = Request("a", (1,), SamplingParams(seed=seed))
    assert decode_request(encode_request(request), 0.0).params.seed == seed
    assert decode_from_core(encode(messages.Accepted(1, seed))).seed == seed


def test_a_top_k_beyond_all_vocabularies_keeps_all():
    request = Request("a", (1,), SamplingParams(top_k=10**30, seed=3))
    arrived = decode_request(encode_request(request), 0.0).params
    assert arrived.top_k > 2**62
    assert arrived.seed == 3


def test_a_deadline_arrives_as_the_seconds_that_are_left():
    request = Request("a", (1,), SamplingParams(), deadline=107.5)
    assert decode_request(messages.encode_request(request, 100.0), 20.0) == dataclasses.replace(request, deadline=27.5)


@pytest.mark.parametrize("changes", [{"priority": 2**64}, {"tenant": "\ud800"}, {"prompt_token_ids": (2**64,)}])
def test_what_cannot_be_sent_is_refused(changes):
    with pytest.raises(RequestError, match="cannot be sent"):
        encode_request(dataclasses.replace(Request("a", (1,), SamplingParams()), **changes))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"prompt_token_ids": ["x"]}, None),
        ({"prompt_token_ids": 3}, None),
        ({"lora": ["name"]}, None),
        ({"params": [1]}, None),
        ({"params": {"no_such_parameter": 1}}, None),
        ({"params": {"temperature": "hot"}}, "temperature"),
        ({"params": {"seed": 2.5}}, "seed"),
        ({"params": {"speculation": {"depth": 1}}}, "speculation.depth"),
    ],
)
def test_a_request_with_wrong_types_is_refused(changes, place):
    fields = {"request_id": "a", "prompt_token_ids": [1], "params": {}}
    assert decode_request(encode(fields), 0.0) == Request("a", (1,), SamplingParams())
    with pytest.raises(RequestError) as caught:
        decode_request(encode(fields | changes), 0.0)
    assert caught.value.place == place


@pytest.mark.parametrize("missing", ["request_id", "prompt_token_ids", "params"])
def test_a_request_without_a_required_field_is_refused(missing):
    fields = msgspec.to_builtins(Request("a", (1,), SamplingParams()))
    del fields[missing]
    with pytest.raises(RequestError, match=missing):
        decode_request(encode(fields), 0.0)


# ---- deltas


def can_be(delta):
    """Return whether a delta is valid: a stop reason requires a finish reason, and accepted tokens a draft."""
    ended = delta.finish_reason is not None or delta.stop_reason is None
    return ended and (delta.draft_tokens > 0 or not delta.draft_accepted)


def of_one_version(delta):
    """Return the delta with one version of weights for all its tokens; version 0 is not reported."""
    version = sum(version for version, _ in delta.weight_versions) % 2**63
    return dataclasses.replace(delta, weight_versions=((version, len(delta.token_ids)),) if version else ())


@few
@given(st.lists(st.tuples(st.integers(1, 2**63), values(SequenceDelta).filter(can_be).map(of_one_version)), max_size=5))
def test_deltas_of_a_step(numbered):
    message = decode_from_core(encode(messages.deltas_of(numbered)))
    names = dict(numbered)
    versions = ((message.version, 1),) if message.version else ()
    got = [
        (number, SequenceDelta(names[number].request_id, index, [token], [], weight_versions=versions))
        for number, index, token in zip(message.streams, message.indexes, message.tokens, strict=True)
    ]
    assert sorted([*got, *message.others], key=repr) == sorted(numbered, key=repr)


def test_a_plain_token_keeps_its_draft_counts():
    delta = SequenceDelta("a", 0, [5], [], draft_tokens=3, draft_accepted=2)
    message = decode_from_core(encode(messages.deltas_of([(7, delta)])))
    assert (message.tokens, message.others) == ([], [(7, delta)])


def test_plain_tokens_of_one_version_share_it_and_those_of_others_keep_theirs():
    deltas = [
        SequenceDelta("a", 0, [5], weight_versions=versions) for versions in (((3, 1),), ((3, 1),), ((4, 1),), ())
    ]
    message = decode_from_core(encode(messages.deltas_of(enumerate(deltas))))
    assert (message.streams, message.version) == ([0, 1], 3)
    assert [(number, delta.weight_versions) for number, delta in message.others] == [(2, ((4, 1),)), (3, ())]


def test_a_plain_delta_is_small():
    message = messages.deltas_of([(number, SequenceDelta("a", 0, [5])) for number in range(1000, 1100)])
    assert not message.others
    assert len(encode(message)) < 100 * 6


@pytest.mark.parametrize("top", [0, 20])
def test_parts_of_a_large_delta_are_small_and_complete(top):
    known = [None, *(fake.expected_logprobs(3 + at % 250, at, top) for at in range(1, 6000))]
    delta = SequenceDelta("a", 2, [7], prompt_logprobs=known)
    assert messages.is_large(delta)
    parts = list(messages.parts(9, delta))
    assert {(part.stream, part.index) for part in parts} == {(9, 2)}
    together = itertools.chain(*(part.prompt_logprobs for part in parts), delta.prompt_logprobs)
    assert list(together) == known
    assert not messages.is_large(delta)
    assert max(len(part.prompt_logprobs) for part in parts) * (1 + top) <= messages.MOST_CANDIDATES


def test_reasons_to_finish_arrive_as_such():
    message = messages.deltas_of([(1, SequenceDelta("a", 0, [], finish_reason=FinishReason.STOP, stop_reason=5))])
    ((_, delta),) = decode_from_core(encode(message)).others
    assert (delta.finish_reason, type(delta.finish_reason), delta.stop_reason) == ("stop", FinishReason, 5)


# ---- KV events


def test_the_bytes_of_kv_events_are_those_of_tokens_and_hashes():
    runs = [messages.KvStored("GPU", b"p" * 32, [b"a" * 32, b"b" * 32], bytes(16))]
    events = messages.KvEvents(stored=runs, removed=[messages.KvRemoved("CPU", [b"c" * 32])])
    assert events.nbytes == 16 + 3 * 32
