"""Pictures of shapes with their descriptions, drawn at random."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (245, 140, 30),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
CORNERS = {"circle": 0, "triangle": 3, "square": 4, "star": 10}
"""Corners of each shape; 0: round."""
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
SIZES = {"small": (0.10, 0.13), "large": (0.20, 0.26)}
"""Radius of a shape, as a share of the picture's shorter side."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One shape of a picture. ``place``: its row and column in a grid of three by three."""

    kind: str
    colour: str
    size: str
    place: tuple[int, int]

    def __str__(self) -> str:
        row, column = ROWS[self.place[0]], COLUMNS[self.place[1]]
        where = "in the centre" if (row, column) == ("middle", "centre") else f"at the {row} {column}"
        return f"a {self.size} {self.colour} {self.kind} {where}"


@dataclasses.dataclass(frozen=True)
class Picture:
    """Shapes on a plain background."""

    shapes: tuple[Shape, ...]
    background: str

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.shapes))}, on a {self.background} background.".capitalize()


def draw(picture: Picture, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw a picture; places, sizes and colours vary a little."""
    image = Image.new("RGB", (width, height), _varied(picture.background, rng))
    pen, side = ImageDraw.Draw(image), min(width, height)
    for shape in picture.shapes:
        radius = side * rng.uniform(*SIZES[shape.size])
        row, column = ((place + 0.5) / 3 for place in shape.place)
        centre = np.array([width * column, height * row]) + side * rng.uniform(-0.03, 0.03, 2)
        centre = np.clip(centre, radius, np.array([width, height]) - radius)
        colour, corners = _varied(shape.colour, rng), CORNERS[shape.kind]
        if corners:
            pen.polygon(_polygon(centre, radius, corners), fill=colour)
        else:
            pen.ellipse([*(centre - radius), *(centre + radius)], fill=colour)
    return image


def random_picture(rng: np.random.Generator) -> Picture:
    """Choose one shape, or two that are in different columns."""
    background, *colours = rng.permutation(list(COLOURS))
    columns = rng.permutation(3)[: 1 + rng.integers(2)]
    places = [(int(rng.integers(3)), int(column)) for column in sorted(columns)]
    sizes = ["small"] * 2 if len(places) == 2 else [str(rng.choice(list(SIZES)))]
    shapes = [
        Shape(str(rng.choice(list(CORNERS))), str(colour), size, place)
        for place, colour, size in zip(places, colours, sizes, strict=False)
    ]
    return Picture(tuple(shapes), str(background))


def _polygon(centre: np.ndarray, radius: float, corners: int) -> Sequence[tuple[float, float]]:
    """Return the corners of a regular polygon; a star's every second corner is nearer to the centre."""
    turn = math.pi / 4 if corners == 4 else 0.0
    angles = turn + np.arange(corners) * (2 * math.pi / corners) - math.pi / 2
    radii = np.where((np.arange(corners) % 2 == 1) & (corners == 10), 0.42, 1.0) * radius
    points = centre + np.stack([np.cos(angles) * radii, np.sin(angles) * radii], axis=1)
    return [(float(x), float(y)) for x, y in points]


def _varied(colour: str, rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = np.clip(np.array(COLOURS[colour]) + rng.integers(-10, 11, 3), 0, 255).tolist()
    return red, green, blue
