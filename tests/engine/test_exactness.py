"""Chunks that share a program, and the proof that it changes no bit."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.exactness import proved_lanes
from jaxinfer.llm import LLM
from jaxinfer.types import SamplingParams
from tests.engine.test_invariance import bits, prompts_of
from tests.fakes import random_model


def demo_engine(rows: int = 256) -> LLM:
    """On the machines that were measured, the demo model's products of 64 rows and more agree."""
    return LLM("demo", "float32", max_num_seqs=4, max_model_len=300, prefill_sizes=(64, 128), max_prefill_rows=rows)


@pytest.mark.parametrize("rows", [1, 256])
def test_wide_programs_are_compiled_as_asked(rows):
    llm = LLM(random_model(), max_num_seqs=8, max_model_len=200, prefill_sizes=(16, 64), max_prefill_rows=rows)
    made = set(llm.engine._runner._run.prefill)
    assert made == {(16, 1), (64, 1)} | ({(16, 8), (64, 4)} if rows > 1 else set())


def test_prompts_together_give_the_bits_of_prompts_alone():
    wide, narrow = demo_engine(), demo_engine(rows=1)
    prompts = prompts_of([40, 64, 65, 130, 199, 50, 299, 17], wide.model.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    used = []
    for key, program in list(wide.engine._runner._run.prefill.items()):
        wide.engine._runner._run.prefill[key] = lambda *a, key=key, program=program: used.append(key) or program(*a)
    together = [bits(output) for output in wide.generate(prompts, params)]
    assert {lanes for _, lanes in used if lanes > 1}, "no chunks shared a program"
    assert together == [bits(narrow.generate([prompt], params)[0]) for prompt in prompts]


@pytest.mark.parametrize(("spoil", "proved"), [(None, {64: 4, 128: 2}), (64, {128: 2}), (128, {64: 4})])
def test_a_program_with_other_bits_is_not_used(spoil, proved):
    """A last bit in one element of the last lane is enough."""
    runner = demo_engine().engine._runner

    def spoiled(params, state, batch):
        state, page = program(params, state, batch), int(batch.tables[-1, 0])
        pool = state.pools[-1]
        data = jnp.nextafter(pool.data[page, 1, 0, 0, 0], jnp.inf)
        data = jax.device_put(pool.data.at[page, 1, 0, 0, 0].set(data), pool.data.sharding)
        return state._replace(pools=[*state.pools[:-1], pool._replace(data=data)])

    programs = dict(runner._run.prefill)
    if spoil is not None:
        key = next(key for key in programs if key[0] == spoil and key[1] > 1)
        program = programs[key]
        programs[key] = spoiled
    lanes, _ = proved_lanes(programs, runner._engine, runner._params, runner._state, runner._vocab)
    assert lanes == proved
