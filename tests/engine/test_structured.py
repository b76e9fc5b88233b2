"""Grammar-constrained outputs: valid, the same bits in every mode, without effect on other requests."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.engine.engine import _vocabulary as original
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.structured import masks as masking
from jaxinfer.structured.masks import Held, Masks
from tests.engine.test_identity import _place_eagerly, preempted
from tests.engine.test_invariance import bits
from tests.fakes import mixed_params, random_model
from tests.serve.fake_engine import VOCAB, fake_tokenizer
from tests.structured import stuck_helper

SETTINGS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 160, "page_size": 16, "prefill_sizes": (16, 64)}
ROOMY, TIGHT = 200, 12

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bc"]},
        "on": {"type": "boolean"},
    },
    "required": ["x", "kind"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": ["null", "boolean"]}, "maxItems": 6}
WORD = {"type": "string", "pattern": "^[a-c]{2,9}$"}
SCHEMAS = (POINT, LIST, WORD)
REGEX = r"[a-f]{3,20}\.[0-9]{2}"
CHOICE = ("yes", "no", "perhaps not")
GRAMMAR = 'root ::= ("ab" | "c")+ "." [0-9]*'


def model_of(seed: int = 0) -> Model:
    """Return a model with random weights and a byte vocabulary."""
    return random_model(seed=seed, vocab_size=VOCAB).replace(tokenizer=fake_tokenizer())


def asked(number: int) -> dict[str, Any]:
    return [
        *({"json": schema} for schema in SCHEMAS),
        {"regex": REGEX},
        {"choice": CHOICE},
        {"grammar": GRAMMAR},
    ][number % (len(SCHEMAS) + 3)]


def check(constraint: dict[str, Any], text: str) -> None:
    """Validate a text against its constraint with an independent library."""
    match constraint:
        case {"json": schema}:
            jsonschema.validate(json.loads(text), schema)
        case {"json_object": True}:
            assert isinstance(json.loads(text), dict)
        case {"regex": regex}:
            assert re.fullmatch(regex, text)
        case {"choice": choices}:
            assert text in choices
        case {"grammar": _}:
            assert re.fullmatch(r"(ab|c)+\.[0-9]*", text)


def check_all(constraints: list[dict[str, Any] | None], outputs: list[RequestOutput]) -> int:
    """Check the outputs that finished with "stop"; return their number."""
    ended = 0
    for constraint, output in zip(constraints, outputs, strict=True):
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length"), sample
            if constraint is not None and sample.finish_reason == "stop":
                check(constraint, sample.text)
                ended += 1
    return ended


Requests = list[tuple[list[int], SamplingParams]]


def make_requests(count: int) -> tuple[list[dict[str, Any] | None], Requests]:
    """Return requests, two of three constrained, with all sampling features and some with several samples."""
    constraints: list[dict[str, Any] | None] = []
    requests: Requests = []
    for number in range(count):
        constraint = asked(number // 3 + number) if number % 3 else None
        hot = {"temperature": (0.0, 1.5)[number % 2]} if number % 4 else {}
        several = {"n": 2} if number % 7 == 5 else {}
        changes = {**hot, **several, "structured_outputs": constraint, "max_tokens": 12 + number % 29}
        constraints.append(constraint)
        requests.append(
            ([(7 * number + i) % VOCAB for i in range(1 + 5 * number % 70)], mixed_params(number, **changes))
        )
    return constraints, requests


def run(llm: LLM, requests: Requests) -> list[RequestOutput]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    llm.engine.check()
    return outputs


@pytest.fixture(scope="module")
def alone() -> tuple[list[dict[str, Any] | None], Requests, list[Any]]:
    """Return the results of each request alone."""
    constraints, requests = make_requests(26)
    llm, outputs = LLM(model_of(), num_pages=ROOMY, **SETTINGS), list[RequestOutput]()
    for request in requests:
        outputs += run(llm, [request])
        llm.engine.reset_prefix_cache()
    assert check_all(constraints, outputs) > 8
    return constraints, requests, [bits(output) for output in outputs]


MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "full batch": ({}, lambda stats: True),
    "recomputed": ({"num_pages": TIGHT, "swap_space_gib": 0}, preempted("recompute")),
    "swapped": ({"num_pages": TIGHT}, preempted("swap")),
    "synchronous": ({"async_scheduling": False}, lambda stats: True),
    "several steps": ({"multi_step": 4}, lambda stats: True),
    "drafts": ({"speculative": "ngram", "speculative_adaptive": False}, lambda stats: True),
    "forced": ({"speculative": "grammar"}, lambda stats: stats.draft_accepted > 20),
    "drafts, recomputed": (
        {"speculative": "ngram", "speculative_adaptive": False, "num_pages": TIGHT, "swap_space_gib": 0},
        preempted("recompute"),
    ),
    "static": ({"batching": "static"}, lambda stats: True),
    "one helper": ({"structured_output_helpers": 1}, lambda stats: True),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_each_request_alone(alone, mode, monkeypatch):
    constraints, requests, expected = alone
    changes, happened = MODES[mode]
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    if mode == "forced":  # wait for each mask, so that the forced tokens do not depend on machine load
        for name in ("_PATIENCE", "_PATIENCE_ALONE"):
            monkeypatch.setattr(f"jaxinfer.engine.scheduling.decode.{name}", 60.0)
    if "num_pages" in changes:
        monkeypatch.setattr(SequencePages, "place", functools.partialmethod(_place_eagerly, SequencePages.place))
    llm = LLM(model_of(), **{**SETTINGS, "num_pages": ROOMY, **changes})
    with count_compilations() as compilations:
        at_once = 2 if mode == "forced" else len(requests)  # with few requests rows are idle for forced tokens
        outputs = [each for at in range(0, len(requests), at_once) for each in run(llm, requests[at : at + at_once])]
    assert compilations.count == 0
    stats = llm.engine.stats()
    assert happened(stats), stats
    assert stats.replay_mismatches == 0
    check_all(constraints, outputs)
    found = [bits(output) for output in outputs]
    wrong = [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    assert not wrong


def test_neighbours_keep_their_bits():
    """Unconstrained requests in a mixed batch match those on an engine without structured outputs bitwise."""
    _, requests = make_requests(12)
    free = [(prompt, params) for prompt, params in requests if params.grammar is None]
    plain = LLM(model_of(), num_pages=ROOMY, structured_output_helpers=0, **SETTINGS)
    expected = [bits(output) for output in run(plain, free)]
    llm = LLM(model_of(), num_pages=ROOMY, **SETTINGS)
    outputs = run(llm, requests)
    found = [bits(output) for output, (_, params) in zip(outputs, requests, strict=True) if params.grammar is None]
    assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_ends_is_valid_on_random_weights(temperature, seed):
    constraints = [asked(number) for number in range(12)]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=120, structured_outputs=constraint)
        for number, constraint in enumerate(constraints)
    ]
    llm = LLM(model_of(seed), num_pages=ROOMY, **SETTINGS)
    outputs = llm.generate([[3 + number] for number in range(12)], params)
    assert check_all(list(constraints), outputs) >= 8


def test_what_ends_is_valid_on_the_demo_model():
    llm = LLM("demo", max_num_seqs=8, max_model_len=256, prefill_sizes=(16, 64))
    constraints: list[dict[str, Any] | None] = [*(asked(number) for number in range(6)), {"json_object": True}] * 2
    params = [
        SamplingParams(temperature=(0.0, 1.5)[number % 2], seed=number, max_tokens=150, structured_outputs=constraint)
        for number, constraint in enumerate(constraints)
    ]
    with count_compilations() as compilations:
        outputs = llm.generate(["ROMEO:\n"] * len(params), params)
    assert compilations.count == 0
    assert check_all(constraints, outputs) >= 10


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model_of(), num_pages=ROOMY, **SETTINGS)


def one(llm: LLM, constraint: dict[str, Any], **changes: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **changes}, structured_outputs=constraint)
    return llm.generate([[5, 6, 7]], params)[0].outputs[0]


def test_a_finished_grammar_ends_the_output(llm):
    output = one(llm, {"choice": ["perhaps"]}, ignore_eos=True, min_tokens=50)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("perhaps", "stop", 7)


def test_a_structural_tag_holds_the_output_and_its_schemas_are_named(llm):
    schema = {"type": "json_schema", "json_schema": POINT}
    tag = {"type": "tag", "begin": "<f>", "content": schema, "end": "</f>"}
    constraint = {"structural_tag": {"type": "structural_tag", "format": tag}}
    output = one(llm, constraint, temperature=1.5, seed=3)
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text.removeprefix("<f>").removesuffix("</f>")), POINT)
    tag["content"] = {**schema, "json_schema": {"not": {}}}
    place = r"structured_outputs\.structural_tag\.format\.content\.json_schema cannot be held: .*not"
    with pytest.raises(RequestError, match=place):
        one(llm, constraint)


def test_what_max_tokens_cuts_says_so(llm):
    output = one(llm, {"choice": ["perhaps"]}, max_tokens=4)
    assert (output.text, output.finish_reason) == ("perh", "length")


def test_the_grammar_wins_where_other_processors_leave_nothing(llm):
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    (p,) = tokenizer.encode("p")
    for others in ({"allowed_token_ids": [9]}, {"bad_words": ["e"]}, {"logit_bias": {p: -100.0}}):
        assert one(llm, {"choice": ["perhaps"]}, **others).text == "perhaps"


def test_processors_choose_among_what_the_grammar_allows(llm):
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    (n,) = tokenizer.encode("n")
    assert one(llm, {"choice": ["yes", "no", "maybe"]}, logit_bias={n: 100.0}).text == "no"
    assert one(llm, {"choice": ["yes", "no"]}, bad_words=["n"]).text == "yes"


def test_log_probabilities_are_those_of_the_model(llm):
    """Logprobs are of the raw logits: a token barred by the grammar keeps its probability."""
    free = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))[0].outputs[0]
    held = one(llm, {"choice": ["no"]}, logprobs=5)
    assert free.logprobs is not None
    top = {token: each for token, each in free.logprobs[0].items() if each.rank <= 5}
    assert top.items() <= held.logprobs[0].items()


def test_a_request_that_ends_early_leaves_nothing_behind(llm):
    params = SamplingParams(max_tokens=100, temperature=1.5, seed=1, structured_outputs={"regex": "[a-z]+"})

    class Left(Exception):
        pass

    def leave(delta: Any) -> None:
        raise Left

    with pytest.raises(Left):
        llm.generate([[5, 6]] * 3, params, on_delta=leave)
    llm.engine.check()
    constraints: Any = llm.engine._scheduler._constraints
    assert not constraints._open
    assert sum(worker.members for worker in constraints._masks._workers) == 0


def test_neighbours_wait_for_no_grammar_that_hangs(llm, monkeypatch):
    """A plan waits for a missing mask only once and briefly; unconstrained requests keep their bits."""
    _, requests = make_requests(12)
    free = [(prompt, params) for prompt, params in requests if params.grammar is None]
    hanging = SamplingParams(max_tokens=8, structured_outputs={"regex": stuck_helper.STUCK})
    expected = [bits(output) for output in run(llm, free)]
    waits, original_wait = list[tuple[Held, float, bool]](), Masks.wait

    def wait(masks: Masks, those: Any, seconds: float) -> None:
        waits.extend((held, seconds, held.late) for held in those)
        original_wait(masks, those, seconds)

    monkeypatch.setattr(masking, "MODULE", stuck_helper.MODULE)
    monkeypatch.setattr(Masks, "wait", wait)
    outputs = run(LLM(model_of(), num_pages=ROOMY, **SETTINGS), [*free, *[([5, 6, 7], hanging)] * 2])
    assert [bits(output) for output in outputs[: len(free)]] == expected
    for output in outputs[len(free) :]:
        assert output.outputs[0].finish_reason == "error"
        assert "took too long" in str(output.outputs[0].stop_reason)
    assert len({held for held, _, _ in waits}) == len(waits) == 2
    assert all(seconds <= 0.02 and not late for _, seconds, late in waits)


def test_a_grammar_that_fails_on_its_way_ends_its_own_output_alone(llm, monkeypatch):
    """The vocabulary has no token for the required byte."""
    tokenizer: Any = llm.tokenizer
    without = {"tokens": [b"" if b == b"q" else b for b in (tokenizer.token_bytes(i) for i in range(VOCAB))]}
    monkeypatch.setattr(
        "jaxinfer.engine.engine._vocabulary",
        lambda tokenizer, size: original(tokenizer, size)._replace(**without),
    )
    fresh = LLM(model_of(), num_pages=ROOMY, **SETTINGS)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"choice": [choice]})
        for choice in ("aqb", "abc")
    ]
    bad, good = (output.outputs[0] for output in fresh.generate([[5]] * 2, params))
    assert bad.finish_reason == "error"
    assert isinstance(bad.stop_reason, str)
    assert (good.text, good.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        ({"json": {"not": {}}}, "structured_outputs.json cannot be held.*not"),
        ({"regex": "(?=a)"}, "structured_outputs.regex cannot be held.*look-around"),
        ({"grammar": "start: B"}, "structured_outputs.grammar cannot be held"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(llm, constraint, named):
    with pytest.raises(RequestError, match=named):
        one(llm, constraint)


def test_an_engine_without_helpers_refuses():
    plain = LLM(model_of(), structured_output_helpers=0, **SETTINGS)
    with pytest.raises(RequestError, match="structured_output_helpers"):
        one(plain, {"regex": "a"})


def test_a_model_without_a_tokenizer_refuses():
    bare = LLM(random_model(), **SETTINGS)
    with pytest.raises(RequestError, match="no tokenizer"):
        one(bare, {"regex": "a"})
