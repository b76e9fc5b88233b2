"""Derive the expected contents of a stage's programs from nothing but the declarations of its parameters.

The arithmetic is independent: it shares `ParamSpec` and the table of axes with the engine, and none of its functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.dtypes import itemsize_bits

from jaxinfer.engine.execution.stages import Stage
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import REPLICABLE, RULES
from jaxinfer.quant import is_stored
from jaxinfer.types import VISION, ParamSpec, ParamTree, walk_specs

STREAMS = "altup"  # AltUp: its router runs before and after each layer
CONVOLUTION = "conv"  # prefix of the names of convolution taps, which no GEMM reads
MIXERS = ("attention", "mamba", "mixer", STREAMS)  # token mixers; KEPT: matrices that produce keys, values or states
KEPT = ("qkv", "down", "k", "zx", "bc", "dt", "gated", "qkvz", "ba", "router", "prediction")
BLOCKS = ("blocks_", "layers_")  # prefixes of the names of a tower's layers
TABLES = ("embed", "layer_embed", "positions", "head")  # tables that are read by row, or whole at the end
BEHIND = "streams_out"  # parameters after the layers
LINE = 64  # inputs of a line of 16-bit numbers
SUMS = 2  # all-reduces of a layer: attention output and feed-forward output


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected programs of a pipeline stage over as many devices as ``sizes`` multiply to; all numbers are per device.

    Attributes:
        layers: GEMMs of each layer, one per matrix.
        kept: the last layer that keeps keys, values or states, and the number of its matrices that produce them.
        head: GEMMs after the layers; ``front``: GEMMs before them.
        convolutions: most convolutions of a layer.
        streams: whether there are several streams of hidden states.
        embeds: whether the stage embeds tokens.
        vocab: logits of a token; 0 for a stage without logits.
        spread: whether the vocabulary is sharded.
        widest: elements of the widest activation of a token, except logits.
        experts: whether there are mixtures of experts.
        weights: bytes of the parameters.
        width: elements of a token's hidden states.
        norms: whether prefill programs shard hidden states over tokens between the sublayers.
        head_norms: whether queries and keys are normalised; ``out_norms``: whether sublayer outputs are.
        summed: layers whose queries and keys are normalised over all heads, which needs an all-reduce of their squares.
        shown: whether a draft head reads the last layer's states of prompts.
        lines: whether a device's part of each matrix has whole lines of inputs, which the GEMM kernel requires.
    """

    layers: tuple[int, ...]
    kept: tuple[int, int]
    head: int
    front: int
    convolutions: int
    streams: bool
    embeds: bool
    vocab: int
    spread: bool
    widest: int
    experts: bool
    weights: int
    devices: int
    width: int
    norms: bool = False
    head_norms: bool = False
    out_norms: bool = False
    summed: int = 0
    shown: bool = False
    lines: bool = True

    def gemms(self, program: str) -> tuple[tuple[int, ...], int]:
        """Return the matrices of each layer that is computed whole, and the number of the other matrices."""
        if self._cut(program):
            last, matrices = self.kept
            return (self.layers, self.front) if self.shown else (self.layers[:last], self.front + matrices)
        return self.layers, self.front + self.head

    def sums(self, program: str) -> int:
        """Count all-reduces: of the layers, of a sharded embedding, and of norms over all heads.

        The skipped operations of a chunk's last layer come after its norms.
        """
        return self.summed * (self.devices > 1) + (0 if self.scattered(program) else self._sums(program))

    def scatters(self, program: str) -> int:
        """Count reduce-scatters: they replace the all-reduces where each device keeps the sums of its own tokens."""
        return self._sums(program) if self.scattered(program) else 0

    def gathers(self, program: str) -> int:
        """Count all-gathers: of logits, and of all tokens before a matrix or at the end of the stage."""
        logits = int(self.logits(program) > 0 and self.spread and self.devices > 1)
        return logits + self.scattered(program) * (SUMS * len(self.gemms(program)[0]) + 1)

    def scattered(self, program: str) -> bool:
        """Return whether hidden states are sharded over tokens."""
        return self.norms and self.devices > 1 and not program.startswith("decode")

    def _sums(self, program: str) -> int:
        layers = len(self.gemms(program)[0])
        return (SUMS * layers + (self.embeds and self.spread)) * (self.devices > 1)

    def logits(self, program: str) -> int:
        return 0 if program == "prefill" else self.vocab

    def _cut(self, program: str) -> bool:
        """Return whether a prompt chunk skips the operations after the last layer's keys and values."""
        return program == "prefill" and self.vocab > 0


@dataclasses.dataclass(frozen=True)
class ExpectedTower:
    """Expected encoder programs; a device has all of the vision tower.

    Attributes:
        layers, tail: GEMMs of each layer, and the other ones.
        widest: elements of the widest activation of a patch, except scores.
        weights: bytes of the parameters.
    """

    layers: tuple[int, ...]
    tail: int
    widest: int
    weights: int


def expected_tower(specs: Any, itemsize: int) -> ExpectedTower:
    """Derive the expectations from the tower's parameters."""
    blocks = [name for name in specs if name.startswith(BLOCKS)]
    others = [name for name in specs if name not in (*blocks, *TABLES)]
    width = specs["patch"].shape[0]
    inside = [spec for name in blocks for _, spec in walk_specs({name: specs[name]}) if _is_matrix(spec)]
    return ExpectedTower(
        layers=tuple(_matrices(specs[name]) for name in blocks),
        tail=sum(_matrices(specs[name]) for name in others),
        widest=max(math.prod(spec.shape) // width for spec in inside),
        weights=weight_bytes(specs, {}, itemsize),
    )


def expected(stage: Stage, sizes: Mapping[str, int], norms: bool = False) -> Expected:
    """Derive the expectations. ``sizes``: devices along each axis of the stage's mesh; ``norms``: see `Work`."""
    model, specs = stage.model, stage.model.specs
    names = sorted((name for name in specs if name.startswith("layers_")), key=lambda name: int(name.split("_")[1]))
    layers = tuple(_matrices(specs[name]) for name in names)
    vocab, ways = model.config.vocab_size, spread_over("vocab", sizes)
    every = [spec for name in names or specs for _, spec in walk_specs({name: specs[name]})]
    return Expected(
        layers=layers,
        kept=_kept(model, [specs[name] for name in names]),
        head=int(stage.last) + _matrices(specs.get(BEHIND, {})),
        front=_front(specs, names),
        convolutions=max((_convolutions(specs[name]) for name in names), default=0),
        streams=any(STREAMS in path for name in names for path, _ in walk_specs(specs[name])),
        embeds=stage.first,
        vocab=vocab if stage.last else 0,
        spread=vocab % ways == 0,
        widest=max((_queries(model.config, sizes), *(_widest(spec, sizes) for spec in every))),
        experts=any("expert" in spec.axes for spec in every),
        weights=weight_bytes(specs, sizes, model.dtype.itemsize),
        devices=math.prod(sizes.values()),
        width=max((_width(spec) for spec in every), default=0),
        norms=norms,
        head_norms=any("k_norm" in path for name in names for path, _ in walk_specs(specs[name])),
        out_norms=any("mlp_out_norm" in path for name in names for path, _ in walk_specs(specs[name])),
        summed=sum(any("all_heads" in spec.axes for _, spec in walk_specs(specs[name])) for name in names),
        shown=stage.prompts and not getattr(model.module, "taps", ()),
        lines=not any(local_shape(spec, sizes)[spec.inputs] % LINE for spec in every if spec.inputs is not None),
    )


def _front(specs: Any, layers: Sequence[str]) -> int:
    others = {*layers, *TABLES, BEHIND, VISION}
    return sum(_matrices(specs[name]) for name in specs if name not in others) if layers else 0


def _kept(model: Model, layers: Sequence[Any]) -> tuple[int, int]:
    """Return the last layer with a cache entry, and the number of matrices that produce it: later layers may share the
    keys of another layer, or have none."""
    keeping = [at for at, layer in enumerate(model.cache_spec.layers) if layer.attends or layer.states]
    if not keeping or not layers:
        return 0, 0
    last = layers[keeping[-1]]
    return keeping[-1], sum(_makes_kept(last[name]) for name in MIXERS if name in last)


def _makes_kept(mixer: Mapping[str, Any]) -> int:
    inner = (node for node in mixer.values() if isinstance(node, Mapping))
    return sum(name in KEPT for name in mixer) + sum(map(_makes_kept, inner))


def weight_bytes(specs: ParamTree, sizes: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the weights on one device."""
    return sum(math.prod(local_shape(spec, sizes)) * _bits(spec, itemsize) for _, spec in walk_specs(specs)) // 8


def local_shape(spec: ParamSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the shard of a parameter on one device."""
    return tuple(_part(axis, size, spread_over(axis, sizes)) for axis, size in zip(spec.axes, spec.shape, strict=True))


def spread_over(axis: str | None, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(name, 1) for name in RULES.get(axis or "", ()))


def _matrices(tree: Any) -> int:
    """Count matrices: a stored (quantised) weight counts once; the AltUp router, which two products read, twice."""
    if is_stored(tree):
        return 1
    if isinstance(tree, ParamSpec):
        return int(_is_matrix(tree))
    found = sum(_matrices(node) for name, node in tree.items() if not name.startswith(CONVOLUTION))
    return found + (STREAMS in tree)


def _convolutions(tree: Any) -> int:
    if isinstance(tree, ParamSpec) or is_stored(tree):
        return 0
    taps = (_matrices(node) for name, node in tree.items() if name.startswith(CONVOLUTION))
    return sum(taps) + sum(_convolutions(node) for node in tree.values())


def _part(axis: str | None, size: int, ways: int) -> int:
    return size if axis in REPLICABLE and size % ways else size // ways


def _bits(spec: ParamSpec, itemsize: int) -> int:
    return 8 * itemsize if spec.dtype is None else itemsize_bits(spec.dtype)


def _is_matrix(spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix: biases and norms have a constant init; gates may be vectors."""
    return spec.init == "normal" and sum(size > 1 for size in spec.shape) > 1


def _width(spec: ParamSpec) -> int:
    return spec.shape[spec.axes.index("embed")] if "embed" in spec.axes else 0


def _queries(config: Any, sizes: Mapping[str, int]) -> int:
    """Return the elements of a token's queries in attention: for MLA many more than of keys and values."""
    return getattr(config, "heads", 0) * getattr(config, "head_dim", 0) // spread_over("heads", sizes)


def _widest(spec: ParamSpec, sizes: Mapping[str, int]) -> int:
    """Return the larger of a matrix's inputs and outputs; a stack of experts has as many of both as experts."""
    if not _is_matrix(spec) or "embed" not in spec.axes:
        return 0
    shape, d = local_shape(spec, sizes), _width(spec)
    experts = shape[spec.axes.index("expert")] if "expert" in spec.axes else 1
    return max(math.prod(shape) // d, experts * d)
