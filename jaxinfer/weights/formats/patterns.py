"""Untrusted regular expressions from config.json, with bounded matching time: Python's can be exponential."""

from __future__ import annotations

import math
import re

from jaxinfer.weights.errors import CheckpointError, quoted

_GROUP = re.compile(r"\([^()]*\)")
_LONGEST = 1024
_MOST_WAYS = 2 * 10**9
_END = re.compile(r"((?<!\\)\.\*)+\$?$")  # redundant at the end of a pattern that need not match the whole name


class Patterns:
    """The patterns of one field, matched against module names.

    Args:
        field: its name in messages.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._spent = 0

    def match(self, pattern: str, module: str) -> bool:
        """Return whether a pattern matches at the start of a module's name.

        Raises:
            CheckpointError: the regular expression is invalid, or all matches together take too long.
        """
        return self._prepared(pattern, len(module)).match(module) is not None

    def search(self, pattern: str, module: str) -> bool:
        """Return whether a pattern matches anywhere in a module's name; raises as `match` does."""
        return self._prepared(pattern, len(module), len(module) + 1).search(module) is not None

    def _prepared(self, pattern: str, length: int, starts: int = 1) -> re.Pattern[str]:
        compiled = self._compiled.get(pattern) or self._compiled.setdefault(pattern, self._compile(pattern))
        self._spent += _ways(compiled.pattern, length) * starts
        if self._spent > _MOST_WAYS:
            raise CheckpointError(f"the patterns of {self._field} take too long to be matched: {quoted(pattern)}")
        return compiled

    def _compile(self, pattern: str) -> re.Pattern[str]:
        shorter = _END.sub("", pattern)
        nested = re.search(r"[()]", _GROUP.sub("", shorter))
        if len(shorter) > _LONGEST or nested or re.search(r"\)[*+{]|\\[1-9]", shorter):
            raise CheckpointError(f"the pattern {quoted(pattern)} of {self._field} is too complex to be matched")
        try:
            return re.compile(shorter)
        except (re.error, OverflowError, RecursionError) as error:
            message = f"the pattern {quoted(pattern)} of {self._field} is not a regular expression ({error})"
            raise CheckpointError(message) from None


def _ways(pattern: str, length: int) -> int:
    """Return a bound on the number of match attempts on a name, assuming no nested repetitions."""
    alternatives = [group.count("|") + 1 for group in (*_GROUP.findall(pattern), _GROUP.sub("", pattern))]
    repetitions = len(re.findall(r"[*+{]", pattern))
    return math.prod(alternatives) * 2 ** pattern.count("?") * math.comb(length + repetitions, repetitions)
