"""Thinking before answers: unconstrained, closed by a budget, followed by a grammar-constrained answer."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import pytest

from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import Thinking
from tests.engine.test_identity import _place_eagerly
from tests.engine.test_invariance import bits
from tests.engine.test_structured import MODES, ROOMY, SETTINGS, Requests, asked, check, model_of, one, run
from tests.fakes import mixed_params, random_model
from tests.serve.fake_engine import VOCAB, fake_tokenizer
from tests.serve.http.scripted import QWEN, SPECIAL, tokenizer

BUDGETS = (None, 0, 1, 7, 20)


@dataclasses.dataclass(frozen=True)
class Intake:
    """An intake that lets every answer begin with thinking; every other prompt has opened it."""

    inner: Any
    begin: int
    end: int

    def request(self, request_id: str, prompt: Any, params: SamplingParams, **_: Any) -> Any:
        made = self.inner.request(request_id, prompt, dataclasses.replace(params, thinking_token_budget=None))
        thinks = params.grammar is not None or params.thinking_token_budget is not None
        tags = Thinking(self.begin, self.end, is_open=bool(prompt[0] % 2)) if thinks else None
        return dataclasses.replace(made, params=params, thinking=tags)


def thinking(tags: tuple[int, int], **settings: Any) -> LLM:
    llm: Any = LLM(model_of(), **{**SETTINGS, "num_pages": ROOMY, **settings})
    llm._intake = Intake(llm._intake, *tags)
    return llm


def make_requests(count: int) -> Requests:
    """Return requests with grammars with and without budgets, budgets only, and neither; all sampling features."""
    requests: Requests = []
    for number in range(count):
        changes = {
            "structured_outputs": asked(number) if number % 4 else None,
            "thinking_token_budget": BUDGETS[number % 5],
            "max_tokens": 30 + number % 29,
            **({"temperature": (0.0, 1.5)[number % 2]} if number % 3 else {}),
            **({"n": 2} if number % 7 == 5 else {}),
        }
        prompt = [(7 * number + i) % VOCAB for i in range(1 + 5 * number % 60)]
        requests.append((prompt, mixed_params(number, **changes)))
    return requests


@pytest.fixture(scope="module")
def tags() -> tuple[int, int]:
    """Return tokens that this model often emits first and later, so that thinking begins and ends spontaneously."""
    free = LLM(model_of(), num_pages=ROOMY, **SETTINGS)
    plain = [
        (prompt, dataclasses.replace(params, structured_outputs=None, thinking_token_budget=None))
        for prompt, params in make_requests(24)
    ]
    said = [sample.token_ids for output in run(free, plain) for sample in output.outputs]
    first = collections.Counter(ids[0] for ids in said).most_common(1)[0][0]
    later = collections.Counter(token for ids in said for token in set(ids[3:25]) if token != first)
    return first, later.most_common(1)[0][0]


@pytest.fixture(scope="module")
def alone(tags) -> tuple[Requests, list[RequestOutput]]:
    llm, requests, outputs = thinking(tags), make_requests(24), list[RequestOutput]()
    for request in requests:
        outputs += run(llm, [request])
        llm.engine.reset_prefix_cache()
    return requests, outputs


def test_a_thought_is_what_the_model_says_without_a_grammar_and_the_rest_is_of_the_grammar(alone, tags):
    """Up to the end of thinking, or the budget, tokens equal those of the request without grammar and budget."""
    requests, outputs = alone
    free = LLM(model_of(), num_pages=ROOMY, **SETTINGS)
    seen = collections.Counter[str]()
    for number, ((prompt, params), output) in enumerate(zip(requests, outputs, strict=True)):
        if params.grammar is None and params.thinking_token_budget is None:
            continue
        plain = dataclasses.replace(params, structured_outputs=None, thinking_token_budget=None)
        (expected,) = run(free, [(prompt, plain)])
        for sample, other in zip(output.outputs, expected.outputs, strict=True):
            seen += _looked_at(asked(number), prompt, params, sample, list(other.token_ids), tags)
    assert all(seen[name] >= 2 for name in ("ended", "closed", "never began", "whole")), seen


def _looked_at(
    constraint: Any, prompt: Any, params: SamplingParams, sample: Any, plain: list[int], tags: Any
) -> collections.Counter[str]:
    begin, end = tags
    said, seen = list(sample.token_ids), collections.Counter[str]()
    thought = bool(prompt[0] % 2) or said[0] == begin
    if not thought:
        seen["never began"] += 1
        answer = said
    else:
        first = 0 if prompt[0] % 2 else 1
        stop = said.index(end, first) if end in said[first:] else len(said)
        budget = params.thinking_token_budget
        assert budget is None or stop - first <= budget
        closed = stop - first == budget and stop < len(said)
        if first == 0 or plain[0] == begin:  # else the grammar barred the unconstrained first token
            assert said[:stop] == plain[:stop]
            assert stop == len(said) or closed or plain[stop] == end
        seen["closed" if closed else "ended"] += stop < len(said)
        answer = said[stop + 1 :]
    if params.grammar is not None and sample.finish_reason == "stop" and answer:
        whole = fake_tokenizer().decode(answer)
        check(constraint, whole[thought and whole[:1].isspace() :])
        seen["whole"] += 1
    return seen


@pytest.mark.parametrize("mode", [*MODES])
def test_every_mode_gives_the_bits_of_each_request_alone(alone, tags, mode, monkeypatch):
    requests, expected = alone
    changes, _ = MODES[mode]
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    if "num_pages" in changes:
        monkeypatch.setattr(SequencePages, "place", functools.partialmethod(_place_eagerly, SequencePages.place))
    llm = thinking(tags, **changes)
    outputs = run(llm, requests)
    assert llm.engine.stats().replay_mismatches == 0
    pairs = zip(map(bits, outputs), map(bits, expected), strict=True)
    assert not [index for index, (found, wanted) in enumerate(pairs) if found != wanted]


def test_a_thought_waits_for_nobody(tags):
    """A grammar after thinking adds no steps: the scheduler launches the next step before it reads the tokens."""
    counts = []
    for constraint in ({"regex": "a"}, None):
        llm = thinking((tags[0], VOCAB - 1))
        params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=constraint)
        llm.generate([[5, 6, 7]], params)
        counts.append(llm.engine.stats().steps)
    assert counts[0] == counts[1]


def test_a_budget_is_refused_where_no_thought_is_known():
    llm = LLM(model_of(), num_pages=ROOMY, **SETTINGS)
    with pytest.raises(RequestError, match="thinking_token_budget=3: no token is known"):
        llm.generate([[5]], SamplingParams(thinking_token_budget=3))
    plain = LLM(model_of(), num_pages=ROOMY, structured_output_helpers=0, **SETTINGS)
    with pytest.raises(RequestError, match="thinking_token_budget=3 needs"):
        plain.generate([[5]], SamplingParams(thinking_token_budget=3))
    assert one(llm, {"choice": ["a"]}).text == "a"


def test_a_conversation_with_a_model_that_thinks():
    """The chat template opens thinking. The budget closes it, and the rest satisfies the choice."""
    tokens = tokenizer()
    model = random_model(seed=0, vocab_size=VOCAB + len(SPECIAL)).replace(
        tokenizer=tokens, chat_template=ChatTemplate(QWEN + "{%- if add_generation_prompt %}<think>{% endif %}")
    )
    llm = LLM(model, num_pages=ROOMY, **SETTINGS)
    params = SamplingParams(
        temperature=1.5, seed=3, max_tokens=80, thinking_token_budget=9, structured_outputs={"choice": ["yes", "no"]}
    )
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    said = list(output.outputs[0].token_ids)
    assert said[9] == tokens.token_to_id("</think>")
    assert tokens.decode(said[10:]).strip() in ("yes", "no")
    assert output.outputs[0].finish_reason == "stop"
    (held,) = llm.chat(
        [{"role": "user", "content": "Hi"}],
        SamplingParams(max_tokens=9, structured_outputs={"choice": ["yes"], "enable_in_reasoning": True}),
    )
    assert held.outputs[0].text == "yes"
