"""The progress bar of a batch: where it is drawn and its text."""

from __future__ import annotations

import pytest

from jaxinfer.llm import prompts_bar


def test_no_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (None, False):
        with prompts_bar(3, show) as count:
            count(5, 1)
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_is_asked_for_is_drawn_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with prompts_bar(3, True) as count:
        count(5, 0)
        count(7, 1)
        count(0, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "tokens/s" in err
    assert err.count("\x1b[?25l") == err.count("\x1b[?25h") == 1  # the cursor is shown again


def test_the_cursor_comes_back_after_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with prompts_bar(3, True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    err = capsys.readouterr().err
    assert err.rfind("\x1b[?25h") > err.rfind("\x1b[?25l") >= 0
