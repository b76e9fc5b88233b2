"""What is kept between starts: programs in StableHLO, and what was found out about executables."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer import LLM
from jaxinfer.engine.execution import calibration, compilations
from jaxinfer.parallel.mesh import make_mesh, traced_for
from tests.fakes import random_model

TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Where things are kept, of a CPU, too."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(compilations, "_KEPT_OF", ("cpu",))
    compilations.use_compilation_cache(str(tmp_path))
    yield tmp_path
    compilations.use_compilation_cache(before or "")


class Exports:
    """Counts what could not be taken from an earlier start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, real = 0, compilations._exported

        def exported(*arguments: Any) -> bytes:
            self.count += 1
            return real(*arguments)

        monkeypatch.setattr(compilations, "_exported", exported)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    return Exports(monkeypatch)


def scaled(table: np.ndarray = TABLE, factor: float = 2.0) -> Any:
    def function(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        return {"state": state["state"] + 1}, [x * factor + jnp.asarray(table), state["state"]]

    return function


def run(function: Any, dtype: str = "float32") -> tuple[str, Any]:
    """The text of the program, and what it gives."""
    mesh = make_mesh()
    place = NamedSharding(mesh, PartitionSpec())
    shapes = {"state": jax.ShapeDtypeStruct((4,), np.float32, sharding=place)}
    with traced_for(mesh):
        given = (shapes, jax.ShapeDtypeStruct((2, 3), np.dtype(dtype), sharding=place))
        lowered = compilations.lower(mesh, function, given, 0, place)
    operands = jax.device_put(({"state": np.ones(4, np.float32)}, np.ones((2, 3), dtype)), place)
    return lowered.as_text(), jax.tree.map(np.asarray, lowered.compile()(*operands))


def same(one: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_a_restart_takes_what_was_lowered(folder: pathlib.Path, exports: Exports) -> None:
    first = run(scaled())
    assert exports.count == 1
    again = run(scaled())
    assert exports.count == 1
    assert again[0] == first[0]  # so that JAX finds the executable, too
    assert same(again[1], first[1])
    compilations.use_compilation_cache("")
    direct = run(scaled())
    assert exports.count == 1
    assert same(direct[1], first[1])
    assert "jit_function" in first[0]
    assert "jax.buffer_donor" in first[0] or "tf.aliasing_output" in first[0]


@pytest.mark.parametrize(
    "other",
    [
        lambda: run(scaled(factor=3.0)),
        lambda: run(scaled(TABLE + 1)),  # of which the program's text shows the shape alone
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
    monkeypatch.setattr(compilations, "_sources", lambda: "of another version")
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


def test_findings_are_kept_by_executables_and_settings(folder: pathlib.Path) -> None:
    asked = list[str]()

    def find(digest: str | None, settings: str, value: int = 1) -> Any:
        def find_out() -> dict[str, Any]:
            asked.append(settings)
            return {"value": value}

        return compilations.found_out(digest, settings, find_out, lambda found: isinstance(found.get("value"), int))

    assert find("one", "a") == find("one", "a", 2) == {"value": 1}
    assert find("two", "a", 3) == {"value": 3}
    assert find("one", "b", 4) == {"value": 4}
    assert find(None, "a", 5) == {"value": 5}
    assert asked == ["a", "a", "b", "a"]
    for path in (folder / "calibrated").iterdir():
        path.write_text('{"value": "x"}')
    assert find("one", "a", 6) == {"value": 6}
    compilations.use_compilation_cache("")
    assert find("one", "a", 7) == {"value": 7}


def test_an_engine_proves_its_programs_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "prefill_sizes": (16,), "page_size": 16}
    settings["compilation_cache_dir"] = str(folder)

    def start(**changes: Any) -> Any:
        return LLM(random_model(num_hidden_layers=1), seed=0, **settings | changes).engine.calibration

    with monkeypatch.context() as patched:
        proofs = list[Any]()
        real = calibration._try_out
        patched.setattr(calibration, "_try_out", lambda *each: proofs.append(each) or real(*each))
        first, again = start(), start()
        assert len(proofs) == 1
        assert (again.prefill_batches, again.size_classes) == (first.prefill_batches, first.size_classes)
        assert again.costs != first.costs  # measured each time
        start(multi_step=2)
        assert len(proofs) == 2


def test_where_the_seconds_of_a_start_went_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "jaxinfer.start"):
        LLM(random_model(num_hidden_layers=1), max_num_seqs=2, max_model_len=64, prefill_sizes=(16,), page_size=16)
    told = [message.rpartition(":")[0] for message in caplog.messages]
    assert told[:2] == ["memory planned", "weights loaded"]
    parts = ["traced and lowered", "compiled, or read, behind that"]
    assert [line.partition(" programs ")[2] for line in told[2:4]] == parts
    assert told[4:] == ["programs tried out, or what is known of them read", "costs measured"]
