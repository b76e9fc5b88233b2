"""The picture of the packages in docs/: every package on its layer, drawn from the table of allowed imports.

python -m tools.draw_packages           write docs/images/packages.svg
python -m tools.draw_packages --check   fail if the picture does not match the table
"""

from __future__ import annotations

import argparse
import ast
import html
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Sequence

from tests.import_rules import LAYER, LAYER_WITHIN, NO_JAX

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/images/packages.svg"

_WIDTH, _GAP, _MARGIN, _LINE = 1240, 10, 20, 15
_CHARACTER = 6.4  # width of a small letter, in pixels
_PLAIN, _WITH_JAX, _GENERATED = "#e8f3e8", "#e4ecf7", "#eeeeee"
_MADE = {"protos"}
_TEXT_LAYER = LAYER["engine"] + 0.5  # next to the stack: only layers above the engine import it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the picture is out of date")
    options, drawn = parser.parse_args(arguments), draw()
    if options.check:
        current = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn
        print("" if current else f"{PICTURE.relative_to(ROOT)} is out of date: run python -m tools.draw_packages")
        return 0 if current else 1
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


def draw() -> str:
    """Return the picture as SVG."""
    layers, boxes, top = [*_layers()], list[str](), _MARGIN + 30
    for components in layers:
        row, bottom = _row(components, top)
        boxes, top = [*boxes, *row], bottom + _GAP
    size = f'width="{_WIDTH}" height="{top + _MARGIN}"'
    legend = (
        "Imports go down only, never up and never sideways. Green components run without jax; grey ones are generated."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
            f'<rect {size} fill="white"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN + 8}" font-size="13">{legend}</text>',
            *boxes,
            "</svg>\n",
        ]
    )


def _layers() -> Iterator[list[str]]:
    """Yield the packages by layer, the highest first; a package with internal layers is drawn as its modules."""
    places: dict[str, float] = {component: layer for component, layer in LAYER.items() if _file(component) is not None}
    places |= {"text": _TEXT_LAYER}
    del places["engine"]
    inside = {name: n for name, n in LAYER_WITHIN.items() if name.startswith("jaxinfer.engine")}
    places |= {name.removeprefix("jaxinfer."): LAYER["engine"] + 0.1 * n for name, n in inside.items()}
    for layer in sorted(set(places.values()), reverse=True):
        yield sorted(component for component, place in places.items() if place == layer)


def _row(components: list[str], top: int) -> tuple[list[str], int]:
    """Return boxes side by side, as high as the longest description, and their lower edge."""
    width = (_WIDTH - 2 * _MARGIN - (len(components) - 1) * _GAP) // len(components)
    described = [textwrap.wrap(_described(component), int((width - 16) / _CHARACTER)) for component in components]
    height = 30 + _LINE * max(map(len, described))
    places = enumerate(zip(components, described, strict=True))
    boxes = [
        line
        for number, (component, lines) in places
        for line in _box(component, lines, _MARGIN + number * (width + _GAP), top, (width, height))
    ]
    return boxes, top + height


def _box(component: str, lines: list[str], left: int, top: int, size: tuple[int, int]) -> Iterator[str]:
    colour = _GENERATED if component in _MADE else _PLAIN if _without_jax(component) else _WITH_JAX
    place = f'x="{left}" y="{top}" width="{size[0]}" height="{size[1]}"'
    yield f'<rect {place} rx="5" fill="{colour}" stroke="#667"/>'
    name = component.replace(".", "/")
    yield f'<text x="{left + 8}" y="{top + 18}" font-size="13" font-weight="bold">{name}</text>'
    for number, line in enumerate(lines):
        text = html.escape(line, quote=False)
        yield f'<text x="{left + 8}" y="{top + 35 + _LINE * number}" font-size="11">{text}</text>'


def _without_jax(component: str) -> bool:
    return any(f"jaxinfer.{component}" == name or f"jaxinfer.{component}".startswith(f"{name}.") for name in NO_JAX)


def _described(component: str) -> str:
    """Return the first paragraph of a package's docstring."""
    path = _file(component)
    assert path is not None
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("`", "").removesuffix("No jax.").strip()


def _file(component: str) -> pathlib.Path | None:
    if component == "jaxinfer":
        return None
    base = ROOT / (component if component == "pallas_kernels" else f"jaxinfer/{component.replace('.', '/')}")
    found = [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]
    return found[0] if found else None


if __name__ == "__main__":
    sys.exit(main())
