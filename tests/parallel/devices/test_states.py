"""Recurrent layers on several devices: heads are sharded, and parameters shared by groups of heads are replicated.
Tokens, logprobs and logits match one device."""

import collections
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.kv.pool import StatePool
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_identity import ROOMY, SETTINGS
from tests.fakes import random_model
from tests.models.parity import TOP, load_case, served_faults
from tests.models.test_parity import golden
from tests.parallel.devices.test_families import cases
from tests.parallel.devices.test_tensor import COLLECTIVES, same_logits

MAMBA = ("granitemoehybrid-hub", "nemotron_h-hub", "falcon_h1-hub")
TENSOR, STAGES, EXPERT = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
# In both models with pipeline stages, the first stage has only recurrent layers.
SPREAD = [
    *(("qwen3_next-hub", sizes) for sizes in (TENSOR, STAGES, EXPERT)),
    ("lfm2-hub", STAGES),
    ("lfm2_moe-hub", EXPERT),
    ("lfm2_moe-hub", EXPERT | TENSOR),
]


@pytest.mark.parametrize("name", cases(*MAMBA, "granitemoehybrid-dense-rope-biases-groups", fast="falcon_h1-hub"))
def test_heads_of_mamba(name: str, tmp_path: pathlib.Path):
    """Most cases have one group of heads, fewer than the two devices."""
    same_logits(load_case(golden(name), tmp_path), make_mesh(2))


@pytest.mark.parametrize("name", cases(*MAMBA, fast="nemotron_h-hub"))
def test_served_over_devices(name: str, tmp_path: pathlib.Path):
    case = golden(name)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 256, "page_size": 16, "prefill_sizes": (32,)}
    llm = LLM(load_case(case, tmp_path), tensor_parallel_size=4, **settings)
    (part,) = llm.engine._executor.runtimes
    held = device_bytes([pool.states for pool in part.pools if isinstance(pool, StatePool)])
    cache, engine = llm.model.cache_spec, llm.engine._executor._engine
    assert held == cache.bytes_per_state(4, 4) * engine.num_states
    params = SamplingParams(
        temperature=0.0, max_tokens=len(case.greedy), logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True
    )
    assert served_faults(case, llm.generate([case.prompt], params)[0]) == []


def answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Return greedy tokens and their logprobs, twice: from an empty cache, and from cached states."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, llm.model.config.vocab_size, length).tolist() for length in (1, 15, 16, 17, 64, 110)]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, ignore_eos=True)
    found = []
    for _ in range(2):
        for sample in (output.outputs[0] for output in llm.generate(prompts, params)):
            pairs = zip(sample.token_ids, sample.logprobs or [], strict=True)
            found.append((sample.token_ids, [logprobs[token].logprob for token, logprobs in pairs]))
    llm.engine.check()
    assert llm.engine.stats().prefix_hits > 0
    return found


def served(model: Model, **sizes: Any) -> LLM:
    settings: dict[str, Any] = {**SETTINGS, "num_pages": ROOMY, **sizes}
    return LLM(model, **settings)


def same_answers(llm: LLM) -> None:
    """Check that answers equal those of one device."""
    expected, found = answers(served(llm.model)), answers(llm)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert max(np.abs(np.subtract(a, b)).max() for (_, a), (_, b) in zip(found, expected, strict=True)) < 1e-5


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return served(load_case(golden("lfm2-hub"), tmp_path_factory.mktemp("lfm2")), **TENSOR)


def test_answers_are_those_of_one_device(two: LLM):
    same_answers(two)


def test_states_lie_where_their_channels_are_computed(two: LLM):
    (part,) = two.engine._executor.runtimes
    found = collections.Counter(re.findall(COLLECTIVES, part.run.widest_decode.as_text()))
    assert found == {"all-reduce": 2 * len(part.pools) + 1, "all-gather": 1}
    states = [pool.states for pool in part.pools if isinstance(pool, StatePool)]
    assert {shard.data.shape[1:] for x in jax.tree.leaves(states) for shard in x.addressable_shards} == {(20, 2)}
    config = EngineConfig(**SETTINGS, num_pages=ROOMY, **TENSOR)
    assert plan_engine(two.model, config, "cpu").needs.states == device_bytes(states)


def test_drafts_change_no_answer(tmp_path: pathlib.Path):
    drafts: dict[str, Any] = {"speculative": "suffix", "speculative_adaptive": False, "num_speculative_tokens": 7}
    llm = served(load_case(golden("lfm2-hub"), tmp_path), **TENSOR, **drafts, max_num_seqs=3)
    same_answers(llm)
    stats = llm.engine.stats()
    assert 0 < stats.draft_accepted < stats.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), SPREAD, ids=[f"{name}-{'-'.join(sizes)}" for name, sizes in SPREAD])
def test_answers_of_every_kind(name: str, sizes: dict[str, int], tmp_path: pathlib.Path):
    same_answers(served(load_case(golden(name), tmp_path), **sizes))


@pytest.mark.slow
def test_experts_and_heads_of_a_recurrence_over_four_devices():
    """Qwen3-Next with as many key heads as devices, sharded over both axes."""
    config = golden("qwen3_next-hub").config | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    same_answers(served(random_model(**config), **EXPERT, **TENSOR))
