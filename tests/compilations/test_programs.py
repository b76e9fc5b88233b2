"""Reuse of programs that an earlier start lowered."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer import LLM, SamplingParams
from jaxinfer.compilations import Fingerprints, cache, fingerprints, programs
from jaxinfer.engine.execution.compiled import _lowered
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, traced_for
from tests.compilations.functions import TABLE, scaled
from tests.compilations.jobs import MESH, digest, jobs_of
from tests.compilations.variants import VARIANTS
from tests.fakes import random_model


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Return the cache folder, with caching of CPU programs enabled."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(programs, "_KEPT_OF", ("cpu",))
    monkeypatch.setattr(fingerprints, "_OWN", ("jaxinfer", "pallas_kernels", "tests"))
    cache.use_compilation_cache(str(tmp_path))
    yield tmp_path
    cache.use_compilation_cache(before or "")


class Exports:
    """Counts the programs that were not reused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, real = 0, programs._exported

        def exported(*arguments: Any) -> bytes:
            self.count += 1
            return real(*arguments)

        monkeypatch.setattr(programs, "_exported", exported)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    return Exports(monkeypatch)


def run(function: Any, dtype: str = "float32") -> tuple[str, Any]:
    """Return the text of the program and its results."""
    mesh = make_mesh()
    place = NamedSharding(mesh, PartitionSpec())
    shapes = {"state": jax.ShapeDtypeStruct((4,), np.float32, sharding=place)}
    with traced_for(mesh):
        given = (shapes, jax.ShapeDtypeStruct((2, 3), np.dtype(dtype), sharding=place))
        lowered = programs.lower(mesh, function, given, 0, place, Fingerprints())
    operands = jax.device_put(({"state": np.ones(4, np.float32)}, np.ones((2, 3), dtype)), place)
    return lowered.as_text(), jax.tree.map(np.asarray, lowered.compile()(*operands))


def same(one: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_a_restart_takes_what_was_lowered(folder: pathlib.Path, exports: Exports) -> None:
    first = run(scaled())
    assert exports.count == 1
    again = run(scaled())
    assert exports.count == 1
    assert again[0] == first[0]  # so that JAX's cache finds the executable, too
    assert same(again[1], first[1])
    cache.use_compilation_cache("")
    direct = run(scaled())
    assert exports.count == 1
    assert same(direct[1], first[1])
    assert "jit_function" in first[0]
    assert "jax.buffer_donor" in first[0] or "tf.aliasing_output" in first[0]


@pytest.mark.parametrize(
    "other",
    [
        lambda: run(scaled(factor=3.0)),
        lambda: run(scaled(TABLE + 1)),  # its text shows only the shape
        lambda: run(scaled(factor=1 / 3), "float16"),
    ],
)
def test_another_program_is_another(folder: pathlib.Path, exports: Exports, other: Any) -> None:
    first = run(scaled())
    changed = other()
    assert exports.count == 2
    assert not same(changed[1], first[1])


def test_other_code_makes_other_programs(
    folder: pathlib.Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(scaled())
    monkeypatch.setattr(fingerprints, "sources", lambda: "of another version")
    run(scaled())
    monkeypatch.setenv("MOSAIC_GPU_DUMP", "1")
    run(scaled())
    assert exports.count == 3


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, None])
def test_a_broken_file_is_made_anew(folder: pathlib.Path, exports: Exports, content: bytes | None) -> None:
    first = run(scaled())
    (kept,) = (folder / "lowered").iterdir()
    kept.write_bytes(kept.read_bytes()[:-100] if content is None else content)
    assert same(run(scaled())[1], first[1])
    assert exports.count == 2
    assert same(run(scaled())[1], first[1])
    assert exports.count == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: pathlib.Path, exports: Exports) -> None:
    (folder / "lowered").write_text("no folder")
    assert same(run(scaled())[1], run(scaled())[1])
    assert exports.count == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_program_of_an_engine_is_traced_once(folder: pathlib.Path, exports: Exports, variant: str) -> None:
    make, settings = VARIANTS[variant]
    starts, counts = [], []
    for _ in range(2):
        jobs, prints = jobs_of(make(), **settings), Fingerprints()
        starts.append({name: _lowered(MESH, job, prints) for name, job in jobs.items()})
        counts.append(exports.count)
    alike = {digest(job, prints) for job in jobs.values()}  # a draft model moves pages as its model does
    assert None not in alike
    assert counts == [len(alike)] * 2
    first, again = ({name: one.as_text() for name, one in start.items()} for start in starts)
    assert again == first
    with traced_for(MESH):
        for name, job in jobs.items():
            results = jax.eval_shape(job.function, *job.arguments)
            assert jax.tree.structure(starts[1][name].out_info) == jax.tree.structure(results), name


def test_an_engine_of_kept_programs_says_the_same(folder: pathlib.Path, exports: Exports) -> None:
    def said() -> list[Any]:
        settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "prefill_sizes": (16,), "page_size": 16}
        llm = LLM(model(), seed=0, compilation_cache_dir=str(folder), show_progress=False, **settings)
        prompts = [[5, 9, 17], list(range(1, 30)), [3] * 7]
        done = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, logprobs=1))
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in done]

    def model() -> Model:
        return random_model(num_hidden_layers=1)

    first = said()
    made = exports.count
    assert made > 8
    assert said() == first
    assert exports.count == made
