"""jaxinfer as a peer: the output of `LLM`, text included."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers.protocol import Prompts, Reply, Stopwatch, best_seconds, serve
from jaxinfer import LLM, SamplingParams
from jaxinfer.terminal.stats import measured_bandwidth


class JaxInfer:
    """`LLM` with one slot per sequence, or with default settings. XLA takes the cores that the process may use."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("jaxinfer", "jax", "jaxlib", "flax", "numpy")}

    def load(
        self,
        folder: str,
        gguf: str,
        dtype: str,
        batch: int,
        max_len: int,
        threads: int,
        activation_dtype: str = "auto",
        default: bool = False,
    ) -> Reply:
        """Load ``folder``. ``activation_dtype``: see `EngineConfig`; ``default``: settings for any batch."""
        self._llm = None  # frees the previous model
        sizes: dict[str, Any] = {} if default else {"max_num_seqs": batch, "max_model_len": max_len}
        self._llm = LLM(folder, dtype, activation_dtype=activation_dtype, show_progress=False, **sizes)
        return {}

    def generate(self, prompts: Prompts, new_tokens: int) -> Reply:
        assert self._llm is not None
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        watch = Stopwatch(len(prompts))
        self._llm.generate(prompts, params, on_delta=lambda delta: watch.add(delta.request, delta.token_ids))
        return watch.reply()

    def limits(self, dtype: str, megabytes: int, side: int) -> Reply:
        square = jnp.ones((side, side), dtype)
        product = jax.jit(jnp.matmul).lower(square, square).compile()
        seconds = best_seconds(lambda: jax.block_until_ready(product(square, square)))
        return {"bandwidth": measured_bandwidth(megabytes << 20), "gemm": 2 * side**3 / seconds}


if __name__ == "__main__":
    serve(JaxInfer())
