"""docs/speculation.md: the drafter of the page works."""

import pathlib
import re

import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.spec import drafter
from tests.fakes import random_model

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "speculation.md"


def test_the_drafter_of_the_page_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "_MAKERS", dict(drafter._MAKERS))
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(block, {})
    settings = {"max_model_len": 64, "page_size": 16, "prefill_sizes": (16,), "max_num_seqs": 5}
    prompts = [np.random.default_rng(0).integers(90, size=9).tolist(), [5] * 12]
    params = SamplingParams(temperature=0.0, max_tokens=30, frequency_penalty=-0.5, seed=0)
    texts = []
    for changes in ({}, {"speculative": "echo", "speculative_adaptive": False}):
        llm = LLM(random_model(num_hidden_layers=1), **settings, **changes)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    stats = llm.engine.stats()
    assert stats.draft_tokens > stats.draft_accepted > 0
