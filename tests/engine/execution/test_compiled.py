"""Compiled steps only write into the KV pools in place: no copies, slices or conversions."""

import concurrent.futures
import re
import threading
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution import compiled
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.parallel.mesh import make_mesh
from tests.fakes import random_model


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def engine(request) -> Engine:
    config = EngineConfig(
        max_num_seqs=4, page_size=16, num_pages=1031, max_model_len=96, prefill_sizes=(16, 32), multi_step=3
    )
    return Engine(prepare(random_model(request.param), config, "cpu"))


def programs(engine: Engine) -> dict[str, jax.stages.Compiled]:
    run = engine._executor.runtimes[-1].run
    return {
        **{f"decode {n}": p for n, p in run.decode.items()},
        **{f"decode_many {n}": p for n, p in run.decode_many.items()},
        "logprobs": run.prefill_logprobs,
        "copy": run.copy,
        **{f"restore {n}": p for n, p in run.restore.items()},
        **{f"prefill {n}": p for n, p in run.prefill.items()},
    }


def test_no_program_copies_or_slices_a_pool(engine):
    for name, program in programs(engine).items():
        text = program.as_text()
        made = re.findall(r"= (?:f32|bf16)\[1031,2,2,16,8\]\S* (\S+?)\(", text)
        assert made, name
        # A fusion that produces a pool is the scatter that updates it in place; any other op would be a second pool.
        assert set(made) <= {"parameter", "get-tuple-element", "fusion", "scatter", "bitcast"} | LOOPED, name
        assert not re.search(r"\[1031,2,2,16,8\]\S* (copy|convert|transpose|dynamic-slice|slice|select)\(", text), name


# XLA:CPU runs a scatter as a loop of in-place updates.
LOOPED = {"dynamic-update-slice", "while", "tuple"}


def test_no_program_takes_an_array_of_nothing(engine):
    """Empty operands would cost the host time at every call."""
    for name, program in programs(engine).items():
        assert all(aval.size for aval in jax.tree.leaves(program.in_avals)), name


def test_every_pool_is_aliased(engine):
    pools = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._executor.runtimes[-1].pools))
    for name, program in programs(engine).items():
        assert program.memory_analysis().alias_size_in_bytes >= pools, name
        assert program.memory_analysis().temp_size_in_bytes < pools, name


def test_a_pool_that_is_not_donated_is_seen(engine):
    """The checks above can fail: the same program without donation aliases nothing."""
    pool = engine._executor.runtimes[-1].pools[0].data
    program = jax.jit(lambda x: x.at[np.array([1])].set(0)).lower(pool).compile()
    assert program.memory_analysis().alias_size_in_bytes == 0


class Lowered:
    """A fake lowered program, which records when its compilation begins."""

    def __init__(self, name: str) -> None:
        self.name, self.begun = name, threading.Event()

    def compile(self, compiler_options: object) -> str:
        self.begun.set()
        return f"{self.name}, {compiler_options['loops']}"


def job_of(name: str) -> compiled._Job:
    return compiled._Job(print, ({},), None, name)


def test_a_program_is_compiled_while_others_are_traced(monkeypatch):
    made, told = [], []

    def lowered(mesh, job, fingerprints):
        assert all(one.begun.wait(60) for one in made)
        made.append(Lowered(job.results))
        return made[-1]

    monkeypatch.setattr(compiled, "_lowered", lowered)
    monkeypatch.setattr(compiled, "compiler_options", lambda mesh, loops, copies: {"loops": str(loops)})
    several = job_of("e")._replace(loops=True)
    work = [(make_mesh(), {"decode": job_of("d"), "prefill": job_of("p")}), (make_mesh(), {"decode": several})]
    done = compiled._compile(work, lambda *progress: told.append(progress))
    assert done == [{"decode": "d, False", "prefill": "p, False"}, {"decode": "e, True"}]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_on_several_devices_no_program_with_collectives_has_its_loops_in_a_command_buffer(monkeypatch):
    monkeypatch.setattr(compiled, "compiler_options", lambda mesh, loops, copies: {"loops": str(loops)})
    meshes, looping = [mock.Mock(spec=Mesh, size=size) for size in (1, 8)], job_of("e")._replace(loops=True)
    for job, found in ((looping, ["True", "False"]), (looping._replace(collectives=False), ["True", "True"])):
        assert [job.options(mesh)["loops"] for mesh in meshes] == found


def test_where_a_program_cannot_be_the_others_are_not_waited_for(monkeypatch):
    ended = []

    class Threads(concurrent.futures.ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            ended.append(cancel_futures)
            super().shutdown(wait, cancel_futures=cancel_futures)

    def lowered(mesh, job, fingerprints):
        raise ValueError("no such kernel")

    monkeypatch.setattr(compiled.concurrent.futures, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(compiled, "_lowered", lowered)
    with pytest.raises(ValueError, match="no such kernel"):
        compiled._compile([(make_mesh(), {"decode": job_of("d")})])
    assert ended[0]
