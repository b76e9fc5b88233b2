"""The error of adapters that cannot be served."""

from __future__ import annotations


class AdapterError(ValueError):
    """An adapter that cannot be loaded. The message is one sentence for a person, and names the key or the tensor."""
