"""A stored weight of every layout, with random values."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.quant import Quantized
from jaxinfer.quant.layouts import Blocks, Codebook, Grouped, Layout

TABLE = tuple(float(value) for value in np.linspace(-1.0, 1.2, 16, dtype=np.float32))
SCALES = tuple(float(value) for value in np.linspace(0.1, 2.0, 256, dtype=np.float32))
INPUTS = 64

LAYOUTS: dict[str, Layout] = {
    "int8 a channel": Grouped("int8", INPUTS),
    "int8 times a factor": Grouped("int8", INPUTS, factor=1 / 127),
    "int8 in groups": Grouped("int8", 16, scales="float16", zeros=True),
    "int4": Grouped("int4", 32, scales="bfloat16"),
    "int4 with zeros": Grouped("int4", 32, zeros=True),
    "int4 with biases": Grouped("int4", 32, scales="bfloat16", biased=8),
    "int4 in another order": Grouped("int4", 16, zeros=True, ordered=True),
    "fp8": Grouped("float8_e4m3fn", 32),
    "codebook": Codebook(TABLE, 16),
    "codebook, powers of two": Codebook(TABLE, 32, scales="float8_e8m0fnu"),
    "codebook, divided": Codebook(TABLE, 16, scales="float8_e4m3fn", divided=True),
    "codebook, nested": Codebook(TABLE, 4, scales="uint8", nested=32, scale_table=SCALES),
    "ggml": Blocks("Q8_0"),
}


def arrays_of(
    layout: Layout, out: tuple[int, ...], inputs: int, rng: np.random.Generator, gain: float = 1.0
) -> dict[str, np.ndarray]:
    """Draw the part arrays and input part arrays of a layout, on the host.

    Args:
        gain: scale of the weight; 1: values between -10 and 10.
    """
    arrays = {
        name: _drawn(name, (*out, *part.shape), part.dtype, rng, gain) for name, part in layout.parts(inputs).items()
    }
    if isinstance(layout, Blocks):
        halves = (gain * rng.uniform(0.01, 0.1, (*arrays["blocks"].shape[:-1], 1))).astype(np.float16)
        arrays["blocks"][..., :2] = halves.view(np.uint8)
    if "order" in layout.input_parts(inputs):
        arrays["order"] = rng.permutation(inputs).astype(np.int32)
    return arrays


def _drawn(name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator, gain: float) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype in ("int4", "uint4", "int8", "uint8"):
        low, high = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}[dtype]
        return rng.integers(low, high, shape).astype(kind)
    if dtype == "float8_e8m0fnu":
        return np.exp2(rng.integers(-3, 3, shape) + round(np.log2(gain))).astype(kind)
    if name == "codes":
        return rng.normal(0, 50, shape).astype(kind)
    return (gain * rng.uniform(0.01, 0.1, shape)).astype(kind)


def example(layout: Layout, out: tuple[int, ...], axes: tuple[str | None, ...] = (), seed: int = 0) -> Quantized:
    """Return a stored weight ``[*out, INPUTS]``."""
    host = arrays_of(layout, out, INPUTS, np.random.default_rng(seed))
    arrays: dict[str, Any] = {name: jnp.asarray(array) for name, array in host.items()}
    return Quantized(arrays, layout, axes or (None,) * (len(out) + 1), "float32", INPUTS)
