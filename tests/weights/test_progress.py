"""The progress bar is drawn only on a terminal's stderr."""

import io
import sys

import pytest

from jaxinfer.weights.progress import loading_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with loading_bar() as progress:
        assert progress is None
    assert stream.getvalue() == ""


def test_a_bar_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with loading_bar("reading") as progress:
        assert progress is not None
        progress(2**20, 2**21, "a.weight")
        progress(2**21, 2**21, "b.weight")
    assert "reading" in stream.getvalue()
    assert "2.0/2.0 MiB" in stream.getvalue()
    assert capsys.readouterr().out == ""
