"""Requests with images: the bits of each alone in every serving mode, and the logits of `Model.apply`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.make import make_engine
from jaxinfer.engine.execution.compiled import CompiledStage
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.stages import cut
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.models.model import Model
from jaxinfer.types import Request, SequenceDelta
from tests.engine.test_identity import preempted
from tests.fake_vision import make_image, make_image_request, text, vision_model
from tests.fakes import mixed_params, random_head, random_model
from tests.lora.drawn import drawn

ROOMY, TIGHT = 80, 20
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 160, "page_size": 16, "prefill_sizes": (16, 64)}
KINDS: dict[str, dict[str, Any]] = {
    "one axis": {},
    "three axes, deepstack": {"axes": True, "deep": 1},
    "both directions": {"bidirectional": True},
}
MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "full batch": ({}, lambda stats: stats.encoder_hits > 0),
    "small budget": ({"max_num_batched_tokens": 68}, lambda stats: True),
    "small encoder cache": ({"encoder_cache_size": 64 + 2 * 16}, lambda stats: True),
    "no prefix cache": ({"enable_prefix_caching": False}, lambda stats: not stats.kv.cached),
    "recomputed": ({"num_pages": TIGHT, "swap_space_gib": 0}, preempted("recompute")),
    "swapped": ({"num_pages": TIGHT}, preempted("swap")),
    "several steps": ({"multi_step": 4}, lambda stats: True),
    "drafts": ({"speculative": "ngram", "speculative_adaptive": False}, lambda stats: stats.draft_accepted > 0),
}
MOST = ("one axis", "full batch"), ("both directions", "full batch"), ("both directions", "recomputed")
FAST = [("three axes, deepstack", mode) for mode in ("full batch", "swapped", "drafts")] + [*MOST[1:]]
MORE = [("three axes, deepstack", mode) for mode in MODES] + [MOST[0], ("both directions", "small budget")]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in FAST)]


def make_engine_of(model: Model, **changes: Any) -> EngineCore:
    return make_engine(model, EngineConfig(**{**SETTINGS, "num_pages": ROOMY, **changes}), "cpu")


def make_requests(count: int = 14) -> list[Request]:
    """Return prompts with images, some shared, of several sizes, and videos, which are larger than any encoder program;
    some repeat themselves or have several samples."""
    images = [make_image(number, *size) for number, size in enumerate([(4, 6), (8, 8), (2, 2), (8, 4), (6, 6)])]
    requests, video = [], make_image(9, 8, 4, frames=3)
    for number in range(count):
        shared = [text(0, 9), images[number % 3], text(1, 40 if number % 4 == 3 else 3)]
        own = [images[3 + number % 2], text(number, 5 + number)] if number % 3 else [text(2, 6) * 3]
        own += [video, text(number, 2)] if number % 4 == 1 else []
        parts = [*shared, *own, text(number, 3)] if number % 5 else [text(number, 12)]
        request = make_image_request(str(number), parts)
        changes: dict[str, Any] = {"n": 3} if number == 7 else {}
        params = mixed_params(number, max_tokens=6 + 3 * number, logprobs=2, **changes)
        requests.append(dataclasses.replace(request, params=params))
    return requests


def run(engine: EngineCore, requests: Sequence[Request]) -> dict[tuple[str, int], list[Any]]:
    """Return tokens, log probabilities and prompt log probabilities of each sample."""
    found: dict[tuple[str, int], list[Any]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            _take(found.setdefault((delta.request_id, delta.index), [[], [], None]), delta)
    engine.check()
    return found


def _take(output: list[Any], delta: SequenceDelta) -> None:
    output[0] += delta.token_ids
    output[1] += [(each.chosen.logprob, each.top) for each in delta.logprobs]
    output[2] = output[2] or delta.prompt_logprobs


def alone(engine: EngineCore, requests: Sequence[Request]) -> dict[tuple[str, int], list[Any]]:
    """Return the results of each request alone, the prefix cache reset in between."""
    found: dict[tuple[str, int], list[Any]] = {}
    for request in requests:
        found |= run(engine, [request])
        engine.reset_prefix_cache()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[Model, dict[tuple[str, int], list[Any]]]]:
    return {}


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_every_mode_gives_the_bits_of_each_request_alone(expected, kind, mode, monkeypatch):
    requests, (changes, happened) = make_requests(), MODES[mode]
    if kind not in expected:
        model = vision_model(**KINDS[kind])
        expected[kind] = model, alone(make_engine_of(model), requests)
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    model, wanted = expected[kind]
    engine = make_engine_of(model, **changes)
    with count_compilations() as compilations:
        assert run(engine, requests) == wanted
        assert run(engine, requests[::-1]) == wanted
    stats: EngineStats = engine.stats()
    assert compilations.count == 0
    assert stats.encoder_queries > 0
    assert stats.replay_mismatches == 0
    assert happened(stats), stats


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_function(kind):
    model = vision_model(**KINDS[kind])
    parts = [text(1, 9), make_image(1), text(2, 5), make_image(2, 8, 8), text(3, 50), make_image(3, 8, 6), text(4, 3)]
    request = make_image_request("a", parts, most=9, logprobs=0, prompt_logprobs=0, temperature=0.0)
    tokens, logprobs, prompt = run(make_engine_of(model), [request])["a", 0]
    known = [*request.prompt_token_ids, *tokens]
    logits = model.apply(model.params, jnp.asarray(known[:-1]), [placed.image for placed in request.images])
    want = jax.nn.log_softmax(logits)[np.arange(len(known) - 1), np.asarray(known[1:])]
    found = [*(each.chosen.logprob for each in prompt[1:]), *(logprob for logprob, _ in logprobs)]
    np.testing.assert_allclose(found, want, rtol=0, atol=5e-6)


def test_an_image_changes_the_output():
    engine = make_engine_of(vision_model())
    first, second = (make_image_request(str(n), [text(1, 40), make_image(n), text(2, 9)], logprobs=0) for n in (1, 2))
    outputs = run(engine, [first]) | run(engine, [second])
    assert outputs["1", 0] != outputs["2", 0]


def test_the_programs_of_a_text_model_are_those_without_images():
    """No operand, and no instruction, is there for images where a model has no tower."""
    model = random_model()
    stage = _compiled(make_engine_of(model))
    seeing = _compiled(make_engine_of(vision_model(), limit_mm_per_prompt=("image=0",)))
    assert not stage.encode
    for name in ("prefill", "decode"):
        for key, program in getattr(stage, name).items():
            assert _instructions(program) == _instructions(getattr(seeing, name)[key])


def _instructions(program: Any) -> list[str]:
    lines = (line for line in program.as_text().splitlines() if " = " in line)
    return [re.sub(r", metadata=\{.*?\}", "", line) for line in lines]


def _compiled(engine: Any) -> CompiledStage:
    found: CompiledStage = engine._executor.runtimes[0].run
    return found


@pytest.mark.parametrize(
    "method", ["eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("draft_model", "eagle3", "medusa"))]
)
def test_drafts_of_a_model_or_a_head_change_no_bit(method):
    """A drafter reads placeholders as text, which its drafts may suffer from, but no token."""
    model = vision_model(axes=True, deep=1, num_hidden_layers=4)
    draft = random_model(num_hidden_layers=4) if method == "draft_model" else random_head(method, model)
    rows = {"max_num_seqs": 6, "num_speculative_tokens": 5, "speculative_adaptive": False}
    named = {"speculative_model": "draft"} if method == "draft_model" else {}
    engine = make_engine_of(model.replace(draft=draft), speculative=method, **named, **rows)
    requests = make_requests(9)
    want = alone(make_engine_of(model, speculative="ngram", **rows), requests)
    with count_compilations() as compilations:
        assert run(engine, requests) == want
        assert run(engine, requests[::-1]) == want
    assert compilations.count == 0
    assert engine.stats().draft_tokens > 0


def test_adapters_of_the_text_model_are_served_with_images(monkeypatch):
    monkeypatch.setattr("jaxinfer.lora.open.read_adapter", lambda folder, specs, **_: drawn(specs, folder.name))
    engine = make_engine_of(vision_model(axes=True, deep=1), enable_lora=True, max_loras=2, max_lora_rank=4)
    assert engine.loras is not None
    adapters = [None, *(engine.loras.load(name, name) for name in ("pirate", "poet"))]
    requests = [dataclasses.replace(each, lora=adapters[number % 3]) for number, each in enumerate(make_requests(9))]
    want = alone(engine, requests)
    assert run(engine, requests) == want
    plain = run(engine, [dataclasses.replace(requests[1], lora=None)])
    assert plain["1", 0][0] != want["1", 0][0]


def test_layers_with_states_are_served_with_images():
    states = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}
    model = vision_model(architectures=["Lfm2ForCausalLM"], model_type="lfm2", norm_eps=1e-5, **states)
    requests = make_requests(9)
    engine = make_engine_of(model)
    want = alone(engine, requests)
    assert run(engine, requests) == want
    assert run(engine, requests[::-1]) == want


def test_the_first_stage_must_have_the_layers_that_images_are_added_to():
    model = vision_model(deep=2, num_hidden_layers=2)
    with pytest.raises(EngineConfigError, match="pipeline_parallel_size"):
        cut(model, 2)


def test_the_tower_and_the_encoder_cache_are_in_the_memory_plan():
    config = EngineConfig(**SETTINGS, num_pages=ROOMY, encoder_cache_size=1000)
    with_tower = plan_engine(vision_model(deep=1), config, "cpu").needs
    without = plan_engine(
        vision_model(deep=1),
        dataclasses.replace(config, limit_mm_per_prompt=("image=0",), encoder_cache_size=None),
        "cpu",
    ).needs
    assert with_tower.images == 1000 * 2 * 32 * 4
    assert with_tower.weights - without.weights == 13 * 2 * 32 * 4
    assert without.images == 0
