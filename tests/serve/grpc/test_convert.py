"""Tests of the conversion between messages and records: no field is lost or invented."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Conversation, ServeLimits
from jaxinfer.serve.grpc import chat as chats
from jaxinfer.serve.grpc import convert
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs, TokenLogprob, WeightVersions
from tests.serve.fake_engine import fake_card

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
UINT32 = st.integers(0, 2**32 - 1)
DOUBLE = st.floats(allow_nan=False)
FIELDS = {
    "n": INT32,
    "temperature": DOUBLE,
    "top_p": DOUBLE,
    "top_k": INT32,
    "min_p": DOUBLE,
    "top_n_sigma": DOUBLE,
    "presence_penalty": DOUBLE,
    "frequency_penalty": DOUBLE,
    "repetition_penalty": DOUBLE,
    "seed": INT64,
    "max_tokens": INT64,
    "min_tokens": INT64,
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "logprobs": INT32,
    "prompt_logprobs": INT32,
    "thinking_token_budget": INT64,
    "skip_special_tokens": st.booleans(),
    "logprobs_mode": st.text(),
    "return_entropy": st.booleans(),
    "return_sampling_mask": st.booleans(),
    "return_routed_experts": st.booleans(),
    "speculation": st.fixed_dictionaries(
        {}, optional={"enabled": st.booleans(), "max_tokens": INT32, "acceptance": st.text()}
    ),
    "structured_outputs": st.fixed_dictionaries(
        {},
        optional={
            "json": st.text(),
            "json_object": st.booleans(),
            "regex": st.text(),
            "choice": st.lists(st.text(), min_size=1, max_size=3),
            "grammar": st.text(),
            "structural_tag": st.text(),
            "enable_in_reasoning": st.booleans(),
        },
    ),
    "logit_bias": st.dictionaries(UINT32, DOUBLE, min_size=1, max_size=3),
    "bad_words": st.lists(st.text(), min_size=1, max_size=3),
    "stop": st.lists(st.text(), min_size=1, max_size=3),
    "stop_token_ids": st.lists(UINT32, min_size=1, max_size=3),
}


LISTS = ("allowed_token_ids", "forced_token_ids", "logprob_token_ids")


def test_the_properties_below_know_all_sampling_fields() -> None:
    assert {*FIELDS, *LISTS} == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


@given(
    st.fixed_dictionaries({}, optional=FIELDS),
    st.fixed_dictionaries({}, optional=dict.fromkeys(LISTS, st.lists(UINT32, max_size=3))),
)
def test_exactly_the_sampling_fields_that_are_set_arrive(fields: dict, lists: dict[str, list[int]]) -> None:
    message = pb.SamplingParams(**fields)
    for name, ids in lists.items():
        getattr(message, name).ids.extend(ids)
        getattr(message, name).SetInParent()
    fields = {**fields, **lists}
    found = convert.sampling_of(pb.SamplingParams.FromString(message.SerializeToString()))
    assert found == fields
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in fields.items()}


JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=4) | st.integers(-(2**53), 2**53) | st.just(0.5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_a_struct_keeps_json_and_whole_numbers_stay_whole(data: dict) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="")])
    chat.template_variables.update(data)
    variables = chats.conversation_of(pb.Chat.FromString(chat.SerializeToString())).variables
    assert json.dumps(variables, sort_keys=True) == json.dumps(data, sort_keys=True)


def test_a_conversation_has_what_was_set_and_nothing_else() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=""), pb.ChatMessage(role="assistant")])
    chat.messages[1].fields.update({"tool_calls": [{"id": 1}]})
    chat.tools.add().update({"type": "function"})
    chat.add_generation_prompt = False
    assert chats.conversation_of(chat) == Conversation(
        messages=[{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": [{"id": 1}], "content": None}],
        tools=[{"type": "function"}],
        add_generation_prompt=False,
    )
    assert chats.conversation_of(pb.Chat(messages=[])) == Conversation(messages=[])


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"content": "b"}, "chat.messages[0].fields"), ({"x": math.nan}, "chat.messages[0].fields")],
)
def test_what_no_conversation_can_hold_is_refused_by_name(fields: dict, field: str) -> None:
    message = pb.ChatMessage(role="user", content="a")
    message.fields.update(fields)
    with pytest.raises(ServeError) as refusal:
        chats.conversation_of(pb.Chat(messages=[message]))
    assert (refusal.value.kind, refusal.value.field) == (Kind.INVALID, field)


def test_a_request_without_input_is_refused_and_one_with_defaults_adds_none() -> None:
    with pytest.raises(ServeError, match="prompt, token_ids, chat") as refusal:
        convert.call_of(pb.GenerateRequest())
    assert refusal.value.field == "input"
    call = convert.call_of(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 2**32 - 1])))
    assert (call.prompt, call.sampling, call.model, call.request_id) == ([0, 2**32 - 1], {}, None, None)
    assert (call.add_special_tokens, call.priority, call.cache_salt, call.timeout) == (True, 0, "", None)
    full = pb.GenerateRequest(
        prompt="", model="m", request_id="", priority=-1, cache_salt="s", add_special_tokens=False
    )
    call = convert.call_of(full, timeout=2.0, tenant="t")
    assert (call.prompt, call.model, call.request_id, call.priority) == ("", "m", "", -1)
    assert (call.cache_salt, call.add_special_tokens, call.timeout, call.tenant) == ("s", False, 2.0, "t")


def positions(count: int, top: int) -> list[PositionLogprobs]:
    candidates = tuple(TokenLogprob(k, -k / 7, k + 1) for k in range(top))
    return [PositionLogprobs(TokenLogprob(i, -i / 3, 1), candidates) for i in range(count)]


@pytest.mark.parametrize(
    ("tokens", "prompt", "top"), [(0, 0, 0), (1, 0, 0), (2000, 3000, 20), (1, 820, 20), (781, 0, 20)]
)
def test_log_probabilities_come_in_messages_that_every_client_takes(tokens: int, prompt: int, top: int) -> None:
    delta = OutputDelta(
        1, "text", list(range(tokens)), positions(tokens, top), "stop", "END", [None, *positions(prompt, top)]
    )
    messages = [m.delta for m in convert.deltas("id", delta, lambda token: "é" * 8)]
    assert all(len(message.SerializeToString()) < 1 << 20 for message in messages)
    assert "".join(message.text for message in messages) == "text"
    assert [i for message in messages for i in message.token_ids] == delta.token_ids
    assert [p.chosen.logprob for m in messages for p in m.logprobs] == [p.chosen.logprob for p in delta.logprobs]
    assert [p.chosen.token_id for m in messages for p in m.prompt_logprobs] == list(range(prompt))
    assert all(len(p.top) == top for m in messages for p in (*m.logprobs, *m.prompt_logprobs))
    assert all(len(m.logprobs) == len(m.token_ids) for m in messages)
    assert [m.HasField("finish_reason") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].stop_string == "END"
    assert {message.output_index for message in messages} == {1}
    assert len(messages) > 1 or tokens + prompt < 800


def test_an_empty_delta_is_a_delta_and_an_upper_seed_keeps_its_bits() -> None:
    (message,) = convert.deltas("id", OutputDelta(0, "", []), str)
    assert pb.GenerateResponse.FromString(message.SerializeToString()).WhichOneof("event") == "delta"
    assert convert.started("id", 2**64 - 1, 1, "m").started.seed == -1
    assert convert.started("id", 2**63 - 1, 1, "m").started.seed == 2**63 - 1
    for token in (0, 7):
        (message,) = convert.deltas("id", OutputDelta(0, "", [token], (), "stop", token), str)
        assert (message.delta.WhichOneof("stop_reason"), message.delta.stop_token_id) == ("stop_token_id", token)


@pytest.mark.parametrize("acceptance", [None, "typical"])
def test_the_last_message_says_how_drafts_were_accepted(acceptance: str | None) -> None:
    ended = OutputDelta(0, "", [1], (), "stop", acceptance=acceptance)
    for delta, told in ((OutputDelta(0, "", [1]), None), (ended, acceptance)):
        (message,) = convert.deltas("id", delta, str)
        assert convert.optional(message.delta, "acceptance") == told


def test_model_info_tells_what_is_set_and_every_limit() -> None:
    card = fake_card()
    info = convert.model_info(card, ServeLimits(), has_tokenizer=True, has_chat_template=False)
    told = {field.name for field, _ in info.ListFields()}
    assert told == {field.name for field in pb.ModelInfo.DESCRIPTOR.fields} - {"has_chat_template"}
    assert len(info.limits.ListFields()) == len(pb.Limits.DESCRIPTOR.fields)
    assert set(info.engine.fields) == set(card.engine)
    assert (info.defaults.temperature, info.defaults.HasField("max_tokens")) == (1.0, False)


@pytest.mark.parametrize(
    ("versions", "newest", "ranges"),
    [((), 0, []), (((4, 3),), 4, []), (((0, 2), (4, 1)), 4, [(0, 0, 2), (4, 2, 3)])],
)
def test_the_last_message_has_the_versions_of_weights(
    versions: WeightVersions, newest: int, ranges: list[tuple[int, int, int]]
) -> None:
    (message,) = convert.deltas("id", OutputDelta(0, "", [1], weight_versions=versions), str)
    assert not message.delta.HasField("weight_version")
    (message,) = convert.deltas("id", OutputDelta(0, "", [1], (), "stop", weight_versions=versions), str)
    assert (message.delta.HasField("weight_version"), message.delta.weight_version) == (True, newest)
    assert [(each.version, each.start, each.end) for each in message.delta.weight_versions] == ranges
