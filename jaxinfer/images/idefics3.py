"""Image processor of Idefics3 and SmolVLM: a picture is cut into square tiles, which the whole picture follows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from PIL import Image

from jaxinfer.images.patches import (
    SquareProcessor,
    cut,
    patch_settings,
    pixel_bounds,
    positive,
    sides,
    token_id,
    tower_sizes,
)
from jaxinfer.images.pixels import COLOURS, require, rgb, value_table
from jaxinfer.images.processor import ImageError, digest_of
from jaxinfer.types import ImageInput

Tiles = tuple[int, int]
"""Rows and columns of tiles."""

_EDGE = "longest_edge"
_MOST_EDGE = 4096
_HALF = (0.5, 0.5, 0.5)
_AROUND, _WHOLE, _NEWLINE = "<fake_token_around_image>", "<global-img>", "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileProcessor(SquareProcessor):
    """See `jaxinfer.images.processor.Processor`. ``side`` is that of the pixels of a tile that are in patches.

    Attributes:
        tile: pixels of a tile's side.
        longest: pixels of the longer side of a picture before it is cut into tiles.
        split: whether it is; if not, a picture is one square.
        tokens: ids of the tokens around tiles, by name, as far as the vocabulary has them.
    """

    tile: int
    longest: int
    split: bool = True
    tokens: tuple[tuple[str, int], ...] = dataclasses.field(default=(), repr=False)

    def with_tokens(self, id_of: Callable[[str], int | None]) -> Self:
        """Return the processor for a vocabulary, in which ``id_of`` looks up a token; None: it is absent."""
        across = range(-(-self.longest // self.tile))
        names = (_AROUND, _WHOLE, _NEWLINE, _NEWLINE * 2, *(_tile(row, column) for row in across for column in across))
        found = ((name, _either(id_of, name)) for name in names)
        return dataclasses.replace(self, tokens=tuple((name, token) for name, token in found if token is not None))

    def prepare(self, picture: Image.Image | np.ndarray, /, **options: Any) -> ImageInput:
        most = pixel_bounds(options, ("max_pixels",)).get("max_pixels")
        pixels, tiles = self._tiles(rgb(picture), self._longest(most))
        patches = np.concatenate([cut(tile[: self.side, : self.side], self.patch, self.merge) for tile in pixels])
        grid = (len(pixels), self.side // self.patch, self.side // self.patch)
        return ImageInput(patches, grid, digest_of(self, patches, (*grid, *(tiles or ()))), tiles=tiles)

    def expand(self, image: ImageInput) -> list[list[int]]:
        return [self.of_square() if image.tiles is None else self._of_tiles(image.tiles)]

    def of_square(self) -> list[int]:
        return [*self._ids(_AROUND, _WHOLE), *super().of_square(), *self._ids(_AROUND)]

    def _of_tiles(self, tiles: Tiles) -> list[int]:
        """Return the tokens of an image that is cut into tiles."""
        whole = self.of_square()
        rows = whole[2:-1]
        made, end = list[int](), self._ids(_NEWLINE)
        for row in range(tiles[0]):
            made += [each for column in range(tiles[1]) for each in (*self._ids(_AROUND, _tile(row, column)), *rows)]
            made += end
        # The newline before the whole picture meets that of the last row.
        twice = [self._known[_NEWLINE * 2]] if _NEWLINE * 2 in self._known else end * 2
        return [*made[:-1], *twice, *whole]

    @functools.cached_property
    def _known(self) -> Mapping[str, int]:
        return dict(self.tokens)

    def _ids(self, *names: str) -> list[int]:
        for name in names:
            if name not in self._known:
                raise ImageError(f"the vocabulary has no token {name!r}, which is around an image")
        return [self._known[name] for name in names]

    def _longest(self, most: int | None) -> int:
        """Return the longer side of a picture of which a request bounds the pixels: that of a square of tiles."""
        return self.longest if most is None else min(self.longest, max(math.isqrt(most) // self.tile, 1) * self.tile)

    def _tiles(self, picture: Image.Image, longest: int) -> tuple[list[np.ndarray], Tiles | None]:
        """Return the pixels of all tiles and of the whole picture; and how many tiles there are, if several."""
        resized = self._resized(picture, *_resized_size(picture.height, picture.width, longest))
        if not self.split:
            return [self.resized(resized, self.tile, self.tile)], None
        rows, columns = _tile_counts(resized.height, resized.width, self.tile)
        large = self._resized(resized, rows * self.tile, columns * self.tile)
        whole = self.resized(large, self.tile, self.tile)
        if rows * columns == 1:
            return [whole], None
        tiles = np.asarray(large).reshape(rows, self.tile, columns, self.tile, COLOURS).swapaxes(1, 2)
        return [*tiles.reshape(-1, self.tile, self.tile, COLOURS), whole], (rows, columns)

    def _resized(self, picture: Image.Image, height: int, width: int) -> Image.Image:
        return Image.fromarray(self.resized(picture, height, width))


def _tile(row: int, column: int) -> str:
    return f"<row_{row + 1}_col_{column + 1}>"


def _either(id_of: Callable[[str], int | None], name: str) -> int | None:
    """Look up a token, also as vocabularies of bytes spell newlines."""
    found = id_of(name)
    return id_of(name.replace("\n", "Ċ")) if found is None else found


def _resized_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return height and width with a longer side of ``longest`` pixels; the shorter one is even, or 1."""
    aspect = width / height
    short = int(longest / aspect) if width >= height else int(longest * aspect)
    short = max(short + short % 2, 1)
    return (short, longest) if width >= height else (longest, short)


def _tile_counts(height: int, width: int, tile: int) -> Tiles:
    """Return the tiles that cover a picture: as many as the longer side needs, and the aspect ratio then."""
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / aspect) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * aspect) / tile)


def make(config_json: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> TileProcessor:
    """Make the processor of an Idefics3 or SmolVLM from config.json and the folder's other JSON files.

    Raises:
        ValueError: a setting is invalid or not supported; the message names it.
    """
    tile, patch = tower_sizes(config_json, {"image_size": 224, "patch_size": 32})
    kinds = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    settings, resample = patch_settings(files, kinds, Image.Resampling.LANCZOS)
    size = sides(settings, "size", {_EDGE: 4 * 364}, _EDGE)
    known = set(size) == {_EDGE} and size[_EDGE] <= _MOST_EDGE
    require(known, settings, "size", f"must have {_EDGE}, at most {_MOST_EDGE}")
    found = sides(settings, "max_image_size", {_EDGE: 364}, _EDGE)
    require(found == {_EDGE: tile}, settings, "max_image_size", f"is not the tower's image_size, {tile}")
    return TileProcessor(
        image_token=token_id(config_json, "image_token", 128_257),
        patch=patch,
        merge=positive(config_json, "scale_factor", 2),
        resample=resample,
        values=value_table(settings, _HALF, _HALF),
        side=tile // patch * patch,
        tile=tile,
        longest=size[_EDGE],
        split=settings.get("do_image_splitting") is not False,
    )
