"""Parameters of pipeline stages of a model with a draft head, and the features that stages pass on."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.execution.stages import cut, draft_stages, unshared
from jaxinfer.gpu_check.llama import TINY
from jaxinfer.layers.attention import causal_attend
from jaxinfer.models.model import abstract
from tests.fakes import random_head, random_model
from tools.check_programs.stored import stored


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_programs_may_loop_over_weights_that_are_stored(kind):
    model = abstract({**TINY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}, "bfloat16")
    model = stored(model, kind) if kind else model
    for served in (model, model.for_kernels("mosaic")):  # no loops for mosaic kernels either
        assert [stage.loops for stage in cut(served, 2)] == [kind is not None] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_features_are_the_same_however_the_model_is_cut(count):
    """EAGLE-3 reads the inputs of three layers, which may belong to three stages."""
    model = random_model(num_hidden_layers=4, dtype="float32")
    model = model.replace(draft=random_head("eagle3", model))
    (whole,) = cut(model, 1)
    tokens = positions = jnp.arange(12, dtype=jnp.int32)
    want, features, _ = whole.tapped(whole.model.params, tokens, positions, causal_attend, None)
    x = tokens
    for stage in cut(model, count):
        hidden, found, _ = stage.tapped(stage.model.params, x, positions, causal_attend, None)
        x = stage.handed(hidden, found)
        assert stage.layers is None or x.shape[-1] == stage.given
    np.testing.assert_array_equal(hidden, want)
    np.testing.assert_array_equal(found, features)
    assert found.shape[-1] == 3 * hidden.shape[-1]


def test_the_last_stage_alone_has_the_head_and_what_it_lacks_is_counted():
    model = random_model(num_hidden_layers=4)
    model = model.replace(draft=random_head("eagle", model))
    first, last = cut(model, 2)
    assert draft_stages(first.model) == []
    (drafting,) = draft_stages(last.model)
    shared = dict(drafting.model.config.shares)
    assert {"embed", "head"} <= set(shared.values())
    assert not shared.keys() & unshared(model.draft, model).params.keys()
    lacking = unshared(model.draft.replace(params=dict.fromkeys(shared) | model.draft.params), last.model)
    assert {shared[name] for name in lacking.params if name in shared} == {"embed"}
