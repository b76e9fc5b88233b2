"""Corpus of fuzzing requests that produced a new response or executed new lines of the server."""

from __future__ import annotations

import base64
import dataclasses
import json
import pathlib
import random
from collections.abc import Iterator

from tests.serve import fuzz

FILE = pathlib.Path(__file__).with_name("corpus.jsonl")
"""The corpus in the repository. `python -m tests.serve.attack fuzz` extends it."""

MOST_BYTES = 1024
"""Maximum size of a stored request; longer requests are generated anew."""


class Corpus:
    """A file of requests, one per line.

    Attributes:
        requests: in the order in which they were found.
    """

    def __init__(self, file: pathlib.Path = FILE) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self._known = set(lines)
        self.requests = [_request(line) for line in lines]
        self._by_path: dict[str, list[fuzz.Request]] = {}
        for request in self.requests:
            self._by_path.setdefault(request.path, []).append(request)
        self._saved = len(lines)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[fuzz.Request]:
        return iter(self.requests)

    def add(self, request: fuzz.Request) -> bool:
        """Add a request; return whether it is new and short enough."""
        line = to_line(request)
        if line in self._known or len(line) > MOST_BYTES:
            return False
        self._known.add(line)
        self.requests.append(request)
        self._by_path.setdefault(request.path, []).append(request)
        return True

    def save(self) -> int:
        """Append new requests to the file; return their number."""
        new = self.requests[self._saved :]
        with self._file.open("a") as file:
            file.writelines(to_line(request) + "\n" for request in new)
        self._saved = len(self.requests)
        return len(new)

    def draw(self, chance: random.Random) -> fuzz.Request:
        """Draw a new request or a mutation of a stored one. All paths are drawn equally often."""
        if not self.requests or chance.random() < 0.4:
            return fuzz.made(chance)
        known = self._by_path[chance.choice([*self._by_path])]
        return fuzz.mutated(chance, chance.choice(known), chance.choice(known))


def to_line(request: fuzz.Request) -> str:
    """Return a request as JSON; bytes that are text stay readable."""
    fields = {name: value for name, value in dataclasses.asdict(request).items() if value is not None}
    if isinstance(request, fuzz.RpcRequest):
        fields["messages"] = [_written(message) for message in request.messages]
    for name in ("body", "raw"):
        if name in fields:
            fields[name] = _written(fields[name])
    return json.dumps(fields, sort_keys=True)


def _request(line: str) -> fuzz.Request:
    fields = json.loads(line)
    if "messages" in fields:
        return fuzz.RpcRequest(fields["path"], tuple(map(_read, fields["messages"])), fields["whole"])
    read = {name: _read(fields[name]) for name in ("body", "raw") if name in fields}
    return fuzz.HttpRequest(**{**fields, **read})


def _written(data: bytes) -> str:
    try:
        return "=" + data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()


def _read(text: str) -> bytes:
    return text[1:].encode() if text.startswith("=") else base64.b64decode(text)
