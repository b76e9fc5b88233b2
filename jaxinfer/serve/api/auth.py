"""API key authentication: keys with scopes, stored as hashes in a file. No jax.

The file is a YAML list; `jaxinfer keys` writes its entries:

```yaml
- name: alice
  sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
  scopes: [infer, observe]
  cache_group: team-a  # optional: names of the same group share cached prefixes
  weight: 2            # optional: share under the fair policy, relative to a key without a weight
```

An unsalted SHA-256 is enough, and a slow hash would be worse: keys are 256 random bits, which cannot be guessed from a
hash, and a hash that costs milliseconds would let any client keep the server busy with invalid keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import logging
import pathlib
import re
import reprlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.tenants import tenant_of_certificate

SCOPES = ("infer", "observe", "admin")
"""Scopes of a key: use the model; read metrics and state; control the server. No scope implies another."""

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 64
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
_MAX_TOKEN_CHARACTERS = 512
_LOOK_SECONDS = 0.5

_log = logging.getLogger("jaxinfer.serve")


class KeysError(ValueError):
    """Error for a keys file that cannot be used. The message names the file and the entry."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """An authenticated caller. Without a keys file it has all scopes, and the name from its client certificate.

    Attributes:
        name: tenant name, see `jaxinfer.serve.api.tenants`.
        cache_group: group of tenants that share cached prefixes; None: no sharing.
        weight: share under the fair policy, relative to other tenants.
        digest: SHA-256 of the key. Several keys may have the same name.
    """

    name: str
    scopes: frozenset[str]
    cache_group: str | None = None
    weight: float = 1.0
    digest: bytes = dataclasses.field(default=b"", repr=False, compare=False)


@dataclasses.dataclass(eq=False)
class _Open:
    """A call in progress, and the callback that ends it."""

    digest: bytes
    scope: str
    cut: Callable[[ServeError], None]


@dataclasses.dataclass(frozen=True)
class _Key:
    digest: bytes
    caller: Caller


class Authoriser:
    """Authorisation by a keys file, which is reloaded when it changes. Calls of revoked keys are ended.

    Args:
        path: keys file; None: all callers have all scopes, which the settings allow on loopback only.
        clock: clock in seconds; the file is checked at most twice a second.

    Raises:
        KeysError: the file cannot be read or parsed. An invalid later version is logged, and the previous keys stay
            valid.
    """

    def __init__(self, path: str | pathlib.Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = None if path is None else pathlib.Path(path)
        self._clock, self._looked = clock, clock()
        self._seen = _version(self._path) if self._path is not None else None
        self._keys: tuple[_Key, ...] = ()
        self._tenants: dict[str, Caller] = {}
        if self._path is not None:
            self._use(read_keys(self._path))
        self._open: set[_Open] = set()

    def authorise(
        self, token: str | None, scope: str, certificate: Callable[[], bytes | None] = lambda: None
    ) -> Caller:
        """Return the caller with the API key ``token``; without a keys file, with the verified ``certificate`` (DER).

        Raises:
            ServeError: UNAUTHENTICATED: the key is missing or unknown; FORBIDDEN: it lacks ``scope``.
        """
        if self._path is None:
            der = certificate()
            return Caller("" if der is None else tenant_of_certificate(der), frozenset(SCOPES))
        if self._clock() - self._looked >= _LOOK_SECONDS:
            self.look()
        if not token:
            raise ServeError(Kind.UNAUTHENTICATED, "an API key is needed: authorization: Bearer KEY")
        caller = self._find(token[: _MAX_TOKEN_CHARACTERS + 1])
        if caller is None:
            raise ServeError(Kind.UNAUTHENTICATED, "the API key is not known here")
        if scope not in caller.scopes:
            raise ServeError(Kind.FORBIDDEN, f"the API key of {caller.name!r} lacks the scope {scope!r}")
        return caller

    def cache_group(self, name: str) -> str | None:
        """Return the current cache group of the keys with this name."""
        return self._tenants[name].cache_group if name in self._tenants else None

    def weight(self, name: str) -> float:
        """Return the current weight of the keys with this name."""
        return self._tenants[name].weight if name in self._tenants else 1.0

    @contextlib.contextmanager
    def during(self, caller: Caller, scope: str, cut: Callable[[ServeError], None]) -> Iterator[None]:
        """Watch the key of an authorised call: call ``cut`` if the key or its scope is revoked."""
        call = _Open(caller.digest, scope, cut)
        self._open.add(call)
        try:
            yield
        finally:
            self._open.discard(call)

    async def run(self) -> None:
        """Check the file for changes periodically until cancelled, also while there are no calls."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Reload the file if it has changed, and end the calls of revoked keys."""
        if self._path is None:
            return
        self._looked = self._clock()
        version = _version(self._path)
        if version == self._seen:
            return
        self._seen = version
        try:
            keys = read_keys(self._path)
            if not keys and self._path.stat().st_size == 0:
                raise KeysError(f"{self._path} is empty, as if it were being written ([] takes all keys away)")
            self._use(keys)
        except KeysError as error:
            _log.error("the API keys of before stay in use: %s", error)
        else:
            _log.info("%d API keys were read again from %s", len(self._keys), self._path)
            self._end_revoked()

    def _end_revoked(self) -> None:
        scopes = {key.digest: key.caller.scopes for key in self._keys}
        for call in list(self._open):
            if call.digest not in scopes:
                call.cut(ServeError(Kind.UNAUTHENTICATED, "the API key was taken away"))
            elif call.scope not in scopes[call.digest]:
                call.cut(ServeError(Kind.FORBIDDEN, f"the scope {call.scope!r} of the API key was taken away"))

    def _find(self, token: str) -> Caller | None:
        """Find the caller of a key. All keys are compared, so that the duration reveals nothing about any of them."""
        digest, found = _digest(token), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        return found

    def _use(self, keys: tuple[_Key, ...]) -> None:
        self._keys, self._tenants = keys, {key.caller.name: key.caller for key in keys}


def read_keys(path: pathlib.Path) -> tuple[_Key, ...]:
    """Read the entries of a keys file; an empty file has none, so that all calls are rejected.

    Raises:
        KeysError: the file cannot be read, is too large, has an invalid entry, or keys of one name differ in group or
            weight.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        entries = yaml.safe_load(data) if len(data) <= MAX_FILE_BYTES else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as cause:  # ValueError: the date 2026-13-45
        raise KeysError(f"cannot read the API keys in {path}: {' '.join(str(cause).split())}") from cause
    if len(data) > MAX_FILE_BYTES:
        raise KeysError(f"{path} has more than {MAX_FILE_BYTES} bytes of API keys")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise KeysError(f"{path} must be a list of at most {MAX_KEYS} API keys")
    keys = tuple(_key(entry, f"API key {rank + 1} in {path}") for rank, entry in enumerate(entries))
    _check_tenants(keys, path)
    return keys


def new_key() -> str:
    """Generate a key: 256 random bits, with a prefix that secret scanners can detect."""
    return f"jaxinfer-{secrets.token_urlsafe(32)}"


def key_entry(
    key: str, name: str, scopes: Sequence[str], cache_group: str | None = None, weight: float | None = None
) -> str:
    """Return the entry of a key in the keys file, as YAML.

    Raises:
        KeysError: the name, a scope, the group or the weight is not allowed.
    """
    fields: dict[str, Any] = {"name": name, "sha256": _digest(key).hex(), "scopes": list(scopes)}
    if cache_group is not None:
        fields["cache_group"] = cache_group
    if weight is not None:
        fields["weight"] = weight
    _key(fields, f"key of {name!r}")
    return yaml.safe_dump([fields], sort_keys=False, allow_unicode=True)


def _key(entry: Any, where: str) -> _Key:
    needed, known = {"name", "sha256", "scopes"}, {"name", "sha256", "scopes", "cache_group", "weight"}
    if not isinstance(entry, dict) or not needed <= entry.keys() <= known:
        optional = ", ".join(sorted(known - needed))
        raise KeysError(f"{where} must have the fields {', '.join(sorted(needed))}, and may have {optional}")
    name, digest, scopes, group = entry["name"], entry["sha256"], entry["scopes"], entry.get("cache_group")
    for field, value in {"name": name, **({} if group is None else {"cache_group": group})}.items():
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS or not value.isprintable():
            most = f"must be 1 to {MAX_NAME_CHARACTERS} printable characters"
            raise KeysError(f"{where}: {field}={reprlib.repr(value)} {most}")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise KeysError(f"{where}: sha256 must be 64 hexadecimal digits in lower case")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise KeysError(f"{where}: scopes={reprlib.repr(scopes)} must be some of {', '.join(SCOPES)}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise KeysError(f"{where}: weight={reprlib.repr(weight)} must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    key = bytes.fromhex(digest)
    return _Key(key, Caller(name, frozenset(scopes), group, float(weight), key))


def _check_tenants(keys: Sequence[_Key], path: pathlib.Path) -> None:
    """Check that all keys of a tenant have the same cache group and weight."""
    tenants: dict[str, Caller] = {}
    for caller in (key.caller for key in keys):
        first = tenants.setdefault(caller.name, caller)
        for field in ("cache_group", "weight"):
            value, other = getattr(first, field), getattr(caller, field)
            if value != other:
                what = f"{field}={value!r} and {field}={other!r}"
                raise KeysError(f"{path}: API keys of the name {caller.name!r} have {what}")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _version(path: pathlib.Path) -> tuple[int, int, int] | None:
    """Return the file's inode, mtime and size, which change when it is replaced or written; None: no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
