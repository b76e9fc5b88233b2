"""Served adapters: equal to `apply`, without effect on the bits of other requests and of the base model."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.lora.door import LoRARequest
from jaxinfer.models.model import Model
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_invariance import bits
from tests.fakes import random_head
from tests.lora.goldens import GOLDENS, golden, load_base, read

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "page_size": 4,
    "prefill_sizes": (8, 16),
    "num_pages": 80,
    "show_progress": False,
}
LORAS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
FAMILIES = {
    "llama": ("llama-all-linear", "llama-dora", "llama-qv", "llama-lora-bias"),
    "qwen2": ("qwen2-qkv", "qwen2-bias-all", "qwen2-bias-dora"),
    "gpt2": ("gpt2-all", "gpt2-dora"),
    "mixtral": ("mixtral-attention", "mixtral-experts"),
    "gemma": ("gemma-all", "gemma-dora-rslora"),
    "phi3": ("phi3-all", "phi3-dora"),
    "falcon": ("falcon-all",),
    "llama-int8": ("llama-int8-all", "llama-int8-dora"),
    "llama-nf4": ("llama-nf4-all", "llama-nf4-dora"),
}
TOLERANCE = 1e-5
VOCABULARY: dict[str, Any] = {"lora_target_modules": ("all-linear", "embed_tokens", "lm_head")}
OF_VOCABULARY = {
    "llama": ("llama-vocabulary", "llama-vocabulary-dora", "llama-qv", "llama-tokens", "llama-head-tokens"),
    "tied": ("llama-tied-embeddings", "llama-tied-head", "llama-tied-tokens"),
    "gemma": ("gemma-vocabulary", "gemma-all"),
    "gpt2": ("gpt2-vocabulary", "gpt2-all"),
    "phi": ("phi-head",),
}
FAST = ("llama", "mixtral", "gpt2", "llama-nf4", "tied")


def asked(model: Model, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng, vocab = np.random.default_rng(0), model.config.vocab_size
    prompts = [rng.integers(0, vocab, 2 + 5 * number % 23).tolist() for number in range(count)]
    params = [
        SamplingParams(
            temperature=number % 2, seed=number, max_tokens=9, logprobs=1, prompt_logprobs=1, ignore_eos=True
        )
        for number in range(count)
    ]
    return prompts, params


def request(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, str(GOLDENS / name))


def check_is_apply(model: Model, prompt: list[int], output: RequestOutput) -> None:
    (sample,) = output.outputs
    tokens = [*prompt, *sample.token_ids]
    known = jax.nn.log_softmax(model(jnp.asarray([tokens]))[0])
    expected = np.asarray(known)[np.arange(len(tokens) - 1), tokens[1:]]
    assert output.prompt_logprobs is not None
    assert sample.logprobs is not None
    told = (*output.prompt_logprobs[1:], *sample.logprobs)
    said = [each[token].logprob for each, token in zip(told, tokens[1:], strict=True) if each is not None]
    np.testing.assert_allclose(said, expected, atol=TOLERANCE)


def fast_first(families: Mapping[str, Any]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in families]


@pytest.mark.parametrize("family", fast_first(FAMILIES))
def test_each_says_what_apply_says_alone_and_mixed(family: str, tmp_path: pathlib.Path) -> None:
    check_each(FAMILIES[family], tmp_path)


@pytest.mark.parametrize("family", fast_first(OF_VOCABULARY))
def test_adapters_of_embeddings_and_heads(family: str, tmp_path: pathlib.Path) -> None:
    check_each(OF_VOCABULARY[family], tmp_path, **VOCABULARY)


def check_each(named: Sequence[str], tmp_path: pathlib.Path, **settings: Any) -> None:
    """Check that requests of each adapter and of none match `apply`, and are bitwise identical to each alone; those of
    none also to an engine without adapters."""
    names = [*named, None]
    base = load_base(golden(names[0] or ""), tmp_path / "base")
    adapted = [base if name is None else base.with_lora(read(GOLDENS / name, base)) for name in names]
    prompts, params = asked(base, 2 * len(names))
    of_each = [names[number % len(names)] for number in range(len(prompts))]
    llm = LLM(base, max_loras=2, **LORAS, **SETTINGS, **settings)
    with count_compilations() as compilations:
        mixed = llm.generate(prompts, params, lora=[request(name) for name in of_each])
    assert compilations.count == 0
    llm.engine.check()
    for number, output in enumerate(mixed):
        check_is_apply(adapted[number % len(names)], prompts[number], output)
    for number, output in enumerate(mixed):
        llm.engine.reset_prefix_cache()
        (alone,) = llm.generate([prompts[number]], [params[number]], lora=request(of_each[number]))
        assert bits(alone) == bits(output)
    without = [at for at, name in enumerate(of_each) if name is None]
    plain = LLM(base, **SETTINGS).generate([prompts[at] for at in without], [params[at] for at in without])
    assert [bits(mixed[at]) for at in without] == [bits(each) for each in plain]


def test_requests_without_one_have_the_bits_of_an_engine_without_any(tmp_path: pathlib.Path) -> None:
    base = load_base(golden("llama-dora"), tmp_path / "base")
    prompts, params = asked(base, 9)
    plain = LLM(base, **SETTINGS).generate(prompts, params)
    llm = LLM(base, max_loras=2, **LORAS, **SETTINGS)
    of_each = [request(("llama-dora", None, "llama-qv")[number % 3]) for number in range(len(prompts))]
    mixed = llm.generate(prompts, params, lora=of_each)
    assert [bits(mixed[at]) for at in (1, 4, 7)] == [bits(plain[at]) for at in (1, 4, 7)]
    assert [bits(mixed[at]) for at in (0, 2)] != [bits(plain[at]) for at in (0, 2)]
    assert [bits(each) for each in llm.generate(prompts, params)] == [bits(each) for each in plain]


def test_heads_that_draft_share_the_tables_and_not_their_adapters(tmp_path: pathlib.Path) -> None:
    """Drafts of the head are worse without adapters; results are unchanged."""
    base = load_base(golden("llama-tied-head"), tmp_path / "base")
    names = [*OF_VOCABULARY["tied"], None] * 2
    prompts, params = asked(base, len(names))
    drafting = {"speculative": "eagle", "num_speculative_tokens": 2, "speculative_adaptive": False}
    results = []
    for draft, changes in ((None, {}), (random_head("eagle", base), drafting)):
        settings = {**SETTINGS, "prefill_sizes": (16,), "max_prefill_rows": 1, **changes}
        llm = LLM(base.replace(draft=draft), max_loras=2, **LORAS, **VOCABULARY, **settings)
        results.append([bits(each) for each in llm.generate(prompts, params, lora=[request(name) for name in names])])
    assert llm.engine.stats().draft_tokens > 0
    assert results[0] == results[1]


def test_pages_of_one_are_no_others(tmp_path: pathlib.Path) -> None:
    base = load_base(golden("llama-dora"), tmp_path / "base")
    llm = LLM(base, max_loras=2, **LORAS, **SETTINGS)
    prompt, params = [list(range(24))], SamplingParams(temperature=0, max_tokens=3)
    hits = []
    for name in ("llama-dora", "llama-qv", None, "llama-dora", "llama-qv", None):
        llm.generate(prompt, params, lora=request(name))
        hits.append(llm.engine.stats().prefix_hits)
    assert hits[:3] == [0, 0, 0]
    assert 0 < hits[3] < hits[4] < hits[5]


def test_scores_are_the_adapters(tmp_path: pathlib.Path) -> None:
    base = load_base(golden("llama-qv"), tmp_path / "base")
    llm, prompt, continuations = LLM(base, **LORAS, **SETTINGS), [5, 6, 7], [[8, 9], [10], [11, 12, 13]]
    for name in ("llama-qv", "llama-dora", None):
        adapted = base if name is None else base.with_lora(read(GOLDENS / name, base))
        scores = llm.score(prompt, continuations, lora=request(name))
        for tokens, score in zip(continuations, scores, strict=True):
            known = jax.nn.log_softmax(adapted(jnp.asarray([[*prompt, *tokens]]))[0])[len(prompt) - 1 : -1]
            expected = np.asarray(known)[np.arange(len(tokens)), tokens]
            np.testing.assert_allclose(score.logprob, expected.sum(), atol=TOLERANCE * len(tokens))
    llm.engine.check()
