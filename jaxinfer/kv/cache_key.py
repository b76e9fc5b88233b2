"""Namespaces of the prefix cache: requests of different namespaces share no pages. No jax."""

from __future__ import annotations

from jaxinfer.types import Request

_LENGTH_BYTES = 4


def cache_identity(request: Request) -> bytes:
    """Return the namespace of a request's pages: two requests may share cached pages only if it is equal.

    The contract for new components of a namespace:

    - `Request.cache_scope` is the set of tenants that the operator lets share: a tenant, a group of tenants, or all. It
      comes from the principal that the front end has authenticated, never from the request body.
    - `Request.cache_salt` is set by the client, and separates requests within its scope.
    - `Request.lora` changes the keys and values of equal tokens: its identity, a hash of its *content*, is the third
      component. Its name is not: clients choose names, and another adapter may have the name later.
    - Any other input that changes all keys and values becomes one more component, empty where there is none. An image
      changes those of its own tokens and of later ones: its digest is in the keys of the pages that it overlaps
      (`jaxinfer.kv.radix.PageKeys`).
    - Every lookup of a page, or of whether one exists, uses this namespace: the tree, copies of a page's head, host
      pages, the choice of a replica.

    Each component follows its length, in a fixed order, so no two lists of components have the same bytes: scope "a"
    with salt "bc" is not scope "ab" with salt "c".
    """
    adapter = "" if request.lora is None else request.lora.identity
    parts = (request.cache_scope.encode(), request.cache_salt.encode(), adapter.encode())
    return b"".join(len(part).to_bytes(_LENGTH_BYTES) + part for part in parts)


def parts_of(identity: bytes) -> tuple[str, str, str]:
    """Return scope, salt and adapter of a namespace; all are "" for bytes that `cache_identity` has not made."""
    parts, rest = list[str](), identity
    while rest:
        end = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES])
        parts.append(rest[_LENGTH_BYTES:end].decode(errors="replace"))
        rest = rest[end:]
    scope, salt, lora = parts if len(parts) == 3 else ("", "", "")
    return scope, salt, lora
