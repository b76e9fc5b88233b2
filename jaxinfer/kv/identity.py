"""Namespaces of the prefix cache: requests of different ones share no pages. No jax."""

from __future__ import annotations

from jaxinfer.types import Request

_LENGTH_BYTES = 4


def cache_identity(request: Request) -> bytes:
    """The namespace of a request's pages: two requests may share cached pages only if it is equal.

    The contract, for whoever adds to it:

    - `Request.cache_scope` says whom the operator lets share: a tenant, a group of tenants, or everybody. It comes from
      whom the front end has authenticated, never from what a request says of itself.
    - `Request.cache_salt` is the client's own, and parts what it wants parted within its scope.
    - `Request.lora` changes the keys and values of equal tokens: its identity, a hash of its *content*, is the third
      part. Its name is not here: names are chosen by clients, and another adapter may have one later.
    - What else changes them (an image) becomes one more part likewise: of all requests, empty where there is none.
    - All that finds a page, or tells whether there is one, goes by this: the tree, copies of a page's head, pages on
      the host, the choice of a replica.

    Parts are written behind their lengths, in a fixed order, so no two lists of parts have the same bytes: scope "a"
    with salt "bc" is not scope "ab" with salt "c".
    """
    adapter = "" if request.lora is None else request.lora.identity
    parts = (request.cache_scope.encode(), request.cache_salt.encode(), adapter.encode())
    return b"".join(len(part).to_bytes(_LENGTH_BYTES) + part for part in parts)


def parts_of(identity: bytes) -> tuple[str, str, str]:
    """Scope, salt and adapter of a namespace; all are "" of what `cache_identity` has not made."""
    parts, rest = list[str](), identity
    while rest:
        end = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES])
        parts.append(rest[_LENGTH_BYTES:end].decode(errors="replace"))
        rest = rest[end:]
    scope, salt, lora = parts if len(parts) == 3 else ("", "", "")
    return scope, salt, lora
