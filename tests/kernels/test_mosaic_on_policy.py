"""Log-probabilities that an engine serves by the Mosaic kernels are those of `LLM.logprobs` and of `Model.logprobs`, to
the last bit: of a model of two layers, interpreted on the CPU."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.agreement import Difference, Sequences, training_step
from jaxinfer.check_on_policy import samples_of
from jaxinfer.engine.execution import calibration
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from pallas_kernels import choice, compat
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.kv_copy import mosaic as kv_copy
from pallas_kernels.kv_write import mosaic as kv_write
from pallas_kernels.matmul import api as matmul_api
from pallas_kernels.matmul.mosaic import launch as matmul
from pallas_kernels.paged_attention import api as attention
from pallas_kernels.paged_attention.hopper.decode import launch as decode
from tests.fakes import random_model

# In a model of one layer, nothing reads the attention of prompt chunks.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
# The first two sequences have seven pages when they are admitted, and each needs another one: one is preempted.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_model_len": 96,
    "page_size": 16,
    "num_pages": 7,
    "prefill_sizes": (16, 64),
    "swap_space_gib": 0,
    "async_scheduling": False,  # the interpreter has one state for all programs
}
LENGTHS, SHARED = (76, 31, 60), 40  # chunks of 64 and 16 tokens, one of 64, and after a prefix hit
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9})
ATTENTION = {"decode", "extend", "prefill", "write_projected"}


@pytest.fixture
def traced(monkeypatch) -> collections.Counter[str]:
    """Have every op take its kernel for Hopper, interpreted; return how often each kernel was traced."""
    found, params = collections.Counter[str](), compat.interpret_params(detect_races=False)

    def interpreted(kernel: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(*operands: Any, **given: Any) -> Any:
            found[kernel.__name__] += 1
            return kernel(*operands, **given, **options, interpret=params)

        return run

    def attends(kernel: attention.Kernel) -> attention.Kernel:
        few = (
            {"tiles": decode.Tiles(stages=2, keys_per_split=64, blocks=3)}
            if kernel.run in (decode.decode, decode.extend)
            else {}
        )
        return kernel._replace(run=interpreted(kernel.run, **few))

    kernels = {
        op: tuple(attends(one) for one in each if one.least == HOPPER) for op, each in attention.IMPLEMENTATIONS.items()
    }
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", kernels)
    for module, name in ((kv_write, "write_projected"), (kv_copy, "copy_pages"), (matmul, "matmul")):
        monkeypatch.setattr(module, name, interpreted(getattr(module, name)))
    for module in (choice, attention, matmul_api):
        monkeypatch.setattr(module, "lowering_target", lambda: Target("gpu", HOPPER))
    # Programs that were not compared at start-up replace no other; comparing them would take the interpreter minutes.
    monkeypatch.setattr(calibration, "_CPU_OPERATIONS", 0)
    return found


def test_the_kernels_of_a_training_step_have_the_served_bits(traced):
    """Sequences are greedy and random, of several chunks, found in the prefix cache, preempted and recomputed."""
    llm = LLM(random_model("bfloat16", gain=4.0, **SHAPE, **HEADS).for_kernels("xla"), **SETTINGS)
    sequences = generate(llm, LENGTHS, tokens=4)
    stats = llm.engine.stats()
    assert stats.preemptions["recompute"] > 0
    assert stats.prefix_hits > 0
    require_served_bits(llm, sequences, traced, ATTENTION)


@pytest.mark.slow
def test_products_of_the_kernel_have_the_served_bits(traced):
    """One short sequence: each product takes the interpreter a second."""
    llm = LLM(random_model("bfloat16", gain=4.0, **SHAPE, **HEADS).for_kernels("mosaic"), **SETTINGS)
    require_served_bits(llm, generate(llm, (18,), tokens=2), traced, {*ATTENTION, "matmul"} - {"extend"})


def require_served_bits(llm: LLM, sequences: Sequences, traced: collections.Counter[str], kernels: set[str]) -> None:
    count = int((sequences.lengths - sequences.prompt_lengths).sum())
    served = Difference(tokens=count, largest=0, kl=0)
    assert sequences.difference_from(llm.logprobs(*zip(*sequences.parts, strict=True))) == served
    before = traced.copy()
    assert sequences.difference(training_step(llm.model, llm.served_programs())) == served
    assert set(traced - before) >= kernels


def generate(llm: LLM, lengths: Sequence[int], tokens: int) -> Sequences:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, SHAPE["vocab_size"], SHARED).tolist()
    prompts = [rng.integers(0, SHAPE["vocab_size"], length).tolist() for length in lengths]
    prompts = [shared + prompt[SHARED:] if len(prompt) > SHARED else prompt for prompt in prompts]
    params = [
        SamplingParams(max_tokens=tokens, seed=at, logprobs=0, ignore_eos=True, **KINDS[at])
        for at in range(len(prompts))
    ]
    return Sequences.of(samples_of(llm.generate(prompts, params)))
