"""Texts of other authors, on which the demo's adapters are trained."""

from __future__ import annotations

import dataclasses
import pathlib
import re

_ENDS = "*** END OF"
_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "_": None, "\ufeff": None})


@dataclasses.dataclass(frozen=True)
class Style:
    """One book, out of copyright.

    Attributes:
        ebook: its number at Project Gutenberg; ``text/gutenberg/NUMBER.txt`` of the data folder.
        begins: its first words: text before them is not the author's.
        steps: training steps.
    """

    title: str
    author: str
    ebook: int
    begins: str
    steps: int

    def read(self, data: pathlib.Path) -> str:
        """Return the book: a paragraph a line, and an empty line after each; ASCII quotes and dashes.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is another book.
        """
        file = data / "text" / "gutenberg" / f"{self.ebook}.txt"
        whole = file.read_text(encoding="utf-8")
        at = whole.find(self.begins)
        if at < 0:
            raise ValueError(f"{file} does not hold {self.begins!r}: it is not {self.title}")
        return "\n\n".join(_paragraphs(whole[at:].split(_ENDS)[0].translate(_PLAIN))) + "\n\n"


STYLES = {
    "austen": Style("Pride and Prejudice", "Jane Austen", 1342, "It is a truth universally acknowledged", steps=160),
    "melville": Style("Moby-Dick", "Herman Melville", 2701, "Call me Ishmael.", steps=400),
}


def _paragraphs(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in parts if part]
