"""A vocabulary that is sharded over devices has the noise of its tokens, and the same draws."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling import sample
from jaxinfer.sampling_params import SamplingParams
from tests.sampling.reference import LIMITS, Row, slots_and_state

ROWS, VOCAB = 16, 4096
SAMPLE = jax.jit(sample, static_argnums=6)


def test_draws_from_sharded_logits_are_the_same() -> None:
    logits = (np.random.default_rng(0).normal(size=(ROWS, VOCAB)) * 3).astype(np.float32)
    asked = [{}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.0}]
    rows = [Row(each, SamplingParams(seed=row, **asked[row % 4])) for row, each in enumerate(logits)]
    slots, state = slots_and_state(rows)
    places, on = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, bool)
    spread = jax.device_put(logits, NamedSharding(make_mesh(8), PartitionSpec(None, "tensor")))
    assert len(spread.sharding.device_set) == 8
    whole, parts = (SAMPLE(each, slots, state, places, places, on, LIMITS.max_logprobs)[0] for each in (logits, spread))
    np.testing.assert_array_equal(parts.tokens, whole.tokens)
