"""The tool that trains the demo's adapters, on generated texts."""

import json
import pathlib

import pytest

from tools.train_demo import adapters, corpus
from tools.train_demo.styles import STYLES, Style

BOOK = Style("A Book", "AnonymousCaller", 7, "Call me", steps=3)


def write(data: pathlib.Path, text: str, ebook: int = 7) -> None:
    file = data / "text" / "gutenberg" / f"{ebook}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_a_book_is_its_authors_words_a_paragraph_a_line(tmp_path: pathlib.Path):
    write(
        tmp_path,
        "Title\n\n*** START OF IT ***\nCall me\n“what you _will_.”\n\n\nNo—don’t.\n\n*** END OF IT ***\nLicence",
    )
    assert BOOK.read(tmp_path) == 'Call me "what you will."\n\nNo--don\'t.\n\n'


def test_another_book_is_refused_by_its_title(tmp_path: pathlib.Path):
    write(tmp_path, "It was a dark night.")
    with pytest.raises(ValueError, match=r"7\.txt does not hold 'Call me': it is not A Book"):
        BOOK.read(tmp_path)


def test_missing_books_are_one_sentence(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    assert adapters.main(["--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "1342.txt is missing; it must have Project Gutenberg's text/gutenberg/1342.txt (Pride and Prejudice)" in said


def test_the_learning_rate_rises_and_falls_to_zero():
    rate = adapters._rate(adapters.Schedule(steps=100, warmup=10, learning_rate=1.0))
    assert [float(rate(step)) for step in (0, 5, 10, 55, 100)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


@pytest.mark.slow
def test_a_quick_run_writes_folders_that_are_measured(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    style = STYLES["austen"]
    write(tmp_path, f"{style.begins}. " + "She was handsome, clever, and rich.\n\n" * 200, style.ebook)
    paths = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert adapters.main([*paths, "--quick", "--only", "austen"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{\n") :])["austen"]
    assert found["rank"] == adapters.QUICK.rank
    losses = found["test"]["nats_per_token"]
    assert losses["adapter"] < losses["base"]  # three steps on a text of one sentence
    split = corpus.Split.of(style.read(tmp_path))
    assert len(split.test) > 100
