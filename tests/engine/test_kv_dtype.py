"""8-bit KV caches in the whole engine: the same bits in every mode, and logprobs of rounded keys and values."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import client
from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution import memory
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.prepare import resolve_for
from jaxinfer.layers.attention import causal_attend
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.planner.memory import Budget
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.settings import ServeConfig
from jaxinfer.terminal.stats import bytes_per_step
from jaxinfer.types import KV_CACHE_DTYPES, LayerSpec
from pallas_kernels.kv_write.reference import quantize, token_scales
from tests.engine.execution.test_compiled import LOOPED, programs
from tests.engine.test_identity import MODES, ROOMY, SETTINGS, TIGHT, Requests, alone, check_mode, make_requests, run
from tests.fakes import random_model
from tests.kv.test_quantized_pool import KINDS
from tests.models.test_deepseek import config_json
from tests.serve.live import live

MIB = 2**20
EVERY = [(kind, mode) for kind in KINDS for mode in MODES]


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model().replace(draft=random_model(seed=1, num_hidden_layers=1))


@functools.cache
def requests_alone(kind: str) -> tuple[Requests, list[Any]]:
    model = random_model()
    requests = make_requests(24, model.config.vocab_size)
    return requests, alone(model, requests, **SETTINGS, kv_cache_dtype=kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), EVERY)
def test_every_mode_gives_the_bits_of_each_request_alone(kind, mode, model, monkeypatch):
    """Batches, samples sharing pages, preemption and prefix hits give identical results; nothing compiles meanwhile."""
    requests, expected = requests_alone(kind)
    changes, happened = MODES[mode]
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    llm = LLM(model, **{**SETTINGS, "num_pages": ROOMY, "kv_cache_dtype": kind, **changes})
    check_mode(llm, requests, expected, happened)
    assert any(len(each) > 2 for each in expected), "no request has several samples"
    if mode != "no prefix cache":
        assert llm.engine.stats().prefix_hits > 0


LATENT_MODES = ("drafts, recomputed", "swapped")


@functools.cache
def latents_alone(kind: str) -> tuple[Model, Requests, list[Any]]:
    model = random_model(**config_json(3))
    requests = make_requests(24, model.config.vocab_size)
    return model, requests, alone(model, requests, **SETTINGS, kv_cache_dtype=kind)


@pytest.mark.slow
@pytest.mark.parametrize("mode", LATENT_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_latents_have_the_bits_of_each_request_alone(kind, mode, monkeypatch):
    model, requests, expected = latents_alone(kind)
    changes, happened = MODES[mode]
    if mode == "swapped":
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    llm = LLM(model, **{**SETTINGS, "num_pages": ROOMY, "kv_cache_dtype": kind, **changes})
    check_mode(llm, requests, expected, happened)
    assert llm.engine.stats().prefix_hits > 0


def test_latents_have_the_bits_of_each_request_alone_in_short():
    """Batched requests with shared prefix pages match each alone on the same engine. The pool has the planned size."""
    model = random_model(**config_json(3, num_hidden_layers=1, first_k_dense_replace=1))
    llm = LLM(model, **{**SETTINGS, "prefill_sizes": (16,)}, num_pages=ROOMY, kv_cache_dtype="int8")
    requests = make_requests(6, model.config.vocab_size)
    expected = [run(llm, [request])[0] for request in requests]
    assert run(llm, requests) == expected
    pools = llm.engine._executor.runtimes[-1].pools
    assert {pool.data.dtype.name for pool in pools} == {"int8"}
    size = sum(array.nbytes for array in jax.tree.leaves(pools))
    assert size == ROOMY * model.with_cache("int8").cache_spec.bytes_per_page(16, 4) == ROOMY * 16 * (16 + 8)


# ---- accuracy


def rounding_attend(kind: str) -> Any:
    """Return contiguous attention over keys and values that are quantised and dequantised."""
    dtype = jnp.dtype(KINDS[kind])

    def rounded(x: jax.Array) -> jax.Array:
        scales = token_scales(x, dtype)
        return quantize(x, scales, dtype).astype(x.dtype) * scales[..., None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: LayerSpec, scale: float, sinks=None) -> Any:
        return causal_attend(q, rounded(k), rounded(v), cache, layer, scale, sinks)

    return attend


def forced(model: Model, attend: Any, ids: list[int]) -> np.ndarray:
    """Return the log probability of each token except the first, from one forward pass over all tokens."""
    apply, end = model.module.apply, len(ids)

    @jax.jit
    def logprobs(params: Any, tokens: jax.Array) -> jax.Array:
        hidden, _ = apply({"params": params}, tokens, jnp.arange(end), attend, None)
        return jax.nn.log_softmax(apply({"params": params}, hidden, method="head"))

    return np.asarray(logprobs(model.params, jnp.asarray(ids)))[np.arange(end - 1), ids[1:]]


@pytest.mark.parametrize(
    "kind", [kind if kind == "int8" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_served_logprobs_are_those_of_a_model_that_rounds_keys_and_values(kind, model):
    """Prompt logprobs (prefill) and output logprobs (decode) match contiguous attention over rounded KV."""
    prompt = np.random.default_rng(3).integers(0, model.config.vocab_size, 100).tolist()
    llm = LLM(model, **SETTINGS, kv_cache_dtype=kind)
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    (sample,) = output.outputs
    ids, told = prompt + sample.token_ids, [*output.prompt_logprobs, *sample.logprobs]
    served = np.array([each[token].logprob for each, token in zip(told[1:], ids[1:], strict=True)])
    rounded, exact = (forced(model, each, ids) for each in (rounding_attend(kind), causal_attend))
    error = np.abs(rounded - exact).max()
    assert error > 1e-3
    # Not zero: a number midway between two steps may round either way.
    assert np.abs(served - rounded).max() < error / 20


def test_text_is_nearly_as_likely(test_data):
    """Check the mean log probability of a text unseen by the demo model; docs/kv_cache.md has more figures."""
    model = load_model("demo", "float32", show_progress=False)
    assert model.tokenizer is not None
    text = (test_data / "text" / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text[int(len(text) * 0.95) :])[:800]
    exact = forced(model, causal_attend, ids)
    for kind, most in (("int8", 0.002), ("fp8", 0.006)):
        rounded = forced(model, rounding_attend(kind), ids)
        assert np.abs(rounded - exact).mean() > 1e-3
        assert abs(rounded.mean() - exact.mean()) < most


# ---- programs

MADE = LOOPED | {"parameter", "get-tuple-element", "fusion", "scatter", "bitcast"}


@pytest.mark.parametrize(("kind", "elements"), [pytest.param("int8", "s8", marks=pytest.mark.slow), ("fp8", "u8")])
def test_no_program_copies_or_converts_a_pool(kind, elements):
    """No program copies or converts a pool or its scales. XLA:CPU would widen a whole float8 pool to write a token."""
    settings = {**SETTINGS, "num_pages": 1031, "multi_step": 3, "max_prefill_rows": 1}
    engine = LLM(random_model(), **settings, kv_cache_dtype=kind).engine
    pools = sum(array.nbytes for array in jax.tree.leaves(engine._executor.runtimes[-1].pools))
    for name, program in programs(engine).items():
        text, memory = program.as_text(), program.memory_analysis()
        made = re.findall(r"= (\w+)\[1031,2,2,16(?:,8)?\]\S* ([\w-]+)\(", text)
        assert {dtype for dtype, _ in made} == {elements, "f32"}, name
        assert {operation for _, operation in made} <= MADE, name
        assert memory.alias_size_in_bytes >= pools, name
        assert memory.temp_size_in_bytes < pools // 2, name  # there are two layers


# ---- plans and rejected settings


@pytest.fixture(scope="module")
def wide() -> Model:
    """Return a bfloat16 model with head_dim 64: 68 bytes for a head of a token instead of 128."""
    return random_model("bfloat16", hidden_size=256, num_hidden_layers=1)


def test_a_pool_of_8_bits_has_nearly_twice_the_pages(wide, monkeypatch):
    monkeypatch.setattr(memory, "device_budget", lambda device, utilization, *_: Budget(64 * MIB, utilization))
    monkeypatch.setattr(memory, "_temporaries", lambda *_: MIB)
    config = EngineConfig(**SETTINGS)
    plans = {
        kind: plan_engine(wide, dataclasses.replace(config, kv_cache_dtype=kind), "gpu") for kind in KV_CACHE_DTYPES
    }
    for kind in ("int8", "fp8", "fp8_e4m3"):
        assert plans[kind].needs.page * 128 == plans["auto"].needs.page * 68
        assert plans[kind].pages == int(64 * MIB * 0.9 - plans[kind].needs.fixed) // plans[kind].needs.page
        assert plans[kind].pages == pytest.approx(plans["auto"].pages * 128 / 68, abs=2)


def test_the_plan_is_what_the_pools_take(model):
    config = dataclasses.replace(EngineConfig(**SETTINGS), kv_cache_dtype="int8", num_pages=TIGHT)
    needs, llm = plan_engine(model, config, "cpu").needs, LLM(model, config=config)
    (part,) = llm.engine._executor.runtimes
    assert sum(array.nbytes for array in jax.tree.leaves(part.pools)) == needs.page * TIGHT
    assert part.run.widest_decode.memory_analysis().alias_size_in_bytes >= needs.page * TIGHT


def test_bounds_in_bytes_hold_more_pages(wide):
    """Equal bytes of pool and host memory hold more pages; an explicit number of pages is unchanged."""
    config = EngineConfig(max_num_seqs=64, kv_cache_bytes=MIB, swap_space_gib=MIB / 2**30)
    before, after = (
        resolve_for(wide, dataclasses.replace(config, kv_cache_dtype=kind), "cpu") for kind in ("auto", "int8")
    )
    page = wide.cache_spec.bytes_per_page(64, 2) * 68 // 128
    assert (after.num_pages, after.host_pages) == (MIB // page, MIB // page)
    assert before.num_pages < after.num_pages
    assert after.kv_cache_dtype == "int8"
    asked = dataclasses.replace(config, num_pages=7, kv_cache_dtype="fp8")
    assert resolve_for(wide, asked, "cpu").num_pages == 7


def test_what_cannot_be_is_refused_in_a_sentence(model):
    with pytest.raises(EngineConfigError, match="kv_cache_dtype = int4 must be one of auto, fp8, fp8_e4m3, int8"):
        LLM(model, kv_cache_dtype="int4")
    config = EngineConfig(kv_cache_dtype="fp8")
    with pytest.raises(EngineConfigError, match=r"attention_backend = mosaic cannot be: head_dim 8"):
        resolve_for(model, dataclasses.replace(config, attention_backend="mosaic"), "gpu")


def test_what_decode_must_read_is_less(wide):
    """``--stats`` compares with the bytes read per step."""
    one, other = (bytes_per_step(each, [100]) - bytes_per_step(each, []) for each in (wide, wide.with_cache("int8")))
    assert other * 128 == one * 68


@pytest.mark.slow
def test_a_server_has_such_a_cache_and_tells_so():
    settings = {
        "max_num_seqs": 2,
        "max_model_len": 128,
        "page_size": 16,
        "prefill_sizes": (16,),
        "kv_cache_dtype": "int8",
    }
    config = ServeConfig(model="demo-draft", grpc_port=0, http_port=0, dtype="float32", engine=EngineConfig(**settings))
    params = SamplingParams(temperature=0.0, max_tokens=24, n=2, logprobs=1)
    (want,) = LLM("demo-draft", "float32", show_progress=False, **settings).generate(["Once upon a time"], params)
    with live(config) as run, client.Client(run.target) as asking:
        assert asking.model_info().engine["kv_cache_dtype"] == "int8"
        answer = asking.generate("Once upon a time", temperature=0.0, max_tokens=24, n=2, logprobs=1)
    for got, own in zip(answer.outputs, want.outputs, strict=True):
        assert list(got.token_ids) == own.token_ids
        told = zip(got.logprobs, own.logprobs or [], own.token_ids, strict=True)
        assert all(position.chosen.logprob == np.float32(there[token].logprob) for position, there, token in told)
