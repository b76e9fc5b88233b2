"""The lists of the longest tests."""

import pathlib

import pytest

from tools import durations

XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="1.5"/><testcase classname="tests.a" name="two" time="0.25"/>
<testcase classname="tests.b" name="one" time="1.6"/>
</testsuite></testsuites>"""


def test_files_and_tests_are_listed_by_their_seconds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "host.xml").write_text(XML)
    monkeypatch.setattr(durations, "FOLDER", tmp_path)
    assert durations.main(["--most", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "host: 3 tests, 3 s of one process",
        "",
        "     1.8 s  tests.a",
        "     1.6 s  tests.b",
        "",
        "     1.6 s  tests.b::one",
        "     1.5 s  tests.a::one",
        "",
    ]
