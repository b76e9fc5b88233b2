"""Bitwise identity of a model family in the engine: in any batch, with any cache state, on any token budget."""

from __future__ import annotations

from typing import Any

import jax

from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from tests.engine.test_identity import make_requests, run

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 128,
    "num_pages": 96,
    "page_size": 16,
    "prefill_sizes": (32,),
}


def check_identity(model: Model, requests: int = 8) -> None:
    """Compare requests alone, batched, batched in reverse order with a warm cache, and on a small token budget."""
    # At such widths the usual deviation would give all tokens nearly the same logit.
    model = model.replace(params=jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 else x, model.params))
    asked = make_requests(requests, model.config.vocab_size, longest=10)
    asked = [(prompt[:100], params) for prompt, params in asked]
    llm = LLM(model, **SETTINGS)
    expected = []
    for request in asked[:4]:
        expected += run(llm, [request])
        llm.engine.reset_prefix_cache()
    cold = run(llm, asked)
    hits = llm.engine.stats().prefix_hits
    warm = run(llm, asked[::-1])[::-1]
    assert llm.engine.stats().prefix_hits > hits
    tight = run(LLM(model, **SETTINGS, max_num_batched_tokens=36), asked)
    assert cold[:4] == expected
    assert warm == tight == cold
