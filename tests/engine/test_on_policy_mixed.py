"""Served log-probabilities, `LLM.logprobs` and `Model.logprobs` of mixed sequences: the largest difference is 0."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.lora.adapter import Adapter
from jaxinfer.lora.merge import declared
from jaxinfer.models.model import Model
from jaxinfer.outputs import CompletionOutput
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_identity import LENGTH, ROOMY, SETTINGS, TIGHT, preempted
from tests.fakes import mixed_params, random_model
from tests.lora.drawn import drawn
from tests.quant.examples import LAYOUTS
from tests.quant.models import stored_and_plain

SWAP = "jaxinfer.engine.scheduling.pages.prefer_swap"
MODES: dict[str, dict[str, Any]] = {
    "prefix hits": {"num_pages": ROOMY},
    "swapped": {"num_pages": TIGHT},
    "recomputed": {"num_pages": TIGHT, "swap_space_gib": 0},
    "drafted": {"num_pages": ROOMY, "speculative": "ngram", "speculative_adaptive": False},
    "8-bit weights": {"num_pages": TIGHT},
    "adapters": {"num_pages": TIGHT, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4},
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


def adapters_of(mode: str, model: Model) -> dict[str | None, Adapter | None]:
    """Return the adapters of requests, in turn: of two, more than fit into the banks, and of none."""
    if mode != "adapters":
        return {None: None}
    return {name: drawn(declared(model), name, rank) for name, rank in (("a", 2), ("b", 4), ("c", 3))} | {None: None}


def padded(rows: list[tuple[list[int], CompletionOutput]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of sequences, and their numbers of prompt tokens and of all."""
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    for row, (prompt, sample) in enumerate(rows):
        tokens[row, : len(prompt) + len(sample.token_ids)] = [*prompt, *sample.token_ids]
    begins = np.array([len(prompt) for prompt, _ in rows], np.int32)
    return tokens, begins, begins + np.array([len(sample.token_ids) for _, sample in rows], np.int32)


def largest_differences(llm: LLM, count: int, adapters: dict[str | None, Adapter | None]) -> tuple[int, float, float]:
    """Return the number of tokens, and the largest differences of `LLM.logprobs` and of `Model.logprobs`."""
    asked, model = requests(count, llm.model.config.vocab_size), llm.model
    names = [name for name, _ in zip(itertools.cycle(adapters), asked, strict=False)]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], lora=names)
    each: dict[str | None, list[Any]] = {name: [] for name in adapters}
    for whole, name in zip(outputs, names, strict=True):
        each[name] += [(whole.prompt_token_ids, sample) for sample in whole.outputs]
    compared, by_engine, by_trainer = 0, 0.0, 0.0
    for name, rows in each.items():
        served = [sample.arrays.logprobs for _, sample in rows]
        again = llm.logprobs([prompt for prompt, _ in rows], [sample.token_ids for _, sample in rows], lora=name)
        tokens, begins, ends = map(jnp.asarray, padded(rows))
        given = {"prompt_lengths": begins, "lengths": ends, "lora": adapters[name]}
        found = np.asarray(model.logprobs(model.params, tokens, like=llm, **given))
        mine = [found[row, begins[row] - 1 : ends[row] - 1] for row in range(len(rows))]
        by_engine = max(by_engine, *(float(np.abs(x - y).max()) for x, y in zip(served, again, strict=True)))
        by_trainer = max(by_trainer, *(float(np.abs(x - y).max()) for x, y in zip(served, mine, strict=True)))
        compared += sum(map(len, served))
    return compared, by_engine, by_trainer


@pytest.mark.parametrize(
    ("mode", "count"),
    [("swapped", 40), ("adapters", 40), *(pytest.param(mode, 200, marks=pytest.mark.slow) for mode in MODES)],
)
def test_nothing_differs(mode, count, tmp_path, monkeypatch):
    if mode == "swapped":
        monkeypatch.setattr(SWAP, lambda *_: True)
    model = model_of(mode, tmp_path)
    llm, adapters = LLM(model, **SETTINGS, **MODES[mode]), adapters_of(mode, model)
    for name, adapter in adapters.items():
        if name is not None and adapter is not None:
            llm.load_lora(name, adapter)
    tokens, by_engine, by_trainer = largest_differences(llm, count, adapters)
    assert (by_engine, by_trainer) == (0.0, 0.0)
    assert tokens > 5 * count
    stats = llm.engine.stats()
    happened = {
        "prefix hits": stats.prefix_hits > 0,
        "swapped": preempted("swap")(stats),
        "recomputed": preempted("recompute")(stats),
        "drafted": stats.draft_accepted > 0,
        "8-bit weights": True,
        "adapters": sum(stats.preemptions.values()) > 0,
    }
    assert happened[mode]
