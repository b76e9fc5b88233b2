"""Generator of the blocking client, jaxinfer/client/sync.py, from the client for asyncio, jaxinfer/client/aio.py.

    make sync-client                                 write it
    python -m tools.gen_sync_client --check          fail if the checked-in file is out of date (make lint)

Each rule replaces a text of aio.py, in code and docstrings alike; ruff then removes unused imports and formats.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE, TARGET = (ROOT / "jaxinfer/client" / name for name in ("aio.py", "sync.py"))
_HEADER = '"""Blocking client, for programs without an event loop. Generated from aio.py by make sync-client."""'
_RULES = {
    # syntax, and the names of the APIs
    r"\basync (?=def|with|for)": "",
    r"\bawait ": "",
    r"\b__a(?=enter__|exit__|iter__|next__)": "__",
    r"\bimport grpc\.aio\n": "",
    r"\bgrpc\.aio\.": "grpc.",
    r"\basyncio\.sleep": "time.sleep",
    r"\bStopAsyncIteration": "StopIteration",
    r"\bcontextlib\.aclosing": "contextlib.closing",
    r"\b(requests|translated|read_response)_async\b": r"\1",
    # types
    r"Iterable\[Prompt\] \| AsyncIterable\[Prompt\]": "Iterable[Prompt]",
    r"\bAsyncGenerator\[(\w+), None\]": r"Iterator[\1]",
    r"\bAsync(?=Client|Stream|Iterator)": "",
    # sentences
    r"tasks of one event loop\. Create it where the loop runs": "threads",
    r"; a cancelled task cancels its call": "",
    r"``prompts`` is read(?= no faster)": "``prompts`` is read in another thread,",
    r"Abort the request(?=\. A concurrent)": "Abort the request, from any thread",
}
_FIXES = (("check", "--select=F401,I001", "--fix-only", "--quiet"), ("format",))


def generate() -> str:
    """Return the blocking client.

    Raises:
        ValueError: a rule replaces nothing.
    """
    text = re.sub(r'\A"""[^\n]*"""', _HEADER, SOURCE.read_text(encoding="utf-8"))
    for pattern, replacement in _RULES.items():
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise ValueError(f"the rule {pattern!r} finds nothing in {SOURCE.name}")
    for words in _FIXES:
        command = [sys.executable, "-m", "ruff", *words, f"--stdin-filename={TARGET}", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    options = parser.parse_args(arguments)
    made = generate()
    if not options.check:
        TARGET.write_text(made, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != made:
        print(f"{TARGET.relative_to(ROOT)} is out of date: run make sync-client")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
