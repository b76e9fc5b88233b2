"""Error of adapters that cannot be loaded."""

from __future__ import annotations


class AdapterError(ValueError):
    """Error for an adapter that cannot be loaded. The message is one user-facing sentence with the key or tensor."""
