"""Write the tables of settings and of sampling parameters in docs/, and the Helm chart's schema, from the dataclasses.

    python -m tools.settings_tables            writes the tables and the schema
    python -m tools.settings_tables --check    exit code 1 where one of them is not current

A table is between ``<!-- settings: NAME -->`` and ``<!-- end -->``; NAME is one of `KINDS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Mapping

from jaxinfer.cli.flags import attribute_docs
from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import PARAMETERS, Parameter, SamplingParams
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.settings import ServeConfig
from tools.chart_schema import FILE as SCHEMA
from tools.chart_schema import with_settings

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = ("settings.md", "serving.md", "sampling.md")
KINDS: Mapping[str, type] = {kind.__name__: kind for kind in (EngineConfig, ServeConfig, ServeLimits, SamplingParams)}

_NESTED = ("limits", "engine")
_UNLIMITED = 2**62  # larger bounds are those of the number's type
_TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options, current = parser.parse_args(arguments), True
    pages = {f"docs/{name}": (DOCS / name, with_tables) for name in PAGES}
    for name, (path, make) in {**pages, SCHEMA.name: (SCHEMA, with_settings)}.items():
        before = path.read_text(encoding="utf-8")
        after = make(before)
        if before != after:
            current = False
            how = "is not current: python -m tools.settings_tables" if options.check else "written"
            print(f"{name} {how}")
            if not options.check:
                path.write_text(after, encoding="utf-8")
    return int(options.check and not current)


def with_tables(page: str) -> str:
    """Return a page with its tables updated."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{tables(KINDS[found[2]])}\n{found[3]}", page)


def tables(kind: type) -> str:
    """Format a table for each group of settings: the bases of ``kind``, or ``kind`` itself where it has none."""
    if kind is SamplingParams:
        return parameters()
    groups = [each for each in reversed(kind.__mro__[1:]) if dataclasses.is_dataclass(each)] or [kind]
    return "\n".join(table(kind, group, title=group is not kind) for group in groups)


def table(kind: type, group: type, *, title: bool) -> str:
    """Format the settings that ``group`` declares, with the defaults that they have in ``kind``."""
    docs, declared = attribute_docs(kind), vars(group)["__annotations__"]
    fields = [field for field in dataclasses.fields(kind) if field.name in declared and field.name not in _NESTED]
    rows = [f"| `{field.name}` | {_cell(field.default)} | {docs[field.name].replace('``', '`')} |" for field in fields]
    head = [f"**{(group.__doc__ or '').partition(chr(10))[0].rstrip('.')}**\n"] if title else []
    return "\n".join([*head, "| setting | default | what it is |", "|---|---|---|", *rows, ""])


def parameters() -> str:
    """Format the table of sampling parameters."""
    docs = attribute_docs(SamplingParams)
    cells = ((row, docs[row.name].replace("``", "`")) for row in PARAMETERS.values())
    rows = [f"| `{row.name}` | {_cell(row.default)} | {_range(row)} | {text} |" for row, text in cells]
    return "\n".join(["| parameter | default | range | what it is |", "|---|---|---|---|", *rows, ""])


def _range(row: Parameter) -> str:
    low = None if row.low is None or row.low < -_UNLIMITED else f"{'>' if row.positive else '>='} {row.low:g}"
    high = None if row.high is None or row.high > _UNLIMITED else f"<= {row.high:g}"
    return ", ".join(bound for bound in (low, high) if bound is not None)


def _cell(default: object) -> str:
    if default is None or default is dataclasses.MISSING:
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    sys.exit(main())
