"""Grammars of all kinds: finished outputs parse with `lark`, and are bitwise identical to each request alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lark
import pytest

from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_structured import ROOMY, SETTINGS, model_of
from tests.structured.grammars import ALL


@functools.cache
def parser_of(text: str) -> lark.Lark:
    return lark.Lark(text, parser="earley", lexer="dynamic_complete")


def is_of(text: str, grammar: str) -> bool:
    try:
        parser_of(grammar).parse(text)
    except lark.LarkError:
        return False
    return True


def outputs_of(llm: LLM, temperature: float, prompt: Any) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=48, structured_outputs={"grammar": asked})
        for i, (_, asked, _) in enumerate(ALL)
    ]
    return llm.generate([prompt] * len(params), params)


def said(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_there_are_thirty():
    assert len(ALL) == len({name for name, _, _ in ALL}) == 30


@pytest.mark.parametrize("name", ["demo", "random"])
def test_outputs_are_of_their_grammars(name):
    model: Model | str = "demo" if name == "demo" else model_of(3)
    prompt = "ROMEO:\n" if name == "demo" else [5, 6, 7]
    settings: dict[str, Any] = {**SETTINGS, "num_pages": ROOMY}
    plain, drafts = LLM(model, **settings), LLM(model, speculative="grammar", **settings)
    for temperature, least in ((0.0, 8), (1.5, 18)):
        outputs, ended = outputs_of(plain, temperature, prompt), 0
        for (which, _, grammar), output in zip(ALL, outputs, strict=True):
            sample = output.outputs[0]
            assert sample.finish_reason in ("stop", "length"), (which, sample)
            if sample.finish_reason == "stop":
                assert is_of(sample.text, grammar), (which, sample.text)
                ended += 1
        assert ended >= least
        assert said(outputs) == said(outputs_of(drafts, temperature, prompt))
        alone = plain.generate(
            [prompt],
            SamplingParams(temperature=temperature, seed=4, max_tokens=48, structured_outputs={"grammar": ALL[4][1]}),
        )
        assert said(alone) == said(outputs[4:5])


def test_the_oracle_tells_them_apart():
    for number, (name, _, grammar) in enumerate(ALL):
        assert not is_of("", grammar), name
        assert not is_of("no text of any of them!", grammar), (name, number)
