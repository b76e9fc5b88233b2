"""Each shipped configuration, with the fewest layers that cover all layer kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxinfer.models.config import ConfigError
from jaxinfer.models.model import Model
from jaxinfer.types import walk_specs
from tools.check_programs.programs import model_of
from tools.check_programs.rules import FITS
from tools.check_programs.topologies import broken as broken_rules
from tools.check_programs.topologies import row
from tools.check_programs.work import MODELS, Part, Work

PAGES = 1024
LEAST = 3  # layers: the first contains the computations that all layers share
_COLUMNS = ("configuration", "layers", "kernels a layer: decode, prefill", "temporaries, MiB", "compiled in")


def shipped(names: list[str]) -> Iterator[Work]:
    """Yield the work of these configurations, or of all."""
    for name in names or sorted(path.stem for path in MODELS.glob("*.json")):
        yield Work(name, PAGES, layers=fewest_layers(name))


def fewest_layers(name: str) -> int:
    """Return the number of first layers that cover each kind before the last layer: kernels are counted from layer to
    layer, and a family may have a last layer of its own."""
    whole = Work(name, PAGES)
    layers = _layers(model_of(whole))
    enough = (count for count in range(LEAST, len(layers)) if _kinds_of_first(whole, count) >= len(set(layers)))
    return next(enough, len(layers))


def _kinds_of_first(work: Work, layers: int) -> int:
    """Count the layer kinds before the last of ``layers`` layers."""
    try:
        return len(set(_layers(model_of(dataclasses.replace(work, layers=layers)))[:-1]))
    except ConfigError:  # a model of one kind alone, where its family requires both
        return 0


def _layers(model: Model) -> list[tuple[object, ...]]:
    """Return the properties in which layers differ: attention, shared KV layers, and parameter shapes."""
    layers = enumerate(model.config.layers)
    shapes = [tuple((path, spec.shape) for path, spec in walk_specs(model.specs[f"layers_{at}"])) for at, _ in layers]
    return list(zip(model.config.layers, shapes, strict=True))


def header() -> str:
    return f"{row(_COLUMNS)}\n{row(['---'] * len(_COLUMNS))}"


def lines(work: Work, parts: Sequence[Part]) -> str:
    """Format the table's line of a configuration."""
    (part,) = parts
    decode, prefill = part.programs["decode"], part.programs["prefill"]
    kernels = f"{decode.kernels:.1f}, {prefill.kernels:.1f}"
    return row([work.model, str(work.layers), kernels, f"{part.temporaries / 2**20:.0f}", f"{part.seconds:.0f} s"])


def broken(work: Work, parts: Sequence[Part]) -> Iterator[str]:
    """Yield a line for each broken rule. Truncated models are not served: fitting one device is not checked."""
    for part in parts:
        asked = tuple(one for one in part.findings if one.rule != FITS)
        yield from broken_rules(work, [dataclasses.replace(part, findings=asked)])
