"""Quantised weights in the whole engine: every storage with prefix cache, chunks, samples, logprobs and drafts."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.compilations import count_compilations
from jaxinfer.config import EngineConfigError
from jaxinfer.loading import load_model
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import device_bytes
from jaxinfer.quant import with_activations
from jaxinfer.quant.layouts import Grouped, Layout
from tests.engine.test_identity import make_requests, run
from tests.fakes import random_model
from tests.quant.examples import INPUTS, LAYOUTS
from tests.quant.models import stored_and_plain

SHAPE: dict[str, Any] = {"hidden_size": INPUTS, "intermediate_size": INPUTS, "num_hidden_layers": 2}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 256,
    "page_size": 16,
    "prefill_sizes": (32,),
    "speculative": "ngram",
}
FAST = ("int4 with zeros",)
STORAGES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYOUTS]


def stored(folder: pathlib.Path, layout: Layout, **changes: Any) -> Model:
    """Return a model with stored weights. Embeddings stay unquantised: no checkpoint stores a permuted table."""
    model = random_model(**{**SHAPE, **changes})
    return stored_and_plain(model, folder, lambda name, inputs: None if "embed" in name else layout)[0]


@pytest.mark.parametrize("name", STORAGES)
def test_a_request_has_the_same_bits_alone_and_among_others(name: str, tmp_path: pathlib.Path):
    model = stored(tmp_path, LAYOUTS[name])
    llm, requests = LLM(model, num_pages=60, **SETTINGS), make_requests(14, model.config.vocab_size)
    expected = []
    for request in requests:
        expected += run(llm, [request])
        llm.engine.reset_prefix_cache()
    with count_compilations() as compilations:
        cold = run(llm, requests)
        warm = run(llm, requests[::-1])[::-1]
    assert (cold == expected, warm == expected, compilations.count) == (True, True, 0)
    stats = llm.engine.stats()
    assert stats.prefix_hits > 0
    assert stats.draft_tokens > 0
    if name in FAST:  # with the random weights of other storages no draft need repeat
        assert stats.draft_accepted > 0


@pytest.mark.parametrize("name", STORAGES)
def test_served_logprobs_are_those_of_the_function(name: str, tmp_path: pathlib.Path):
    assert_served_as_applied(stored(tmp_path, LAYOUTS[name]))


def assert_served_as_applied(model: Model, atol: float = 2e-5, **settings: Any):
    llm = LLM(model, num_pages=60, **{**SETTINGS, **settings})
    prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, 70).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    sample = output.outputs[0]
    text = prompt + sample.token_ids
    whole, part = (llm.model.apply(llm.model.params, jnp.asarray([ids]))[0] for ids in (text, text[:40]))
    expected = np.asarray(jax.nn.log_softmax(whole))
    # Some random weights are so large that the order of summation shows, in the logits of `apply` as well.
    atol = max(atol, 10 * float(abs(whole[:40] - part).max()))
    served = [*(output.prompt_logprobs or [])[1:], *(sample.logprobs or [])]
    assert len(served) == len(text) - 1
    for at, (token, logprobs) in enumerate(zip(text[1:], served, strict=True)):
        assert logprobs is not None
        assert abs(logprobs[token].logprob - expected[at, token]) <= atol, at


@pytest.mark.parametrize(
    "name",
    [
        "bnb-nf4-dq",
        pytest.param("bnb-fp4-dq", marks=pytest.mark.slow),
        pytest.param("bnb-int8", marks=pytest.mark.slow),
    ],
)
def test_folders_of_bitsandbytes_are_served(test_data: pathlib.Path, name: str):
    folder = test_data / "models" / "quantised" / name
    with np.load(folder / "expected.npz") as expected:
        prompt, logits = expected["input_ids"].tolist(), expected["logits_dequant_f32"]
    assert_logprobs(served_folder(folder), prompt, logits)


@pytest.mark.slow
def test_int8_of_bitsandbytes_is_served_with_rounded_inputs(test_data: pathlib.Path):
    llm = served_folder(test_data / "models" / "quantised" / "bnb-int8", activation_dtype="int8")
    prompt = list(range(30, 50))
    rounded = llm.model.apply(llm.model.params, jnp.asarray([prompt]))[0]
    plain = llm.model.apply(with_activations(llm.model.params, "none"), jnp.asarray([prompt]))[0]
    assert 0.01 < float(jnp.abs(rounded - plain).max()) < 1.0
    assert_logprobs(llm, prompt, np.asarray(rounded))


def served_folder(folder: pathlib.Path, **settings: Any) -> LLM:
    model = load_model(str(folder), dtype="float32", show_progress=False)
    return LLM(model, max_num_seqs=1, max_model_len=64, page_size=16, prefill_sizes=(32,), num_pages=8, **settings)


def assert_logprobs(llm: LLM, prompt: list[int], logits: np.ndarray):
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    expected = np.asarray(jax.nn.log_softmax(logits))
    served = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    tokens = [*prompt[1:], int(logits[-1].argmax())]
    assert len(served) == len(tokens)
    for at, (token, logprobs) in enumerate(zip(tokens, served, strict=True)):
        assert logprobs is not None
        assert abs(logprobs[token].logprob - expected[at, token]) <= 1e-4, at


def test_the_plan_knows_what_four_bits_take(tmp_path: pathlib.Path):
    """Two numbers per byte, as in XLA's argument size."""
    weight = stored(tmp_path, Grouped("int4", 32)).params["layers_0"]["mlp"]["gate_up"]
    placed = jax.device_put(weight, jax.devices()[0])
    codes = 2 * INPUTS * INPUTS
    assert device_bytes(placed) == codes // 2 + codes // 32 * 4
    compiled = jax.jit(lambda w: w.arrays["codes"].astype(jnp.int8)).lower(placed).compile()
    assert compiled.memory_analysis().argument_size_in_bytes <= codes


@pytest.mark.slow
def test_activations_of_8_bits_are_asked_for(tmp_path: pathlib.Path):
    model = stored(tmp_path, Grouped("int8", INPUTS))
    plain, rounded = (LLM(model, num_pages=60, activation_dtype=kind, **SETTINGS) for kind in ("auto", "int8"))
    tokens = jnp.asarray([[1, 2, 3, 4, 5]])
    expected, found = (np.asarray(llm.model.apply(llm.model.params, tokens)) for llm in (plain, rounded))
    assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    for llm, logits in ((plain, expected), (rounded, found)):
        served = llm.generate([[1, 2, 3, 4, 5]], params)[0].outputs[0].logprobs
        assert served is not None
        logprobs = np.asarray(jax.nn.log_softmax(logits[0, -1]))
        for token, entry in served[0].items():
            assert abs(entry.logprob - logprobs[token]) < 1e-4


def test_activations_that_no_weight_goes_with_are_refused(tmp_path: pathlib.Path):
    model = stored(tmp_path, Grouped("int4", 32))
    with pytest.raises(
        EngineConfigError, match="activation_dtype = 'int8' cannot be: no weight of the model is stored"
    ):
        LLM(model, num_pages=60, activation_dtype="int8", **SETTINGS)
