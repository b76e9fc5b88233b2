"""Served log-probabilities, `LLM.logprobs` and `Model.logprobs` of mixed sequences: the largest difference is 0."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_identity import LENGTH, ROOMY, SETTINGS, TIGHT, preempted
from tests.fakes import mixed_params, random_model
from tests.quant.examples import LAYOUTS
from tests.quant.models import stored_and_plain

SWAP = "jaxinfer.engine.scheduling.pages.prefer_swap"
MODES: dict[str, dict[str, Any]] = {
    "prefix hits": {"num_pages": ROOMY},
    "swapped": {"num_pages": TIGHT},
    "recomputed": {"num_pages": TIGHT, "swap_space_gib": 0},
    "drafted": {"num_pages": ROOMY, "speculative": "ngram", "speculative_adaptive": False},
    "8-bit weights": {"num_pages": TIGHT},
}


def requests(count: int, vocab: int) -> list[tuple[list[int], SamplingParams]]:
    """Return requests of all kinds whose log-probabilities are reported; prompts share prefixes."""
    rng = np.random.default_rng(7)
    shared = [rng.integers(0, vocab, 80).tolist() for _ in range(3)]
    made = []
    for number in range(count):
        own = rng.integers(0, vocab, int(rng.integers(1, 40))).tolist()
        params = mixed_params(number, max_tokens=5 + number % 14, logprobs=0, prompt_logprobs=None)
        prompt = [*shared[number % 3][: 16 * (number % 5)], *own]
        made.append((prompt, dataclasses.replace(params, n=2) if number % 9 == 4 else params))
    return made


def model_of(mode: str, folder: pathlib.Path) -> Model:
    if mode != "8-bit weights":
        return random_model()
    model = random_model(hidden_size=64, intermediate_size=64)
    layout = LAYOUTS["int8 a channel"]
    return stored_and_plain(model, folder, lambda name, _: None if "embed" in name else layout)[0]


def largest_differences(llm: LLM, count: int) -> tuple[int, float, float]:
    """Return the number of tokens, and the largest differences of `LLM.logprobs` and of `Model.logprobs`."""
    asked = requests(count, llm.model.config.vocab_size)
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    rows = [(whole.prompt_token_ids, sample) for whole in outputs for sample in whole.outputs]
    served = [sample.arrays.logprobs for _, sample in rows]
    again = llm.logprobs([prompt for prompt, _ in rows], [sample.token_ids for _, sample in rows])
    by_engine = max(np.abs(one - other).max() for one, other in zip(served, again, strict=True))
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    for row, (prompt, sample) in enumerate(rows):
        tokens[row, : len(prompt) + len(sample.token_ids)] = [*prompt, *sample.token_ids]
    begins = np.array([len(prompt) for prompt, _ in rows], np.int32)
    ends = begins + np.array([len(sample.token_ids) for _, sample in rows], np.int32)
    found = np.asarray(
        llm.model.logprobs(
            llm.model.params,
            jnp.asarray(tokens),
            like=llm,
            prompt_lengths=jnp.asarray(begins),
            lengths=jnp.asarray(ends),
        )
    )
    by_trainer = max(np.abs(found[row, begins[row] - 1 : ends[row] - 1] - one).max() for row, one in enumerate(served))
    return sum(map(len, served)), float(by_engine), float(by_trainer)


@pytest.mark.parametrize(
    ("mode", "count"),
    [("swapped", 40), *(pytest.param(mode, 200, marks=pytest.mark.slow) for mode in MODES)],
)
def test_nothing_differs(mode, count, tmp_path, monkeypatch):
    if mode == "swapped":
        monkeypatch.setattr(SWAP, lambda *_: True)
    llm = LLM(model_of(mode, tmp_path), **SETTINGS, **MODES[mode])
    tokens, by_engine, by_trainer = largest_differences(llm, count)
    assert (by_engine, by_trainer) == (0.0, 0.0)
    assert tokens > 5 * count
    stats = llm.engine.stats()
    happened = {
        "prefix hits": stats.prefix_hits > 0,
        "swapped": preempted("swap")(stats),
        "recomputed": preempted("recompute")(stats),
        "drafted": stats.draft_accepted > 0,
        "8-bit weights": True,
    }
    assert happened[mode]
