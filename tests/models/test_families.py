"""Checks that every family passes, one case per model type: the oracle case marked `served`, the first of each type.

test_parity.py compares families with transformers; here each is compared with itself: served and applied, alone and in
batches, saved and loaded, in float32 and bfloat16, forward and backward.
"""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, load_model
from jaxinfer.agreement import Sequences
from jaxinfer.check_on_policy import samples_of
from jaxinfer.compilations import count_compilations
from jaxinfer.models.model import Model
from jaxinfer.types import ParamSpec
from jaxinfer.weights import init_params, save_params
from pallas_kernels.matmul import Layout
from tests.engine.execution.test_on_policy import training_step
from tests.engine.test_identity import Requests, alone, run
from tests.fakes import mixed_params
from tests.models.parity import load_case
from tests.models.test_parity import golden
from tools.oracle.cases import CASES

ROWS = {case.model_type: case.name for case in reversed(CASES) if case.served}
# All other families are in the slow tier: each compiles an engine.
FAST = ("gpt2", "falcon")
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "page_size": 16,
    "prefill_sizes": (32,),
}


@pytest.fixture(
    scope="module", params=[kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in ROWS]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_case(golden(ROWS[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return LLM(model, num_pages=64, **SETTINGS)


def test_every_kind_of_model_has_a_row():
    assert {case.model_type for case in CASES} == set(ROWS)


def requests_of(model: Model) -> Requests:
    """Return prompts that end before, at and after page and chunk boundaries; two share a prefix."""
    rng = np.random.default_rng(0)
    vocab = model.config.vocab_size
    shared = rng.integers(0, vocab, 40).tolist()
    prompts = [rng.integers(0, vocab, length).tolist() for length in (1, 32, 33, 80)]
    prompts += [shared, [*shared, *prompts[1][:9]]]
    params = [mixed_params(number, max_tokens=4, logprobs=3) for number in range(len(prompts))]
    return list(zip(prompts, params, strict=True))


@pytest.mark.parametrize("layout", ["in first", "in last"])
def test_weights_may_lie_otherwise(model: Model, layout: Layout):
    tokens = jnp.asarray([[1, 2, 3, 5, 8, 13]])
    copied = model.replace(params=jax.tree.map(jnp.copy, model.params))
    expected = model(tokens)
    found = copied.laid_out(layout)(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_a_request_has_the_same_bits_alone_and_among_others(llm: LLM):
    requests = requests_of(llm.model)
    llm.engine.reset_prefix_cache()
    expected = []
    for request in requests:
        expected += run(llm, [request])
        llm.engine.reset_prefix_cache()
    hits = llm.engine.stats().prefix_hits
    with count_compilations() as compilations:
        cold = run(llm, requests)
        warm = run(llm, requests[::-1])[::-1]
    assert (cold == expected, warm == expected, compilations.count) == (True, True, 0)
    # Where a processor's products make a chunk that begins at a hit differ, the engine has disabled hits.
    assert (llm.engine.stats().prefix_hits > hits) == llm.engine.calibration.exact_resume


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_budget(model: Model, dtype: str):
    params = jax.tree.map(lambda spec, x: x.astype(spec.dtype or dtype), model.specs, model.params)
    model, requests = model.replace(params=params), requests_of(model)
    expected = alone(model, requests, **SETTINGS)
    for changes in ({"max_num_batched_tokens": 36}, {"num_pages": 14, "swap_space_gib": 0}):
        assert run(LLM(model, **{"num_pages": 64, **SETTINGS, **changes}), requests) == expected, changes


def test_served_logprobs_are_those_of_the_function(llm: LLM):
    """Served with pages, chunks and decode steps; the function computes the whole text at once."""
    model = llm.model
    prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, 70).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    sample = output.outputs[0]
    text = prompt + sample.token_ids
    expected = np.asarray(jax.nn.log_softmax(model.apply(model.params, jnp.asarray([text]))[0]))
    served = [*(output.prompt_logprobs or [])[1:], *(sample.logprobs or [])]
    assert len(served) == len(text) - 1
    for at, (token, logprobs) in enumerate(zip(text[1:], served, strict=True)):
        assert logprobs is not None
        assert abs(logprobs[token].logprob - expected[at, token]) <= 2e-5, at


def test_a_trainer_has_the_served_bits(llm: LLM):
    requests = [(p, dataclasses.replace(each, prompt_logprobs=None, logprobs=0)) for p, each in requests_of(llm.model)]
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    sequences = Sequences.of(samples_of(outputs))
    np.testing.assert_array_equal(training_step(llm.model, llm, sequences)[1], sequences.served)


def tokens_of(model: Model, length: int = 24) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(0, model.config.vocab_size, (2, length)))


def test_gradients_reach_every_parameter(model: Model):
    def loss(params: Any) -> jax.Array:
        logprobs = jax.nn.log_softmax(model.apply(params, tokens[:, :-1]))
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    tokens = tokens_of(model)
    value, gradient = jax.jit(jax.value_and_grad(loss))(model.params)
    assert bool(jnp.isfinite(value))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)}
    assert [name for name, leaf in leaves.items() if not bool(jnp.isfinite(leaf).all())] == []
    without = [name for name, leaf in leaves.items() if not bool((leaf != 0).any())]
    # DeepSeek-V3's bias selects experts without weighing them (arXiv:2412.19437, 2.1.2): training updates it by another
    # rule. Indexers select tokens (arXiv:2512.02556, 2.1) and have their own loss.
    # xIELU's eps bounds an exponent where another branch is taken (Apertus).
    unmoved = ("['correction']", "['eps']")
    assert [name for name in without if not name.endswith(unmoved) and "['indexer']" not in name] == []


def test_bfloat16_is_close_to_float32(model: Model):
    tokens = tokens_of(model)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    narrow_logits, wide_logits = (jax.jit(model.apply)(params, tokens) for params in (rounded, wide))
    assert narrow_logits.dtype == wide_logits.dtype == jnp.float32
    errors = jnp.sqrt(jnp.mean((narrow_logits - wide_logits) ** 2, axis=-1)) / jnp.std(wide_logits)
    # The median over tokens: rounding may give single tokens other experts, whose logits then differ by far more.
    assert 0 < float(jnp.median(errors)) < 0.1, errors


def test_saved_parameters_are_loaded_again(model: Model, tmp_path: pathlib.Path):
    folder, specs = pathlib.Path(model.name), model.specs
    save_params(tmp_path, model.params, specs, json.loads((folder / "config.json").read_text()))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    again = load_model(str(tmp_path), show_progress=False)
    assert again.config == model.config
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model.params, again.params))
    assert "float32" in json.loads((tmp_path / "config.json").read_text()).values()


def test_random_weights_have_the_shapes_of_the_specs(model: Model):
    specs = model.specs
    params = init_params(specs, 0, "bfloat16")
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    assert all(len(spec.axes) == len(spec.shape) for spec in leaves)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, model.params)
    assert bool(jnp.isfinite(model.apply(params, tokens_of(model, 4))).all())
