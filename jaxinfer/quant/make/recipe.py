"""Quantisation recipe with user settings, and its application to one weight."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.quant.make import awq
from jaxinfer.quant.make.formats import Stored
from jaxinfer.quant.make.gptq import gptq
from jaxinfer.quant.make.grid import IntegerGrid, Made
from jaxinfer.quant.make.rtn import MX_BLOCK, MadeCodebook, codebook, float8, integers, mxfp4

# Default output format of each method.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "int8": "compressed-tensors",
        "fp8": "compressed-tensors",
        "smoothquant": "compressed-tensors",
        "int4": "compressed-tensors",
        "mxfp4": "compressed-tensors",
        "gptq": "gptq",
        "awq": "awq",
        "nf4": "bitsandbytes",
        "fp4": "bitsandbytes",
    }
)
_INTEGERS = ("int4", "gptq", "awq")
_BITS = {"compressed-tensors": (4,), "gptq": (2, 3, 4, 8), "awq": (4,)}
_BLOCK = 128
_GROUP_SIZES = (128, 64, 32, 16, 8)  # candidates for advice


class RecipeError(ValueError):
    """Error for inconsistent settings, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Method and settings of a quantisation.

    Attributes:
        method: a name in `METHODS`. "int4" is rounding to nearest; "smoothquant" is int8 with int8 activations.
        bits, group_size: for int4, gptq and awq; ``group_size`` -1: one scale for each output.
        symmetric: no zero points; None: the method's default (awq has zero points, the other methods do not).
        activations: int8 and fp8: also round the inputs of products.
        blocks: fp8: a scale for 128 by 128 weights instead of one for each output.
        damp, act_order, static_groups: see `gptq`.
        alpha: see `smoothing`.
        clip: awq clips the weights of each group.
        nested: nf4 and fp4: scales are rounded to 8 bits.
        short_groups: also quantise weights whose last group is shorter. The formats compressed-tensors and awq can
            express this, but the tools of those names reject such files.
        weight_format: "compressed-tensors", "gptq" or "awq" for the integers of another method; "": the default.

    Raises:
        RecipeError: a value is unknown, or settings are inconsistent.
    """

    method: str
    bits: int = 4
    group_size: int = 128
    symmetric: bool | None = None
    activations: bool = False
    blocks: bool = False
    damp: float = 0.01
    act_order: bool = False
    static_groups: bool = False
    alpha: float = 0.5
    clip: bool = True
    nested: bool = True
    short_groups: bool = False
    weight_format: str = ""

    def __post_init__(self) -> None:
        _require(self.method in METHODS, f"--quantize {self.method!r} must be one of {', '.join(METHODS)}")
        integers = self.method in _INTEGERS
        allowed = tuple(_BITS) if integers else (METHODS[self.method],)
        _require(self.format in allowed, f"{self.method} cannot be written as {self.format!r}")
        if integers:
            bits = _BITS[self.format]
            _require(self.bits in bits, f"--bits {self.bits} of {self.format} must be one of {bits}")
            _require(self.format != "awq" or not self._symmetric, "the format awq has zero points")
            _require(self.group_size == -1 or self.group_size >= 8, "--group-size must be -1 or at least 8")
            ordered = self.act_order and not self.static_groups
            _require(not ordered or self.format == "gptq", "--act-order needs the format gptq or --static-groups")
        _require(0 <= self.alpha <= 1, f"--alpha {self.alpha} must be from 0 to 1")
        _require(0 < self.damp < 1, f"--damp {self.damp} must be between 0 and 1")

    @property
    def format(self) -> str:
        return self.weight_format or METHODS[self.method]

    @property
    def calibrated(self) -> bool:
        """Whether the method needs statistics of the inputs of each weight."""
        return self.method in ("smoothquant", "gptq", "awq")

    @property
    def gram(self) -> bool:
        """Whether the method needs the Gram matrix of the inputs."""
        return self.method in ("gptq", "awq")

    @property
    def folded(self) -> bool:
        """Whether input scales are folded into the preceding layer, which must support it."""
        return self.method in ("smoothquant", "awq")

    @property
    def _symmetric(self) -> bool:
        return self.method != "awq" if self.symmetric is None else self.symmetric

    def grid(self, dtype: str) -> IntegerGrid:
        """Return the integer grid for a model of this dtype."""
        if self.method in _INTEGERS:
            scales = dtype if self.format == "compressed-tensors" else "float16"
            return IntegerGrid(self.bits, max(self.group_size, 0), self._symmetric, scales)
        return IntegerGrid(8, 0, True, dtype)

    def stored(self, dtype: str) -> Stored:
        """Return the storage of the weights in a checkpoint of this dtype."""
        if self.method in _INTEGERS:
            grid = self.grid(dtype)
            act_order = self.act_order and self.method == "gptq"
            ordered = act_order and not self.static_groups
            return Stored(
                self.format, "int", grid.bits, grid.group, grid.symmetric, act_order, ordered=ordered, dtype=dtype
            )
        if self.method == "mxfp4":
            return Stored(self.format, self.method, 4, MX_BLOCK, dtype=dtype)
        if self.format == "bitsandbytes":
            return Stored(self.format, self.method, 4, 0, nested=self.nested, dtype=dtype)
        kind = "float" if self.method == "fp8" else "int"
        activations = self.activations or self.method == "smoothquant"
        return Stored(self.format, kind, 8, 0, blocks=self.blocks, activations=activations, dtype=dtype)

    def refusal(self, out: int, inputs: int) -> str:
        """Return why a weight of this size stays unquantized; "" if it is quantised."""
        if self.method == "mxfp4" and inputs % MX_BLOCK:
            return f"blocks of {MX_BLOCK} do not divide its {inputs} inputs"
        if self.method == "fp8" and self.blocks and inputs % _BLOCK:
            return f"blocks of {_BLOCK} do not divide its {inputs} inputs"
        if self._short(inputs) and self.format != "gptq" and not self.short_groups:
            return f"groups of {self.group_size} do not divide its {inputs} inputs"
        if self.format == "gptq" and (inputs * self.bits % 32 or out * self.bits % 32):
            return f"{out} outputs or {inputs} inputs of {self.bits} bits do not fill words of 32"
        if self.format == "awq" and out % 8:
            return f"its {out} outputs are not a multiple of 8"
        return ""

    def advice(self, inputs: Collection[int]) -> str:
        """Return flags with which groups divide all these numbers of inputs; "" if groups are not the obstacle."""
        if self.format == "gptq" or self.short_groups or not any(map(self._short, inputs)):
            return ""
        fitting = math.gcd(*inputs)
        sizes = (size for size in _GROUP_SIZES if size < self.group_size and fitting % size == 0)
        return " or ".join((*(f"--group-size {size}" for size in itertools.islice(sizes, 1)), "--short-groups"))

    def _short(self, inputs: int) -> bool:
        """Return whether groups do not divide the inputs."""
        return self.method in _INTEGERS and self.group_size > 0 and inputs % self.group_size != 0

    def made(self, weight: Float[Array, "out k"], gram: Float[Array, "k k"] | None, dtype: str) -> Made | MadeCodebook:
        """Quantise a weight with the method; round to nearest if there are no statistics of its inputs."""
        match self.method:
            case "fp8":
                kind = "float8_e4m3fn" if self.activations else ""
                return float8(weight, (_BLOCK, _BLOCK) if self.blocks else None, dtype, kind)
            case "nf4" | "fp4":
                return codebook(weight, self.method, self.nested)
            case "mxfp4":
                return mxfp4(weight)
            case "int8" | "smoothquant":
                rounded = self.activations or self.method == "smoothquant"
                return integers(weight, self.grid(dtype), "int8" if rounded else "")
        grid, inputs = self.grid(dtype), weight.shape[1]
        weight, filled = whole_groups(weight, gram, grid)
        return grid.cropped(self._integers(weight, filled, grid), inputs)

    def _integers(self, weight: jax.Array, gram: jax.Array | None, grid: IntegerGrid) -> Made:
        if gram is not None and self.method == "gptq":
            return gptq(weight, gram, grid, self.damp, self.act_order, self.static_groups)
        if gram is not None and self.method == "awq" and self.clip:
            weight = awq.clipped(weight, gram, grid)
        return integers(weight, grid)


@functools.partial(jax.jit, static_argnames=("grid",))
def whole_groups(
    weight: Float[Array, "out k"], gram: Float[Array, "k k"] | None, grid: IntegerGrid
) -> tuple[Float[Array, "out filled"], Float[Array, "filled filled"] | None]:
    """Zero-pad a weight and its Gram matrix to whole groups of inputs."""
    more = -weight.shape[1] % grid.group if grid.group else 0
    filled = jnp.pad(weight, ((0, 0), (0, more)))
    return filled, None if gram is None else jnp.pad(gram, ((0, more), (0, more)))


def _require(fits: bool, sentence: str) -> None:
    if not fits:
        raise RecipeError(sentence)
