"""Server-sent events, as the HTML standard defines them ("9.2.6 Interpreting an event stream")."""

from __future__ import annotations


class EventParser:
    """Incremental parser of byte chunks of any size to the data of events. Fields other than ``data`` are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of each event that ``chunk`` completes."""
        events = []
        for line in self._lines(chunk):
            if line:
                self._field(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if lines and self._first:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
            self._first = False
        return lines

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
