"""The one error of this room."""

from __future__ import annotations

_LONGEST = 120


class CheckpointError(ValueError):
    """A model folder that cannot be loaded. The message is one sentence for a person; it needs no traceback."""


def quoted(name: str) -> str:
    """A name out of an untrusted file, fit for a message: control characters escaped, at most ~120 characters."""
    return repr(name if len(name) <= _LONGEST else name[:_LONGEST] + "...")


def listed(names: list[str], most: int = 5) -> str:
    """The first ``most`` names, quoted, and how many more there are."""
    first = ", ".join(quoted(name) for name in names[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"
