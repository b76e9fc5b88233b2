"""Tokens and names of adapters, as routers know them. No jax."""

from __future__ import annotations

import array

from jaxinfer.serve.kv_events.mirror import TOKEN_BYTES


def token_ids(tokens: bytes) -> list[int]:
    """int32 of this machine's byte order, as a list."""
    found = array.array("i", tokens)
    assert found.itemsize == TOKEN_BYTES
    return found.tolist()


def lora_id(identity: str) -> int:
    """A number for an adapter, from 1 to 2^31 - 1, which its content decides."""
    return 1 + int.from_bytes(identity.encode()[-8:]) % (2**31 - 1)
