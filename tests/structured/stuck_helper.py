"""`jaxinfer.structured.helper` with an endless loop for one grammar."""

from typing import Any

from jaxinfer.structured import helper, matching
from jaxinfer.structured.matcher import Matcher, Matchers

MODULE = "tests.structured.stuck_helper"
STUCK = "stuck"


class Stuck(Matchers):
    def new(self, kind: str, text: str, scope: str = "") -> Matcher:
        while text == STUCK:
            pass
        return super().new(kind, text, scope)


def main() -> None:
    changed: Any = matching
    changed.Matchers = Stuck
    helper.main()


if __name__ == "__main__":
    main()
