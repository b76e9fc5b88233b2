"""Draft heads are sharded as their model, and their pages as the model's pages."""

import pytest

from tests.engine.test_heads import check_mtp
from tests.fakes import random_head
from tests.parallel.devices.test_draft_model import PLACES, drafting
from tests.parallel.devices.test_tensor import model_of


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("medusa", "stages"),
        pytest.param("eagle", "copies of heads", marks=pytest.mark.slow),
        pytest.param("eagle", "replicas", marks=pytest.mark.slow),
        ("eagle3", "stages of heads"),
    ],
)
def test_heads_change_no_bit(method, name):
    """EAGLE-3 reads layers of several stages."""
    kind, axes = PLACES[name]
    model = model_of(kind, num_hidden_layers=4 if method == "eagle3" else 2)
    assert drafting(model, random_head(method, model), axes, method).draft_tokens > 20


def test_a_predicting_layer_lies_where_the_last_stage_does(tmp_path):
    check_mtp("mtp-deepseek-v3", tmp_path, pipeline_parallel_size=2)
