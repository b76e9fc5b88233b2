"""The tables of settings in docs/ match the dataclasses."""

import dataclasses
import pathlib

import pytest

from jaxinfer.config import EngineConfig
from tools import settings_tables


def test_what_is_checked_in_is_current() -> None:
    assert settings_tables.main(["--check"]) == 0


def test_an_old_table_is_seen_and_written_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings_tables, "DOCS", tmp_path)
    for name in settings_tables.PAGES:
        (tmp_path / name).write_text("before\n<!-- settings: EngineConfig -->\n<!-- end -->\nbehind\n")
    assert settings_tables.main(["--check"]) == 1
    assert settings_tables.main([]) == 0
    assert "docs/serving.md written" in capsys.readouterr().out
    assert settings_tables.main(["--check"]) == 0
    page = (tmp_path / "settings.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("behind\n")
    for field in dataclasses.fields(EngineConfig):
        assert page.count(f"\n| `{field.name}` |") == 1
