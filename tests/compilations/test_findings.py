"""Findings about executables are cached."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxinfer import LLM
from jaxinfer.compilations import found_out, use_compilation_cache
from jaxinfer.engine.execution import calibration
from tests.fakes import random_model


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache(str(tmp_path))
    yield tmp_path
    use_compilation_cache(before or "")


def test_findings_are_kept_by_executables_and_settings(folder: pathlib.Path) -> None:
    asked = list[str]()

    def find(digest: str | None, settings: str, value: int = 1) -> Any:
        def find_out() -> dict[str, Any]:
            asked.append(settings)
            return {"value": value}

        return found_out(digest, settings, find_out, lambda found: isinstance(found.get("value"), int))

    assert find("one", "a") == find("one", "a", 2) == {"value": 1}
    assert find("two", "a", 3) == {"value": 3}
    assert find("one", "b", 4) == {"value": 4}
    assert find(None, "a", 5) == {"value": 5}
    assert asked == ["a", "a", "b", "a"]
    for path in (folder / "calibrated").iterdir():
        path.write_text('{"value": "x"}')
    assert find("one", "a", 6) == {"value": 6}
    use_compilation_cache("")
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
