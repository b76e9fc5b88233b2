"""Values that SamplingParams rejects (each message names field and value), and normalisation of accepted ones."""

import dataclasses
import json
import math
import time
from typing import Any

import numpy as np
import pytest

from jaxinfer.sampling_params import PARAMETERS, RequestError, SamplingParams, Speculation
from tests.yardstick import slowness

NAN, INF = math.nan, math.inf
NUMBERS, INTEGERS, FLAGS, LISTS = (
    [row.name for row in PARAMETERS.values() if row.kind == kind] for kind in ("float", "int", "bool", "Sequence[int]")
)

REFUSED: list[tuple[str, Any, str]] = [
    *((field, value, "must be finite") for field in NUMBERS for value in (NAN, INF, -INF, 10**400)),
    *((field, value, "must be a number") for field in NUMBERS for value in (True, "1", None, [1.0], 1j)),
    *((field, value, "must be an integer") for field in INTEGERS for value in (True, 1.0, "1", [1], NAN)),
    *((field, value, "must be true or false") for field in FLAGS for value in (1, 0, "yes", None)),
    *((field, value, "must be a list of token ids") for field in LISTS for value in ("12", b"12", 7, {1: 2}, {1})),
    *((field, [3, value], "must be an integer") for field in LISTS for value in ("1", 1.5, True, None)),
    *((field, [3, -1], "must be at least 0") for field in LISTS),
    *((field, value, "must be a list of strings") for field in ("stop", "bad_words") for value in (5, {"a": 1}, {"a"})),
    *((field, ["a", value], "must be a string") for field in ("stop", "bad_words") for value in (1, None, b"a")),
    *((field, ["a", ""], "must have 1 to 1024 characters, not 0") for field in ("stop", "bad_words")),
    *((field, ["a" * 1025], "must have 1 to 1024 characters, not 1025") for field in ("stop", "bad_words")),
    *((field, ["a"] * 65, "must hold at most 64 strings, not 65") for field in ("stop", "bad_words")),
    ("stop", "", "must have 1 to 1024 characters"),
    ("bad_words", "word", "must be a list of strings"),
    ("temperature", -0.1, "must be at least 0"),
    ("top_p", 0.0, "must be greater than 0"),
    ("top_p", -0.5, "must be greater than 0"),
    ("top_p", 1.01, "must be at most 1"),
    ("min_p", -0.01, "must be at least 0"),
    ("min_p", 1.5, "must be at most 1"),
    ("top_k", -2, "must be at least -1"),
    ("top_n_sigma", -1.5, "must be at least -1"),
    ("presence_penalty", 2.1, "must be at most 2"),
    ("presence_penalty", -2.1, "must be at least -2"),
    ("frequency_penalty", 3, "must be at most 2"),
    ("frequency_penalty", -3, "must be at least -2"),
    ("repetition_penalty", 0, "must be greater than 0"),
    ("repetition_penalty", -1.5, "must be greater than 0"),
    ("n", 0, "must be at least 1"),
    ("n", None, "must be an integer"),
    ("n", 1025, "must be at most 1024"),
    ("max_tokens", 0, "must be at least 1"),
    ("min_tokens", -1, "must be at least 0"),
    ("min_tokens", 17, "must be at most max_tokens=16"),
    ("min_tokens", None, "must be an integer"),
    ("logprobs", -2, "must be at least -1"),
    ("prompt_logprobs", -1, "must be at least 0"),
    ("seed", 2**64, f"must be at most {2**64 - 1}"),
    ("seed", -(2**63) - 1, f"must be at least {-(2**63)}"),
    ("allowed_token_ids", [], "must hold at least one"),
    ("logit_bias", [(1, 2.0)], "must map token ids to numbers"),
    ("logit_bias", {"1": 2.0}, "must be an integer"),
    ("logit_bias", {-1: 2.0}, "must be at least 0"),
    ("logit_bias", {1: 100.5}, "must be at most 100"),
    ("logit_bias", {1: -100.5}, "must be at least -100"),
    ("logit_bias", {1: NAN}, "must be finite"),
    ("logit_bias", {1: True}, "must be a number"),
]


KINDS = "json, json_object, regex, choice, grammar, structural_tag"


@pytest.mark.parametrize(("field", "value", "reason"), REFUSED)
def test_refuses_naming_field_and_value(field: str, value: Any, reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{field: value})
    sentence = str(refusal.value)
    assert sentence.startswith(field)
    assert refusal.value.field == field
    assert reason in sentence
    assert len(sentence) < 200
    if isinstance(value, int | float) and abs(value) < 1e30:
        assert repr(value) in sentence


SPECULATION_REFUSED: list[tuple[Any, str]] = [
    ({"max_tokens": -1}, "speculation.max_tokens=-1 must be at least 0"),
    ({"max_tokens": 2**31}, "speculation.max_tokens=2147483648 must be at most 2147483647"),
    ({"max_tokens": 1.5}, "speculation.max_tokens=1.5 must be an integer"),
    ({"enabled": 1}, "speculation.enabled=1 must be true or false"),
    ({"acceptance": "lossy"}, "speculation.acceptance='lossy' must be exact or typical"),
    ({"acceptance": ["exact"]}, "speculation.acceptance=['exact'] must be exact or typical"),
    ({"foo": 1}, "speculation.foo is no field of it: they are enabled, max_tokens, acceptance"),
    ({1: 2}, "speculation[1] is no field of it: they are enabled, max_tokens, acceptance"),
    (1, "speculation=1 must be an object"),
    ([("enabled", True)], "speculation=[('enabled', True)] must be an object"),
    (
        {"enabled": False, "acceptance": "typical"},
        "speculation.acceptance='typical' is about drafts, and speculation.enabled=False has none",
    ),
    (
        {"max_tokens": 0, "acceptance": "typical"},
        "speculation.acceptance='typical' is about drafts, and speculation.max_tokens=0 has none",
    ),
]


@pytest.mark.parametrize(("value", "sentence"), SPECULATION_REFUSED)
def test_speculation_is_refused_naming_its_field_and_value(value: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(speculation=value)
    assert (refusal.value.field, str(refusal.value)) == ("speculation", sentence)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            {},
            f"structured_outputs must have exactly one of {KINDS}, not 0 of them",
        ),
        (
            {"regex": "a", "choice": ["a"]},
            f"structured_outputs must have exactly one of {KINDS}, not 2 of them",
        ),
        (
            {"ebnf": "a"},
            f"structured_outputs.ebnf is no field of it: they are {KINDS}, enable_in_reasoning",
        ),
        ("a", "structured_outputs='a' must be an object"),
        ({"regex": 1.5}, "structured_outputs.regex=1.5 must be a string"),
        ({"regex": ""}, "structured_outputs.regex must have 1 to 1048576 characters, not 0"),
        ({"regex": "a" * 1048577}, "structured_outputs.regex must have 1 to 1048576 characters, not 1048577"),
        ({"grammar": "\ud800"}, "structured_outputs.grammar has a lone surrogate at character 0: not Unicode"),
        ({"json": []}, "structured_outputs.json=[] must be a string"),
        ({"json": "[]"}, "structured_outputs.json=[] must be an object"),
        ({"json_object": 2}, "structured_outputs.json_object=2 must be true or false"),
        ({"structural_tag": []}, "structured_outputs.structural_tag=[] must be a string"),
        ({"choice": "ab"}, "structured_outputs.choice='ab' must be a list of strings"),
        ({"choice": []}, "structured_outputs.choice must hold 1 to 4096 strings, not 0"),
        ({"choice": ["a", ""]}, "structured_outputs.choice='' must be a string that is not empty"),
    ],
)
def test_structured_outputs_are_refused_naming_field_and_value(value: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(structured_outputs=value)
    assert (refusal.value.field, str(refusal.value)) == ("structured_outputs", sentence)


@pytest.mark.parametrize("text", ["x", "[" * 100_000, '{"a": }'])
def test_a_schema_is_json(text: str) -> None:
    with pytest.raises(RequestError, match="must be JSON"):
        SamplingParams(structured_outputs={"json": text})


def test_a_long_schema_is_not_parsed_where_it_is_checked() -> None:
    """Parsing it would block the event loop, and the engine's interpreter, for a tenth of a second."""
    text = json.dumps({"enum": [{}] * 250_000})
    begun = time.process_time()
    assert SamplingParams(structured_outputs={"json": text}).grammar == ("json", text)
    assert time.process_time() - begun < 0.005 * slowness()


def test_what_constrains_an_output_has_one_form() -> None:
    assert SamplingParams().grammar is None
    for given, asked in (
        ({"json": {"b": 1, "a": None}}, ("json", '{"b": 1, "a": null}')),
        ({"structural_tag": {"type": "a"}}, ("structural_tag", '{"type": "a"}')),
        ({"json_object": True, "regex": None}, ("json_object", "")),
        ({"choice": ["a", "é"]}, ("choice", '["a", "\\u00e9"]')),
        ({"regex": "a", "json_object": False}, ("regex", "a")),
    ):
        assert SamplingParams(structured_outputs=given).grammar == asked


def test_speculation_may_be_a_mapping_of_what_is_given() -> None:
    assert SamplingParams(speculation={}).speculation == Speculation()
    given = SamplingParams(speculation={"max_tokens": np.int64(3), "enabled": None}).speculation
    assert given == Speculation(max_tokens=3)
    assert type(given.max_tokens) is int
    assert SamplingParams(speculation=given).speculation is given
    assert [Speculation(max_tokens=most).most(4) for most in (None, 0, 3, 9)] == [4, 0, 3, 4]
    assert Speculation(enabled=False, max_tokens=3).most(4) == 0
    assert SamplingParams(speculation={"acceptance": "typical"}).typical
    assert not SamplingParams(speculation={}).typical
    assert not SamplingParams().typical


def test_a_refusal_names_the_entry_of_logit_bias() -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[7\]=101 must be at most 100"):
        SamplingParams(logit_bias={7: 101})


@pytest.mark.parametrize(
    ("place", "reason", "field", "sentence"),
    [
        ("top_p", "=2 must be at most 1", "top_p", "top_p=2 must be at most 1"),
        ("stop_token_ids", ": 9 must be less", "stop_token_ids", "stop_token_ids: 9 must be less"),
        ("continuations[3]", "is empty", "continuations", "continuations[3] is empty"),
        ("logit_bias key", "=-1 must be at least 0", "logit_bias", "logit_bias key=-1 must be at least 0"),
        (None, "no field alone", None, "no field alone"),
    ],
)
def test_a_refusal_is_a_field_and_a_sentence(place, reason, field, sentence) -> None:
    refusal = RequestError(place, reason)
    assert (refusal.field, str(refusal)) == (field, sentence)


def test_accepts_the_ends_of_the_ranges() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=-1, presence_penalty=-2, frequency_penalty=2, n=1)
    SamplingParams(seed=2**64 - 1, max_tokens=3, min_tokens=3, logprobs=0, prompt_logprobs=0)
    SamplingParams(seed=-(2**63), max_tokens=None, min_tokens=10**6, logit_bias={0: 100, 1: -100.0})
    SamplingParams(top_p=1e-9, repetition_penalty=1e-9, stop=["a" * 1024] * 64, bad_words=[], logit_bias={})


def test_normalises() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_p=1,
        top_k=-1,
        seed=np.int64(7),
        stop="end",
        bad_words=["a", "b"],
        stop_token_ids=[np.int32(3)],
        logit_bias={np.int64(5): 1},
    )
    assert given == SamplingParams(
        temperature=0.5, seed=7, stop=("end",), bad_words=("a", "b"), stop_token_ids=(3,), logit_bias={5: 1.0}
    )
    assert (type(given.top_p), type(given.temperature), type(given.seed)) == (float, float, int)
    assert given.top_k == 0
    assert [repr(SamplingParams(top_n_sigma=n).top_n_sigma) for n in (-1, -0.5, 2)] == ["0.0", "0.0", "2.0"]
    assert type(given.logit_bias) is dict


def test_replacing_a_field_checks_again() -> None:
    params = SamplingParams(stop="end", top_k=-1)
    assert dataclasses.replace(params, seed=1).stop == ("end",)
    with pytest.raises(RequestError, match="min_tokens=20"):
        dataclasses.replace(params, min_tokens=20)


def test_the_defaults_are_the_fields() -> None:
    params = SamplingParams()
    for field in dataclasses.fields(params):
        assert getattr(params, field.name) == field.default
