"""Draft heads next to the target model draft as computed from its hidden states. Bitwise identity: test_identity."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.draft_heads import load_head
from jaxinfer.engine.execution.runner import Launched, Runner
from jaxinfer.layers.attention import causal_attend
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.head import shared
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.engine.test_identity import ROOMY, Requests, alone, check_mode, make_requests
from tests.engine.test_identity import SETTINGS as IDENTITY
from tests.fakes import mixed_params, random_head, random_model
from tests.models.parity import tokenizer_json
from tests.models.test_head_goldens import golden
from tools.oracle.heads_golden import write_head_checkpoint

DRAFTS = 3
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 160,
    "page_size": 16,
    "prefill_sizes": (16, 64),
    "num_pages": 60,
    "num_speculative_tokens": DRAFTS,
    "speculative_adaptive": False,
}
PROMPTS = [[(7 * number + place * place) % 97 for place in range(5 + 20 * number)] for number in range(4)]
Said = dict[tuple[int, ...], list[int]]
"""Draft tokens by the tokens of the sequence before them."""


@functools.cache
def with_head(method: str) -> Model:
    """Return a model with a random draft head, or the demo model with its own head, which is often right."""
    if method == "demo":
        model = load_model("demo", "float32", show_progress=False)
        return model.replace(draft=load_head("demo-eagle3", "eagle3", model, make_mesh()))
    model = random_model(num_hidden_layers=4)
    return model.replace(draft=random_head(method, model))


LENGTH = 160


def reference(model: Model, ids: jax.Array, count: jax.Array, ranks: int = 0) -> jax.Array:
    """Return the greedy draft tokens of a head after the first ``count`` of ``ids`` [1, LENGTH], computed over
    contiguous sequences. ``ranks``: of Medusa, so many of the likeliest tokens in order."""
    head: Any = model.draft
    params = {**head.params, **shared(model.params, head.config)}
    module: Any = model.module.clone(taps=head.config.taps)
    positions = jnp.arange(LENGTH)[None]
    (hidden, _), sown = module.apply(
        {"params": model.params}, ids, positions, causal_attend, None, mutable=["features"]
    )
    features = jnp.concatenate(sown["features"]["taps"], -1) if head.config.taps else hidden

    def apply(*operands: Any, method: str | None = None) -> Any:
        return head.module.apply({"params": params}, *operands, method=method)

    if ranks:
        return jnp.argsort(-apply(features[0, count - 2], method="guesses"), -1)[:DRAFTS, :ranks]
    if not head.module.recurrent:
        return jnp.argmax(apply(features[0, count - 2], method="guesses"), -1)[:DRAFTS]
    following, entering, drafted = jnp.roll(ids, -1, axis=1), apply(features, method="first"), []
    for step in range(DRAFTS):
        states, _ = apply(following, entering, positions, causal_attend, None)
        newest = states[:, count - 2 + step]
        drafted.append(jnp.argmax(apply(newest, method="head"), -1)[0])
        following = following.at[0, count - 1 + step].set(drafted[-1])
        entering = entering.at[:, count - 1 + step].set(newest)
    return jnp.stack(drafted)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Record what engines draft."""
    found: Said = {}
    read = Runner.read

    def watched(runner: Runner, launched: Launched | None) -> Any:
        result = read(runner, launched)
        for draft in (result.plan.drafts or ()) if result else ():
            found[tuple(draft.sequence.tokens[: draft.start])] = draft.tokens
        return result

    monkeypatch.setattr(Runner, "read", watched)
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "together": {},
    "recomputed": {"num_pages": 11, "swap_space_gib": 0, "enable_prefix_caching": False},
    "preempted": {"num_pages": 11},
    "paths": {"speculative_tree": 3, "max_num_seqs": 4},
}


QUICK = {("demo", mode) for mode in CHANGES} | {("medusa", "paths"), ("eagle", "alone"), ("eagle3", "recomputed")}


CHOICES = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [3]]
TREE = [(0, 0, 0), (1,), (0, 1), (2,)]  # its first paths


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_paths_are_those_of_a_static_tree(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the file of Medusa's heads: likeliest tokens by rank, those of a sampled request with its noise."""
    model = random_model(num_hidden_layers=4)
    model = model.replace(draft=random_head("medusa", model, medusa_choices=CHOICES))
    llm = LLM(model, **{**SETTINGS, "speculative": "medusa", "speculative_tree": 4})
    shapes, wrong, read = set(), 0, Runner.read
    guesses = jax.jit(functools.partial(reference, model, ranks=4))

    def watched(runner: Runner, launched: Launched | None) -> Any:
        nonlocal wrong
        result = read(runner, launched)
        for draft in (result.plan.drafts or ()) if result else ():
            shapes.add(tuple(map(len, draft.paths)))
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, : draft.start] = draft.sequence.tokens[: draft.start]
            by_rank = guesses(padded, draft.start)
            named = [[int(by_rank[place, rank]) for place, rank in enumerate(ranks)] for ranks in TREE]
            wrong += sum(not any(path == other[: len(path)] for other in named) for path in draft.paths)
        return result

    monkeypatch.setattr(Runner, "read", watched)
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=1)
    found = llm.generate(PROMPTS[:1], params)
    assert shapes >= {tuple(map(len, TREE))}
    assert (wrong == 0) == (temperature == 0)
    plain = LLM(model, **SETTINGS).generate(PROMPTS[:1], params)
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def cases(methods: list[str], others: Any) -> list[Any]:
    """Return all pairs; those not in QUICK are marked slow."""
    pairs = itertools.product(methods, others)
    return [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("method", "mode"), cases(["medusa", "eagle", "eagle3", "demo"], CHANGES))
def test_drafts_are_those_of_the_plain_equations(method: str, mode: str, said: Said) -> None:
    model = with_head(method)
    llm = LLM(model, **{**SETTINGS, "speculative": "eagle3" if method == "demo" else method, **CHANGES[mode]})
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for _ in range(2):  # the second run hits the prefix cache
        llm.generate(PROMPTS, params)
    llm.engine.check()
    assert method == "demo" or "num_pages" not in CHANGES[mode] or sum(llm.engine.stats().preemptions.values())
    assert len(said) > 40
    assert method != "demo" or 1 + llm.engine.stats().draft_accepted / llm.engine.stats().drafts > 1.5
    expected, wrong = jax.jit(functools.partial(reference, model)), 0
    for tokens, drafted in said.items():
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        wrong += expected(padded, len(tokens))[: len(drafted)].tolist() != drafted
    # A sequence swapped in from the host lacks a few feature pairs, or those of pages that hit the prefix cache.
    assert wrong <= len(said) * (0.1 if mode == "preempted" else 0.02), (wrong, len(said))


@functools.cache
def requests_alone(slots: int) -> tuple[Requests, list[Any]]:
    """Compute them with the same slot count: other programs may give logprobs that differ by a rounding."""
    model = random_model(num_hidden_layers=4)
    requests = make_requests(16, model.config.vocab_size)
    return requests, alone(model, requests, **{**IDENTITY, "max_num_seqs": slots})


IDENTITY_CHANGES: dict[str, dict[str, Any]] = {
    "full batch": {},
    "preempted": {"num_pages": 24, "max_num_seqs": 6},
    "trees": {"speculative_tree": 3, "max_num_seqs": 2},
}
QUICK |= {("eagle3", "preempted"), ("eagle3", "trees"), ("medusa", "trees"), ("eagle", "full batch")}


@pytest.mark.parametrize(("method", "mode"), cases(["medusa", "eagle", "eagle3"], IDENTITY_CHANGES))
def test_no_bit_depends_on_them(method: str, mode: str) -> None:
    changes = IDENTITY_CHANGES[mode]
    requests, expected = requests_alone(6 if mode == "preempted" else IDENTITY["max_num_seqs"])
    settings = {**IDENTITY, "num_pages": ROOMY, "num_speculative_tokens": 4, "speculative_adaptive": False, **changes}
    llm = LLM(with_head(method), speculative=method, **settings)
    check_mode(llm, requests, expected, lambda stats: 0 < stats.draft_accepted < stats.draft_tokens)
    assert "num_pages" not in changes or sum(llm.engine.stats().preemptions.values())


@pytest.mark.parametrize("name", ["mtp-deepseek-v3", pytest.param("mtp-deepseek-v3-dense", marks=pytest.mark.slow)])
def test_a_layer_of_the_models_own_folder_drafts(name: str, tmp_path: pathlib.Path) -> None:
    check_mtp(name, tmp_path)


def check_mtp(name: str, tmp_path: pathlib.Path, **axes: int) -> None:
    """Check that tokens and logprobs equal those without drafts, with some drafts accepted."""
    case = golden(name)
    folder = write_head_checkpoint(tmp_path, case)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(128)))
    settings: dict[str, Any] = {**SETTINGS, "max_model_len": 96, "dtype": "float32", "show_progress": False, **axes}
    prompts = [[place % 120 for place in prompt[:40]] for prompt in PROMPTS]
    params = SamplingParams(temperature=0.5, max_tokens=30, seed=2, ignore_eos=True, logprobs=1)
    plain, drafting = LLM(str(folder), **settings), LLM(str(folder), speculative="mtp", **settings)
    found = [[output.outputs for output in llm.generate(prompts, params)] for llm in (plain, drafting)]
    assert found[0] == found[1]
    stats = drafting.engine.stats()
    assert stats.draft_tokens > 50
    assert stats.draft_accepted > 0


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(seed: int) -> None:
    """Random prompts, lengths, samplers and aborts, with trees and page shortage, leave no page in use."""
    model, chance = with_head("eagle3"), np.random.default_rng(seed)
    settings = {**SETTINGS, "num_pages": 24, "max_num_seqs": 12, "speculative": "eagle3", "speculative_tree": 2}
    engine: Any = LLM(model, **settings).engine
    kept = engine.stats().kv
    alive, added = list[str](), 0
    with count_compilations() as compilations:
        while added < 10_000 or engine.has_work:
            while added < 10_000 and len(alive) < 24:
                prompt = tuple(chance.integers(97, size=chance.integers(1, 60)).tolist())
                counts = {"n": int(chance.integers(1, 3)), "max_tokens": int(chance.integers(4, 10))}
                engine.add(Request(f"{added}", prompt, mixed_params(int(chance.integers(100)), **counts)))
                alive.append(f"{added}")
                added += 1
            if alive and chance.random() < 0.1:
                engine.abort(alive[int(chance.integers(len(alive)))])
            engine.step()
            alive = [name for name in alive if name in engine._scheduler._requests]
    engine.check()
    engine.reset_prefix_cache()  # cached prompt pages, some of them on the host
    stats = engine.stats()
    assert compilations.count == 0
    assert (stats.running, stats.kv) == (0, kept)
    assert stats.draft_accepted > 100
    assert sum(stats.preemptions.values()) > 10
