"""Who a caller is to the others: the names under which a tenant's pages and requests are kept apart. No jax.

A tenant is an authenticated identity: the name of an API key or, where there are no keys but clients show certificates,
what the certificate names. Without either everybody is the one tenant "".
"""

from __future__ import annotations

import functools
import hashlib

TENANT, ALL = "tenant", "all"
SHARING = (TENANT, ALL)
"""Who shares cached prefixes: each tenant with itself and its group, or everybody."""

_BETWEEN = "\n"  # neither tenants nor ids have it: they are printable

_VERSION, _EXTENSIONS = 0xA0, 0xA3  # tags of a certificate's optional fields
_SUBJECT_ALT_NAME = bytes.fromhex("0603551d11")  # as an object identifier, 2.5.29.17
_ISSUER, _SUBJECT = 2, 4  # places in a certificate's body, behind its version


def cache_scope(tenant: str, group: str | None = None) -> str:
    """The `Request.cache_scope` of a tenant: its own, or that of the group with which it shares. No tenant's scope is
    a group's, whatever they are called."""
    return f"tenant:{tenant}" if group is None else f"group:{group}"


# ---- request ids


def engine_id(tenant: str, request_id: str) -> str:
    """The id under which the engine knows a request: tenants choose ids without regard to each other."""
    return f"{tenant}{_BETWEEN}{request_id}" if tenant else request_id


def own_id(name: str) -> str:
    """The id that the client gave, of an `engine_id`."""
    return name.rpartition(_BETWEEN)[2]


# ---- certificates


@functools.lru_cache(maxsize=4096)
def tenant_of_certificate(der: bytes) -> str:
    """The tenant whose certificate this is: "cert:" and a hash of issuer, subject and subject alternative names.

    The same through every door, and after the certificate was renewed under the same names. Whoever calls has had the
    certificate verified.

    Raises:
        ValueError: it is no X.509 certificate.
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
    """Contents of the first of some DER values."""
    found = _items(data)
    if not found:
        raise ValueError("it is no certificate: a part is empty")
    return found[0][1]


def _items(data: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of the DER values that lie one behind the other (ITU-T X.690, 8.1)."""
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
