"""Tests of the conversion of GenerateRequest to Call: each field is mapped, or rejected by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.vllm import convert
from jaxinfer.serve.grpc.vllm.messages import pb
from tests.serve.grpc.vllm.serving import IDS, request

# vLLM's meaning of an empty message.
NOTHING: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": False,
}
HALVES = st.integers(1, 20).map(lambda n: n / 8)
SAME = {
    "n": st.integers(1, 128),
    "temperature": st.just(0.0) | HALVES,
    "top_p": st.sampled_from([0.125, 0.5, 1.0]),
    "top_k": st.integers(0, 2**32 - 1),
    "min_p": st.sampled_from([0.0, 0.25]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.5]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5]),
    "repetition_penalty": HALVES,
    "max_tokens": st.integers(0, 2**32 - 1),
    "min_tokens": st.integers(0, 2**32 - 1),
    "stop": st.lists(st.text(), min_size=1, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(-1, 30),
    "prompt_logprobs": st.integers(-1, 30),
    "seed": st.integers(-(2**31), 2**31 - 1),
    "include_stop_str_in_output": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 2**31 - 1), HALVES, min_size=1, max_size=3),
}
CONSTRAINTS = [
    ("json_schema", '{"type": "object"}', "json"),
    ("regex", "a+", "regex"),
    ("grammar", "start: /a/", "grammar"),
    ("structural_tag", '{"type": "structural_tag"}', "structural_tag"),
    ("json_object", True, "json_object"),
]


def names(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_no_field_is_overlooked() -> None:
    """A new field in the protobuf package fails here until it is mapped or rejected."""
    assert names(pb.GenerateRequest) == convert.REQUEST_FIELDS | convert.REFUSED.keys()
    assert names(pb.SamplingParams) == convert.SAMPLING_FIELDS | convert.WITHOUT_EFFECT
    besides = {*convert.CONSTRAINTS, "truncate_prompt_tokens", "grammar_from_first_token"}
    assert {*SAME, *besides} == convert.SAMPLING_FIELDS
    assert names(pb.ChoiceConstraint) == {"choices"}
    assert names(pb.TokenizedInput) == {"original_text", "input_ids"}


@given(st.fixed_dictionaries({}, optional=SAME))
def test_a_field_arrives_as_it_is_and_zeros_mean_vllms_defaults(fields: dict[str, Any]) -> None:
    message = pb.SamplingParams.FromString(pb.SamplingParams(**fields).SerializeToString())
    assert convert.sampling_of(message) == NOTHING | fields


def test_an_empty_message_is_what_sampling_params_would_be() -> None:
    assert SamplingParams(**convert.sampling_of(pb.SamplingParams())) == SamplingParams(skip_special_tokens=False)


@pytest.mark.parametrize(("theirs", "value", "ours"), CONSTRAINTS)
@pytest.mark.parametrize("first", [False, True])
def test_a_constraint_has_our_name(theirs: str, value: Any, ours: str, first: bool) -> None:
    message = pb.SamplingParams(**{theirs: value, "grammar_from_first_token": first})
    found = convert.sampling_of(message)["structured_outputs"]
    assert found == {ours: value, "enable_in_reasoning": first}
    assert SamplingParams(structured_outputs=found).structured_outputs


def test_choices_are_a_list() -> None:
    message = pb.SamplingParams(choice={"choices": ["a", "b"]})
    assert convert.sampling_of(message)["structured_outputs"]["choice"] == ["a", "b"]
    assert {theirs for theirs, *_ in CONSTRAINTS} | {"choice"} == set(convert.CONSTRAINTS)


def test_what_is_long_is_not_copied() -> None:
    message = pb.SamplingParams(stop_token_ids=range(5000), logit_bias=dict.fromkeys(range(5000), 1.0))
    found = convert.sampling_of(message)
    assert found["stop_token_ids"] is message.stop_token_ids
    assert not isinstance(found["logit_bias"], dict)
    asked = request(tokenized={"input_ids": IDS})
    assert convert.call_of(asked).prompt is asked.tokenized.input_ids


def test_a_call_has_id_and_input() -> None:
    call = convert.call_of(request(request_id="mine", stream=True), timeout=2.0, tenant="t", trace={"traceparent": "x"})
    assert (call.request_id, call.prompt, call.timeout, call.tenant, call.trace["traceparent"], call.model) == (
        *("mine", IDS, 2.0, "t", "x", None),
    )
    assert convert.call_of(request(text="Hi")).prompt == "Hi"
    assert convert.call_of(request(text="")).request_id is None


REFUSED = {
    "mm_inputs": {"im_token_id": 1},
    "extra_mm_inputs": [{}],
    "media_refs": {},
    "kv_transfer_params": {"remote_port": 1},
    "kv_transfer_params_json": "{}",
}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *(({name: value}, name) for name, value in REFUSED.items()),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
        ({"sampling": {"json_object": False}}, "json_object"),
        ({"sampling": {"logprobs": -1}}, "logprobs"),
        ({"tokenized": None}, "input"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert set(REFUSED) == set(convert.REFUSED)
    with pytest.raises(ServeError, match=f"^{field}") as refusal:
        convert.call_of(request(**fields))
    assert (refusal.value.kind, refusal.value.field) == (Kind.INVALID, field)


def test_a_rank_can_be_chosen_where_there_is_one() -> None:
    assert convert.call_of(request(data_parallel_rank=0)).prompt == IDS
    with pytest.raises(ServeError, match="data_parallel_rank=0 is not served: the server chooses among its 2"):
        convert.call_of(request(data_parallel_rank=0), replicas=2)


@pytest.mark.parametrize("place", ["", "sampling_params."])
def test_a_field_of_a_newer_package_is_refused_by_number(place: str) -> None:
    asked = request()
    message = asked.sampling_params if place else asked
    message.MergeFromString(bytes([0xA0, 0x06, 1]))  # field 100
    with pytest.raises(ServeError, match=f"^{place}field 100 is not served"):
        convert.call_of(asked)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [({}, None), ({"truncate_prompt_tokens": 3}, 3), ({"truncate_prompt_tokens": 64}, 64)]
    + [({"truncate_prompt_tokens": -1, "max_tokens": many}, kept) for many, kept in [(60, 4), (64, 1), (2**32 - 1, 1)]]
    + [({"truncate_prompt_tokens": -1}, 63)],
)
def test_as_many_tokens_of_a_prompt_are_kept(asked: dict[str, int], kept: int | None) -> None:
    assert convert.truncation_of(pb.SamplingParams(**asked), 64) == kept


@pytest.mark.parametrize("asked", [0, -2, 65])
def test_no_other_truncation_is_served(asked: int) -> None:
    with pytest.raises(ServeError, match=f"truncate_prompt_tokens={asked} must be from 1 to 64"):
        convert.truncation_of(pb.SamplingParams(truncate_prompt_tokens=asked), 64)
