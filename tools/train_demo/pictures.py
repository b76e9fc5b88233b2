"""Pictures of a shape with their descriptions, drawn at random."""

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
CORNERS = {"circle": 0, "triangle": 3, "square": 4, "cross": 12}
"""Corners of each shape; 0: round."""
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
SIZES = {"small": (0.16, 0.18), "large": (0.26, 0.30)}
"""Radius of a shape, as a share of the picture's shorter side."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a picture. ``place``: its row and column in a grid of three by three."""

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
    """A shape on a plain background."""

    shape: Shape
    background: str

    def __str__(self) -> str:
        article = "an" if self.background == "orange" else "a"
        return f"{self.shape}, on {article} {self.background} background.".capitalize()


def draw(picture: Picture, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Draw a picture; its place, size and colours vary a little."""
    image = Image.new("RGB", (width, height), _varied(picture.background, rng))
    pen, side, shape = ImageDraw.Draw(image), min(width, height), picture.shape
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
    """Choose a shape and a background of another colour."""
    background, colour = (str(name) for name in rng.permutation(list(COLOURS))[:2])
    kind, size = str(rng.choice(list(CORNERS))), str(rng.choice(list(SIZES)))
    return Picture(Shape(kind, colour, size, (int(rng.integers(3)), int(rng.integers(3)))), background)


def _polygon(centre: np.ndarray, radius: float, corners: int) -> Sequence[tuple[float, float]]:
    """Return the corners of a regular polygon, or of a cross, which has twelve."""
    if corners == 12:
        arm = np.array([(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1)])
        points = centre + np.concatenate([arm, -arm]) * (radius / 3)
    else:
        angles = (math.pi / 4 if corners == 4 else 0.0) + np.arange(corners) * (2 * math.pi / corners) - math.pi / 2
        points = centre + np.stack([np.cos(angles), np.sin(angles)], axis=1) * radius
    return [(float(x), float(y)) for x, y in points]


def _varied(colour: str, rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = np.clip(np.array(COLOURS[colour]) + rng.integers(-10, 11, 3), 0, 255).tolist()
    return red, green, blue
