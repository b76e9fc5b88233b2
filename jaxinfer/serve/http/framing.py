"""Validation of HTTP request heads before the request is processed (RFC 9112).

If two servers disagree on where a request ends, one client can inject bytes into another client's request (request
smuggling). The parser is strict about characters, line endings and lengths; this module rejects other ambiguities.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Headers = Sequence[tuple[bytes, bytes]]
"""Header fields as (name, value); names in lower case."""

VERSIONS = ("1.0", "1.1")

_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[0-9A-Za-z._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
_TARGET = re.compile(rb"(?:https?://[^/?#@]+)?/[^#]*", re.IGNORECASE)


def fault_of(method: bytes, version: str, target: bytes, headers: Headers) -> tuple[int, str] | None:
    """Return the status and message for a head that is rejected, or None if the request may be processed."""
    if version not in VERSIONS:
        return 505, f"HTTP/{version} is not served, only {' and '.join(VERSIONS)}"
    return _of_target(method, target) or _of_host(version, headers) or _of_body(version, headers)


def without_upgrade(method: bytes, version: str, target: bytes, headers: Headers) -> bytes:
    """Return the request head without its ``Upgrade`` header."""
    lines = (name + b": " + value for name, value in headers if name != b"upgrade")
    return b"\r\n".join([b"%s %s HTTP/%s" % (method, target, version.encode()), *lines, b"", b""])


def _of_target(method: bytes, target: bytes) -> tuple[int, str] | None:
    if method == b"CONNECT":
        return 501, "CONNECT is not served: this is no proxy"
    if _TARGET.fullmatch(target) or (method, target) == (b"OPTIONS", b"*"):
        return None
    return 400, "the target of the request must be a path, or an address of http or https with one"


def _of_host(version: str, headers: Headers) -> tuple[int, str] | None:
    hosts = _values(headers, b"host")
    if len(hosts) > 1 or (version != "1.0" and not hosts):
        return 400, f"the header Host must be there once, not {len(hosts)} times"
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return 400, f"host={hosts[0][:100].decode('latin-1')!r} is no host with or without a port"
    return None


def _of_body(version: str, headers: Headers) -> tuple[int, str] | None:
    codings = _values(headers, b"transfer-encoding")
    if codings and version == "1.0":
        return 400, "HTTP/1.0 has no Transfer-Encoding"
    if codings and [coding.lower() for coding in codings] != [b"chunked"]:
        last = codings[-1].lower().rpartition(b",")[2].strip()
        return 501 if last == b"chunked" else 400, "Transfer-Encoding must be 'chunked' and nothing else"
    expected = [value.lower() for value in _values(headers, b"expect") if value.lower() != b"100-continue"]
    if expected and version != "1.0":
        return 417, f"expect={expected[0][:100].decode('latin-1')!r} must be 100-continue"
    return None


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for field, value in headers if field == name]
