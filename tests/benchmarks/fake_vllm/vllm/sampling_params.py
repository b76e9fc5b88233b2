"""Parameters, kept as they are given."""

from __future__ import annotations

import enum
from typing import Any


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1


class SamplingParams:
    def __init__(self, **settings: Any) -> None:
        assert settings["output_kind"] is RequestOutputKind.DELTA
        self.settings = settings
