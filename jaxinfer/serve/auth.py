"""Authorise callers: API keys with scopes, kept as hashes in a file. No jax.

The file is a YAML list, `jaxinfer keys` writes its entries:

```yaml
- name: alice
  sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
  scopes: [infer, observe]
  cache_group: team-a  # optional: names of the same group share cached prefixes
  weight: 2            # optional: its share under the fair policy, in that of a key without one
```

A plain SHA-256 is enough, and a slow hash would be worse: keys are 256 random bits, which nobody guesses from a hash
however fast it is, and a hash that costs milliseconds would let anyone keep the server busy with wrong keys.
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

from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.tenants import tenant_of_certificate

SCOPES = ("infer", "observe", "admin")
"""Use the model; see figures and states; control the server. None of them implies another."""

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 64
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
_MAX_TOKEN_CHARACTERS = 512
_LOOK_SECONDS = 0.5

_log = logging.getLogger("jaxinfer.serve")


class KeysError(ValueError):
    """A file of keys that cannot be used. The message names the file and the entry."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Whoever has shown a key. Without a keys file everybody has all scopes, and the name that a certificate gives.

    Attributes:
        name: the tenant, see `jaxinfer.serve.tenants`.
        cache_group: the tenants with which it shares cached prefixes; None: with none.
        weight: its share under the fair policy, in that of others.
        digest: of the key. Several may have one name.
    """

    name: str
    scopes: frozenset[str]
    cache_group: str | None = None
    weight: float = 1.0
    digest: bytes = dataclasses.field(default=b"", repr=False, compare=False)


@dataclasses.dataclass(eq=False)
class _Open:
    """A call that has begun, and what ends it."""

    digest: bytes
    scope: str
    cut: Callable[[ServeError], None]


@dataclasses.dataclass(frozen=True)
class _Key:
    digest: bytes
    caller: Caller


class Authoriser:
    """Checks keys against a file, which is read again when it changes. Calls of keys that are taken away are ended.

    Args:
        path: None: everybody may do everything, which the settings allow on loopback only.
        clock: in seconds; the file is looked at twice a second at most.

    Raises:
        KeysError: the file cannot be read or understood. A later version that is bad is logged, and the keys that were
            good before stay.
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
        """The caller whose key ``token`` is; without a keys file, whose ``certificate`` (DER, verified) was shown.

        Raises:
            ServeError: UNAUTHENTICATED: there is no such key; FORBIDDEN: it lacks ``scope``.
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
        """The cache group of the keys of this name, now."""
        return self._tenants[name].cache_group if name in self._tenants else None

    def weight(self, name: str) -> float:
        """The weight of the keys of this name, now."""
        return self._tenants[name].weight if name in self._tenants else 1.0

    @contextlib.contextmanager
    def during(self, caller: Caller, scope: str, cut: Callable[[ServeError], None]) -> Iterator[None]:
        """Watch the key of an authorised call: ``cut`` is called if the key is taken away, or its scope."""
        call = _Open(caller.digest, scope, cut)
        self._open.add(call)
        try:
            yield
        finally:
            self._open.discard(call)

    async def run(self) -> None:
        """Look at the file also while nobody calls, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed, and end the calls of keys that are gone."""
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
        """Compares with every key, so that the time tells nothing about any of them."""
        digest, found = _digest(token), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.caller
        return found

    def _use(self, keys: tuple[_Key, ...]) -> None:
        self._keys, self._tenants = keys, {key.caller.name: key.caller for key in keys}


def read_keys(path: pathlib.Path) -> tuple[_Key, ...]:
    """The entries of a keys file; an empty file has none, so that nobody may do anything.

    Raises:
        KeysError: it cannot be read, is too large, or has an entry that is not as it should be, or keys of one name
            have different groups or weights.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        entries = yaml.safe_load(data) if len(data) <= MAX_FILE_BYTES else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as cause:  # ValueError: 2026-13-45 is no date
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
    """A key nobody has: 256 random bits, with a mark that secret scanners can look for."""
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
    """A tenant may have several keys, but is in one group and has one weight."""
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
    """The state of the file, which changes when it is replaced or written; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
