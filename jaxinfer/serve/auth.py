"""Who may do what: API keys with scopes, kept as hashes in a file. No jax.

The file is a YAML list, `python -m jaxinfer.serve.keys` writes its entries:

```yaml
- name: alice
  sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
  scopes: [infer, observe]
```

A plain SHA-256 is enough, and a slow hash would be worse: keys are 256 random bits, which nobody guesses from a hash
however fast it is, and a hash that costs milliseconds would let anyone keep the server busy with wrong keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import pathlib
import re
import reprlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from jaxinfer.serve.errors import Kind, ServeError

SCOPES = ("infer", "observe", "admin")
"""Use the model; see figures and states; control the server. None of them implies another."""

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 64
_MAX_TOKEN_CHARACTERS = 512
_LOOK_SECONDS = 1.0

_log = logging.getLogger("jaxinfer.serve")


class KeysError(ValueError):
    """A file of keys that cannot be used. The message names the file and the entry."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Whoever has shown a key. Without a keys file everybody is the nameless caller with all scopes."""

    name: str
    scopes: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _Key:
    digest: bytes
    caller: Caller


class Authoriser:
    """Checks keys against a file, which is read again when it changes.

    Args:
        path: None: everybody may do everything, which the settings allow on loopback only.
        clock: in seconds; the file is looked at once a second at most.

    Raises:
        KeysError: the file cannot be read or understood. A later version that is bad is logged, and the keys that were
            good before stay.
    """

    def __init__(self, path: str | pathlib.Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = None if path is None else pathlib.Path(path)
        self._clock, self._looked = clock, clock()
        self._seen = _version(self._path) if self._path is not None else None
        self._keys = read_keys(self._path) if self._path is not None else ()

    def authorise(self, token: str | None, scope: str) -> Caller:
        """The caller whose key ``token`` is.

        Raises:
            ServeError: UNAUTHENTICATED: there is no such key; FORBIDDEN: it lacks ``scope``.
        """
        if self._path is None:
            return Caller("", frozenset(SCOPES))
        self._refresh(self._path)
        if not token:
            raise ServeError(Kind.UNAUTHENTICATED, "an API key is needed: authorization: Bearer KEY")
        caller = self._find(token[: _MAX_TOKEN_CHARACTERS + 1])
        if caller is None:
            raise ServeError(Kind.UNAUTHENTICATED, "the API key is not known here")
        if scope not in caller.scopes:
            raise ServeError(Kind.FORBIDDEN, f"the API key of {caller.name!r} lacks the scope {scope!r}")
        return caller

    def _find(self, token: str) -> Caller | None:
        """Compares with every key, so that the time tells nothing about any of them."""
        digest, found = _digest(token), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        return found

    def _refresh(self, path: pathlib.Path) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        version = _version(path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys = read_keys(path)
        except KeysError as error:
            _log.error("the API keys of before stay in use: %s", error)
        else:
            _log.info("%d API keys were read again from %s", len(self._keys), path)


def read_keys(path: pathlib.Path) -> tuple[_Key, ...]:
    """The entries of a keys file; an empty file has none, so that nobody may do anything.

    Raises:
        KeysError: it cannot be read, is too large, or has an entry that is not as it should be.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        entries = yaml.safe_load(data) if len(data) <= MAX_FILE_BYTES else None
    except (OSError, yaml.YAMLError, RecursionError) as cause:
        raise KeysError(f"cannot read the API keys in {path}: {' '.join(str(cause).split())}") from cause
    if len(data) > MAX_FILE_BYTES:
        raise KeysError(f"{path} has more than {MAX_FILE_BYTES} bytes of API keys")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise KeysError(f"{path} must be a list of at most {MAX_KEYS} API keys")
    return tuple(_key(entry, f"API key {rank + 1} in {path}") for rank, entry in enumerate(entries))


def new_key() -> str:
    """A key nobody has: 256 random bits, with a mark that secret scanners can look for."""
    return f"jaxinfer-{secrets.token_urlsafe(32)}"


def key_entry(key: str, name: str, scopes: Sequence[str]) -> str:
    """What the file says of a key, as YAML.

    Raises:
        KeysError: the name or a scope is not allowed.
    """
    fields = {"name": name, "sha256": _digest(key).hex(), "scopes": list(scopes)}
    _key(fields, f"key of {name!r}")
    return yaml.safe_dump([fields], sort_keys=False, allow_unicode=True)


def _key(entry: Any, where: str) -> _Key:
    fields = {"name", "sha256", "scopes"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise KeysError(f"{where} must have the fields {', '.join(sorted(fields))}")
    name, digest, scopes = entry["name"], entry["sha256"], entry["scopes"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise KeysError(f"{where}: name={reprlib.repr(name)} must be 1 to {MAX_NAME_CHARACTERS} printable characters")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise KeysError(f"{where}: sha256 must be 64 hexadecimal digits in lower case")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise KeysError(f"{where}: scopes={reprlib.repr(scopes)} must be some of {', '.join(SCOPES)}")
    return _Key(bytes.fromhex(digest), Caller(name, frozenset(scopes)))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _version(path: pathlib.Path) -> tuple[int, int, int] | None:
    """What changes when the file is replaced or written; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
