"""Rounds of weight synchronisation: the phase that a sampler has reached, and calls of rounds that are over."""

from __future__ import annotations

import dataclasses
from typing import Any

_ORDER = ("idle", "prepared", "h2d_done", "committed", "aborted")
_FIRST = ("prepared", "aborted")


class StaleRoundError(RuntimeError):
    """Error for a call of a round that is over, was not opened, or has ended otherwise."""


@dataclasses.dataclass
class Round:
    """The current round.

    Attributes:
        req_id, uuid: its key, from ``extra_config`` of the requests; later rounds have larger numbers. Without one, the
            version is the number.
        phase: "idle", "prepared", "h2d_done", "committed" or "aborted".
        policy_version: version of the weights that it brings.
    """

    req_id: str | None = None
    uuid: int = -1
    phase: str = "idle"
    policy_version: int = -1

    def admit(self, request: Any, phase: str) -> bool:
        """Return whether the work of a phase is to be done; False: it has been done, and the call is a repetition.

        Raises:
            StaleRoundError: the request is of an earlier round, or its round is not open or was aborted.
        """
        extra = getattr(request, "extra_config", None) or {}
        version = int(getattr(request, "policy_version", 0))
        req_id, uuid = str(extra.get("req_id", "")), int(extra.get("uuid", version))
        if uuid < self.uuid or (uuid == self.uuid and req_id != self.req_id):
            raise StaleRoundError(
                f"{phase}: round {uuid} ({req_id!r}), but this is round {self.uuid} ({self.req_id!r})"
            )
        if uuid > self.uuid:
            if phase not in _FIRST:
                raise StaleRoundError(f"{phase}: round {uuid} ({req_id!r}) has not been prepared")
            self.req_id, self.uuid, self.phase = req_id, uuid, "idle"
            self.policy_version = version
        if self.phase == "aborted" and phase != "aborted":
            raise StaleRoundError(f"{phase}: round {uuid} ({req_id!r}) was aborted")
        if phase == "aborted":
            return self.phase not in ("committed", "aborted")
        return _ORDER.index(phase) > _ORDER.index(self.phase)
