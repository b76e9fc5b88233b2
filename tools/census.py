"""Write docs/models.md: published models that are supported according to their config.json, and why others are not.

    python -m tools.census            writes the page
    python -m tools.census --check    exit code 1 where it is not current

The inputs are ``tests/census/configs.jsonl`` (a model a line: its name, the source of its values, its config.json
without fields irrelevant to the computation) and ``configs/models/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import abstract

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
CONFIGS = ROOT / "tests" / "census" / "configs.jsonl"
FILES = ROOT / "configs" / "models"

_BEGIN, _END = "<!-- census -->\n", "<!-- end -->"
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


@dataclasses.dataclass(frozen=True)
class Row:
    """Support status of one model.

    Attributes:
        module: the class that computes it; "" where it is rejected.
        said: its parameter count in common notation, or the message of the rejection.
    """

    name: str
    architecture: str
    module: str
    said: str


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = with_census(before)
    if before == after:
        return 0
    print("docs/models.md", "is not current: python -m tools.census" if options.check else "written")
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return int(options.check)


def with_census(page: str) -> str:
    """Return the page with its tables updated."""
    head, _, rest = page.partition(_BEGIN)
    rows = sorted((row(name, config) for name, config in configs()), key=lambda each: each.name.lower())
    return f"{head}{_BEGIN}{tables(rows)}{_END}{rest.partition(_END)[2]}"


def configs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every model's name and config.json."""
    for line in CONFIGS.read_text(encoding="utf-8").splitlines():
        described = json.loads(line)
        yield described["name"], described["config"]
    for path in FILES.glob("*.json"):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def row(name: str, config_json: Mapping[str, Any]) -> Row:
    """Read one config.json as a server would; only a `ConfigError` counts as a rejection."""
    (architecture,) = config_json["architectures"]
    try:
        model = abstract(config_json, "bfloat16", name)
    except ConfigError as error:
        return Row(name, architecture, "", _sentence(str(error)))
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))
    return Row(name, architecture, type(model.module).__name__, _rounded(size))


def tables(rows: list[Row]) -> str:
    served, refused = [each for each in rows if each.module], [each for each in rows if not each.module]
    lines = [
        f"## Served: {len(served)}\n",
        "| model | architecture | module | parameters |",
        "|---|---|---|---|",
        *(f"| {each.name} | `{each.architecture}` | `{each.module}` | {each.said} |" for each in served),
        f"\n## Refused: {len(refused)}\n",
        "| model | architecture | what is said |",
        "|---|---|---|",
        *(f"| {each.name} | `{each.architecture}` | {each.said} |" for each in refused),
    ]
    return "\n".join([*lines, ""])


def _sentence(said: str) -> str:
    """Shorten a rejection for a table cell: drop the architecture, the page, and all but the nearest supported one."""
    sentence = re.sub(r"^config\.json: | \(docs/models\.md [^)]*\)$", "", said)
    sentence = re.sub(r"^architectures = \[[^]]*\] is not supported(; )?", "", sentence)
    near, mark, others = sentence.partition("the nearest: ")
    sentence = near + mark.replace(":", " is") + others.partition("; ")[0]
    return sentence.replace("|", "\\|") or "not known"


def _rounded(size: int) -> str:
    unit, letter = next(each for each in _UNITS if size >= 0.9995 * each[0])
    return f"{size / unit:.3g}{letter}"


if __name__ == "__main__":
    sys.exit(main())
