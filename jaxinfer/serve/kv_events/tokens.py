"""Token ids and adapter ids in the format of routers. No jax."""

from __future__ import annotations

import array

from jaxinfer.serve.kv_events.mirror import TOKEN_BYTES


def token_ids(tokens: bytes) -> list[int]:
    """Convert int32 in this machine's byte order to a list."""
    found = array.array("i", tokens)
    assert found.itemsize == TOKEN_BYTES
    return found.tolist()


def lora_id(identity: str) -> int:
    """Return a number for an adapter, from 1 to 2^31 - 1, derived from its content."""
    return 1 + int.from_bytes(identity.encode()[-8:]) % (2**31 - 1)
