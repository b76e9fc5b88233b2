"""New weights of each kind of model: with states, draft heads or adapters, quantised, laid out for a CPU."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.compilations import count_compilations
from jaxinfer.llm import LLM
from jaxinfer.loading import load_model
from jaxinfer.lora.merge import merge_lora
from jaxinfer.lora.trainable import init_adapter
from jaxinfer.models.model import Model
from jaxinfer.quant import Quantized, is_stored
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.weights.errors import WeightsError
from jaxinfer.weights.load import Deferred
from jaxinfer.weights.trainers import named_parameters
from tests.engine.test_identity import ROOMY, SETTINGS
from tests.engine.test_states import hybrid
from tests.fakes import random_head, random_model
from tests.quant.examples import LAYOUTS
from tests.quant.models import stored_and_plain
from tests.test_served import check_updates, of_version, simple_requests

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPTS = [list(range(9)), list(range(20, 50))]


def tokens(llm: LLM, **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, **options)]


@pytest.mark.slow
def test_layers_with_states():
    model = hybrid()
    check_updates(LLM(model, **SETTINGS, num_pages=ROOMY), model)


@pytest.mark.parametrize("head", ["eagle", pytest.param("medusa", marks=pytest.mark.slow)])
def test_a_head_reads_the_new_weights_that_it_shares(head):
    """Its embedding is the model's: drafts are right as often as those of an engine that starts with the weights."""
    model = random_model()
    drafting = model.replace(draft=random_head(head, model))
    settings = {**SETTINGS, "speculative": head, "num_speculative_tokens": 3, "speculative_adaptive": False}
    llm, new = LLM(drafting, **settings), of_version(model, 1)
    llm.update_weights(new)
    other = LLM(drafting.replace(params=new), **settings)
    requests = simple_requests(8, 97)
    found = []
    for each in (llm, other):
        outputs = each.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        stats = each.engine.stats()
        found.append(([output.outputs[0].token_ids for output in outputs], stats.draft_tokens, stats.draft_accepted))
    assert found[0] == found[1]
    assert tokens(llm) == tokens(other)


def quantised(folder: pathlib.Path, name: str, seed: int = 0) -> tuple[Model, Any]:
    """Return a model with weights stored in a layout, and the unquantised parameters of another seed."""
    shape = {"hidden_size": 64, "intermediate_size": 64}
    model = random_model(seed=seed, **shape)
    stored = stored_and_plain(model, folder, lambda tensor, _: None if "embed" in tensor else LAYOUTS[name])[0]
    return stored, random_model(seed=seed + 1, **shape).params


@pytest.mark.parametrize(
    "name", ["int8 a channel", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4 with zeros", "fp8"))]
)
def test_quantised_weights_are_made_again(name, tmp_path):
    model, plain = quantised(tmp_path, name)
    arrays = jax.tree.map(np.asarray, plain)
    plain = jax.tree.map(lambda x: Deferred(x.shape, x.dtype, x.__getitem__), arrays)  # as read from a folder
    llm = LLM(model, **SETTINGS, enable_weight_updates=True)
    before = tokens(llm)
    with count_compilations() as compilations:
        llm.update_weights(plain)
        llm.update_weights(arrays)
    assert compilations.count == 0
    after = tokens(llm)
    assert after != before
    with count_compilations() as compilations:
        llm.update_weights(plain)
        llm.sleep()
        llm.wake_up()
    assert compilations.count == 0
    assert tokens(llm) == after
    nodes = jax.tree.leaves(llm.model.params, is_leaf=is_stored)
    assert any(isinstance(node, Quantized) for node in nodes)
    llm.update_weights(model.params)  # stored alike: the arrays themselves
    assert tokens(llm) == before


def test_layouts_that_cannot_be_made_again_are_named(tmp_path):
    model, plain = quantised(tmp_path, "ggml")
    llm = LLM(model, **SETTINGS)
    before = tokens(llm)
    with pytest.raises(WeightsError) as refused:
        llm.update_weights(plain)
    assert refused.value.name.startswith("layers_0.")
    assert tokens(llm) == before


@pytest.mark.parametrize("layout", ["in first", pytest.param("in last", marks=pytest.mark.slow)])
def test_weights_that_are_laid_out_for_a_cpu(layout, monkeypatch, tmp_path):
    """A model that the engine loads may have other layouts than its family; new weights have those of the family."""
    monkeypatch.setattr("jaxinfer.loading.layout_for_cpu", lambda *_: layout)
    llm = LLM("demo", max_num_seqs=2, max_model_len=64)
    monkeypatch.undo()
    plain = load_model("demo", show_progress=False)
    expected = tokens(LLM(plain, max_num_seqs=2, max_model_len=64))
    for given in (plain.params, plain, dict(llm.model.params)):
        llm.update_weights(given)
        assert tokens(llm) == expected
    llm.sleep(2)
    llm.wake_up()
    llm.update_weights(named_parameters(plain))
    assert tokens(llm) == expected
    adapter = drawn_adapter(plain)
    merged = merge_lora(plain, adapter)
    llm.merge_lora(adapter)
    assert tokens(llm) == tokens(LLM(merged, max_num_seqs=2, max_model_len=64))


def drawn_adapter(model: Model) -> Any:
    adapter = init_adapter(model, 2, jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 1000))
    return jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), adapter)


def test_names_of_hugging_face_and_states_of_flax():
    model = random_model()
    new = model.replace(params=of_version(model, 1))
    expected = tokens(LLM(new, **SETTINGS))
    llm = LLM(model, **SETTINGS)
    for given in (named_parameters(new), dict(named_parameters(new)), nnx.State(new.params)):
        llm.update_weights(model.params)
        llm.update_weights(given)
        assert tokens(llm) == expected
    for wrong, name in (({"model.norm.weight": np.ones(3, np.float32)}, "model.norm.weight"), ({"x": np.ones(3)}, "x")):
        with pytest.raises(WeightsError) as refused:
            llm.update_weights(wrong, partial=True)
        assert refused.value.name == name
    assert tokens(llm) == expected


def test_adapters_from_memory():
    model, settings = random_model(), {**SETTINGS, "enable_lora": True, "max_lora_rank": 4}
    llm, adapter = LLM(model, **settings), drawn_adapter(model)
    base = tokens(llm)
    llm.load_lora("mine", adapter)
    adapted = tokens(llm, lora="mine")
    assert adapted != base
    assert tokens(llm) == base
    with_lora = model.with_lora(adapter)
    assert int(with_lora(jnp.asarray([PROMPTS[0]]))[0, -1].argmax()) == adapted[0][0]
    llm.load_lora("mine", jax.tree.map(np.zeros_like, adapter))
    assert tokens(llm, lora="mine") == base
    assert [(each.name, each.path) for each in llm.list_loras()] == [("mine", "")]
    llm.load_lora("mine", adapter)
    llm.update_weights(of_version(model, 1))
    assert tokens(llm, lora="mine") != adapted  # no page of the adapter on the old weights
