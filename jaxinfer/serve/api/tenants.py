"""Tenant names, and the scopes that separate the cached pages and request ids of tenants. No jax.

A tenant is an authenticated identity: the name of an API key or, with client certificates instead of keys, the names in
the certificate. Without either all clients are the one tenant "".
"""

from __future__ import annotations

import functools
import hashlib

TENANT, ALL = "tenant", "all"
SHARING = (TENANT, ALL)
"""Sharing of cached prefixes: within a tenant and its group, or between all tenants."""

_BETWEEN = "\n"  # not in tenants and ids, which are printable

_VERSION, _EXTENSIONS = 0xA0, 0xA3  # tags of a certificate's optional fields
_SUBJECT_ALT_NAME = bytes.fromhex("0603551d11")  # as an object identifier, 2.5.29.17
_ISSUER, _SUBJECT = 2, 4  # field indices in a certificate's body, after its version


def cache_scope(tenant: str, group: str | None = None) -> str:
    """Return the `Request.cache_scope` of a tenant: its own, or that of its cache group. Scopes of tenants and groups
    never collide, whatever their names."""
    return f"tenant:{tenant}" if group is None else f"group:{group}"


# ---- request ids


def engine_id(tenant: str, request_id: str) -> str:
    """Return the engine's id of a request: tenants choose request ids independently."""
    return f"{tenant}{_BETWEEN}{request_id}" if tenant else request_id


def own_id(name: str) -> str:
    """Return the client's request id of an `engine_id`."""
    return name.rpartition(_BETWEEN)[2]


# ---- certificates


@functools.lru_cache(maxsize=4096)
def tenant_of_certificate(der: bytes) -> str:
    """Return the tenant of a certificate: "cert:" and a hash of issuer, subject and subject alternative names.

    It is the same for all APIs, and after a renewal under the same names. The certificate must have been verified.

    Raises:
        ValueError: the data is no X.509 certificate.
    """
    fields = _items(_first(_first(der)))
    if fields and fields[0][0] == _VERSION:
        fields = fields[1:]
    if len(fields) <= _SUBJECT:
        raise ValueError("it is no certificate: a field is missing")
    names = [fields[_ISSUER][1], fields[_SUBJECT][1], _alternative_names(fields)]
    digest = hashlib.sha256(b"".join(len(name).to_bytes(4) + name for name in names))
    return f"cert:{digest.hexdigest()[:32]}"


def _alternative_names(fields: list[tuple[int, bytes]]) -> bytes:
    for tag, content in fields:
        if tag == _EXTENSIONS:
            for _, extension in _items(_first(content)):
                if extension.startswith(_SUBJECT_ALT_NAME):
                    return _items(extension)[-1][1]
    return b""


def _first(data: bytes) -> bytes:
    """Return the content of the first of some DER values."""
    found = _items(data)
    if not found:
        raise ValueError("it is no certificate: a part is empty")
    return found[0][1]


def _items(data: bytes) -> list[tuple[int, bytes]]:
    """Return tags and contents of concatenated DER values (ITU-T X.690, 8.1)."""
    found, at = [], 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1] if at + 1 < len(data) else 0, at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(data[at : at + count]), at + count
        if at + size > len(data):
            raise ValueError("a DER value is longer than what holds it")
        found.append((tag, data[at : at + size]))
        at += size
    return found
