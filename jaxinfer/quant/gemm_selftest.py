"""Startup trial of the GEMM kernel: is it correct, batch-invariant and fast enough on this GPU?

The kernel (`pallas_kernels.matmul`) is batch-invariant by construction, so an engine that guarantees batch invariance
prefers it. Compilers and interpreters cannot verify its hardware assumptions, so the GPU is tested once, with products
of the model's shapes; the result is cached next to the executables.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.compilations import found_out, timed
from jaxinfer.parallel.mesh import param_sharding
from jaxinfer.parallel.processes import own_devices
from jaxinfer.quant.storage import Quantized, rounds_tokens
from jaxinfer.quant.unquantized import Unquantized, for_gemm
from pallas_kernels import matmul as dense_matmul
from pallas_kernels.choice import Wish
from pallas_kernels.launches import recording
from pallas_kernels.matmul import Extras, Layout
from pallas_kernels.trial.run import faults_of

# Largest time relative to XLA for all products. Beyond it, XLA's batch-invariant programs, though few, are cheaper: on
# an H100 an exact prefill by XLA took 1.5 times as long as an inexact one.
_SLOWER = 1.25
_PATIENCE = 60.0  # seconds until a launch is abandoned; the longest takes some milliseconds
_ROUNDS, _CALLS = 3, 10  # timing rounds, and calls per round
_RESULTS = 2**27  # largest number of results of a tried product: 512 MiB in float32
_SPREAD = {"int8": 30, "float8_e4m3fn": 1}  # standard deviation of 8-bit operands
# Tolerances for results of variance 1. The order of float32 additions accounts for a tenth; a tensor core adds float8
# products with about 14 bits (DeepSeek-V3, arXiv:2412.19437), 128 of them before the kernel continues in float32.
_NEAR_ZERO, _NEAR_ZERO_FLOAT8 = 1e-3, 5e-3
_REFUSALS = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)  # of Mosaic GPU, ptxas and the driver


class KernelLost(Exception):
    """Error for a kernel that never returned or that crashed the device."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product with one device's shard of a weight.

    Attributes:
        shape, layout: shape and layout of the weight.
        gated: silu(gate) * up follows.
        dtype: dtype of both operands; 8-bit operands have scales per row and per output.
    """

    shape: tuple[int, ...]
    layout: Layout
    gated: bool
    dtype: str = "bfloat16"

    @property
    def inputs(self) -> int:
        return self.shape[0] if self.layout == "in first" else self.shape[-1]

    @property
    def outer(self) -> tuple[int, ...]:
        """Shape of its outputs."""
        return self.shape[1:] if self.layout == "in first" else self.shape[:-1]

    @property
    def outputs(self) -> int:
        return math.prod(self.outer)

    def refusal(self, rows: int, dtype: Any) -> str | None:
        """Return why the kernel cannot multiply this number of rows with a result of this dtype; None if it can."""
        return dense_matmul.refusal(*self.operands(rows), layout=self.layout, gated=self.gated, dtype=dtype)

    def operands(self, rows: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of that many rows and of the weight."""
        return jax.ShapeDtypeStruct((rows, self.inputs), self.dtype), jax.ShapeDtypeStruct(self.shape, self.dtype)

    def shapes(self, rows: int) -> Operands:
        """Return the shapes of all operands, with scales for 8-bit ones."""
        x, weights = self.operands(rows)
        if jnp.dtype(self.dtype).itemsize > 1:
            return Operands(x, weights)
        scales = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows,), self.outer))
        return Operands(x, weights, *scales)

    def __str__(self) -> str:
        return f"{self.dtype} weights {self.shape} ({self.layout}{', gated' * self.gated})"


class Operands(NamedTuple):
    """Operands of a product; ``scales`` and ``x_scales`` are None for 16-bit dtypes."""

    x: Any
    weights: Any
    x_scales: Any = None
    scales: Any = None

    def rows(self, count: int) -> Operands:
        """Return the operands for the first rows."""
        return self._replace(x=self.x[:count], x_scales=None if self.x_scales is None else self.x_scales[:count])

    def in_16_bits(self) -> Operands:
        """Convert float8 operands to bfloat16, whose products tensor cores add in float32. The conversion is exact."""
        if self.x.dtype != jnp.float8_e4m3fn:
            return self
        return self._replace(x=self.x.astype(jnp.bfloat16), weights=self.weights.astype(jnp.bfloat16))


Multiply = Callable[[Product, Operands, Any], jax.Array]  # last argument: dtype of the result


def by_kernel(product: Product, operands: Operands, dtype: Any, path: Wish = "mosaic") -> jax.Array:
    extras = Extras(x_scales=operands.x_scales, scales=operands.scales)
    options: dict[str, Any] = {"layout": product.layout, "gated": product.gated, "dtype": dtype, "path": path}
    return dense_matmul.matmul(operands.x, operands.weights, extras, **options)


def by_xla(product: Product, operands: Operands, dtype: Any) -> jax.Array:
    return by_kernel(product, operands, dtype, "xla")


def products_of(specs: Any, mesh: Mesh, dtype: Any) -> collections.Counter[Product]:
    """Count the products of a model of this dtype that `Unquantized.path` and `Quantized.path` apply to."""
    plain, _ = for_gemm(specs, specs, "mosaic")
    weights = jax.tree.leaves(plain, is_leaf=lambda node: isinstance(node, Unquantized | Quantized))
    products = (_product(weight, mesh, jnp.dtype(dtype).name) for weight in weights)
    return collections.Counter(product for product in products if product is not None)


def refused_products(specs: Any, mesh: Mesh, dtype: Any) -> dict[Product, str]:
    """Return the products of `products_of` that the kernel does not support, with the reason; XLA computes them
    regardless of `Unquantized.path`."""
    found = {product: product.refusal(1, dtype) for product in products_of(specs, mesh, dtype)}
    return {product: why for product, why in found.items() if why is not None}


def _product(weight: Any, mesh: Mesh, dtype: str) -> Product | None:
    if isinstance(weight, Unquantized):
        spec, layout = weight.weight, weight.layout
    elif isinstance(weight, Quantized) and rounds_tokens(weight):
        spec, layout, dtype = weight.arrays["codes"], "in last", weight.arrays["codes"].dtype
    else:
        return None
    shape = param_sharding(mesh, spec).shard_shape(spec.shape)
    return Product(shape, layout, layout == "in last" and len(shape) == 3 and shape[0] == 2, dtype)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of products with several numbers of rows on one device.

    Attributes:
        rows: row counts of the engine's programs.
        dtype: dtype of results.
        kernel, plain: the function to try, and its reference.
        clock: returns seconds.
        patience: seconds that a launch may take.
    """

    products: Mapping[Product, int]
    rows: Sequence[int]
    dtype: Any
    device: jax.Device
    kernel: Multiply = by_kernel
    plain: Multiply = by_xla
    clock: Callable[[], float] = time.perf_counter
    patience: float = _PATIENCE

    def fault(self) -> str | None:
        """Return why the kernel must not be used, in one sentence; None if it passes. Products that do not fit in the
        device's free memory are not tried.

        Raises:
            KernelLost: the device is unusable too: its last launch is still running.
        """
        seconds = [0.0, 0.0]
        for product, count in self.products.items():
            try:
                fault, each = self._fault_of(product)
            except jax.errors.JaxRuntimeError as error:
                if not _is_of_memory(error):
                    raise
                continue
            if fault is not None:
                return f"{fault}, {product}"
            seconds = [sum_ + count * one for sum_, one in zip(seconds, each, strict=True)]
        kernel, plain = seconds
        if kernel > _SLOWER * plain:
            return f"it takes {kernel / plain:.2f} of XLA's time"
        return None

    def fault_elsewhere(self) -> str | None:
        """Return why the kernel must not be used, as found in a separate process, which may hang; None if it passes."""
        if self.device.platform not in ("gpu", "cuda"):
            return None
        with recording() as launches:
            for product in self.products:
                for rows in self._counts(product):
                    run = functools.partial(self.kernel, product)
                    jax.eval_shape(lambda given, run=run: run(given, self.dtype), product.shapes(rows))
        return next(iter(faults_of(launches).values()), None)

    def _fault_of(self, product: Product) -> tuple[str | None, tuple[float, float]]:
        """Return the fault of a product, and the seconds of kernel and XLA for the fewest plus the most rows."""
        nothing, counts = (0.0, 0.0), self._counts(product)
        if not counts:
            return None, nothing
        operands = self._operands(product, counts[-1])
        try:
            kernels = self._compiled(self.kernel, product, operands, counts)
        except _REFUSALS as error:
            if _is_of_memory(error):
                raise
            return f"it does not compile ({_first_line(error)})", nothing
        results = {rows: self._awaited(run) for rows, run in kernels.items()}
        exact = self.plain(product, operands.in_16_bits(), jnp.float32)
        if (fault := _wrong(product, results, exact)) is not None:
            return fault, nothing
        plain = self._compiled(self.plain, product, operands, {counts[0], counts[-1]})
        kernel_s, plain_s = (sum(self._seconds(runs[rows]) for rows in plain) for runs in (kernels, plain))
        return None, (kernel_s, plain_s)

    def _counts(self, product: Product) -> list[int]:
        """Return ascending row counts that cover all tile shapes of the kernel for a product; empty if unsupported."""
        options: dict[str, Any] = {"layout": product.layout, "gated": product.gated, "dtype": self.dtype}
        found: dict[Any, int] = {}
        for rows in sorted({1, *self.rows}):
            if product.refusal(rows, self.dtype) is not None:
                return []
            if rows * product.outputs <= _RESULTS:
                found[dense_matmul.tiles_of(*product.operands(rows), **options)] = rows
        return sorted(found.values())

    def _operands(self, product: Product, rows: int) -> Operands:
        """Return random operands whose products have a variance of about 1."""
        of_x, of_weights = jax.device_put(jax.random.split(jax.random.key(0)), self.device)
        x, weights = _random(of_x, (rows, product.inputs)), _random(of_weights, product.shape)
        if jnp.dtype(product.dtype).itemsize > 1:
            return Operands(x.astype(product.dtype), (weights * product.inputs**-0.5).astype(product.dtype))
        size = _SPREAD[product.dtype]
        codes = [(array * size).clip(-127, 127).astype(product.dtype) for array in (x, weights)]
        # distinct scales for each row and each output
        of_rows = (1 + jnp.arange(rows) % 3 / 4) / size
        of_outputs = (1 + jnp.arange(product.outputs) % 5 / 8).reshape(product.outer) / size * product.inputs**-0.5
        return Operands(*codes, *(jax.device_put(array, self.device) for array in (of_rows, of_outputs)))

    def _compiled(
        self, multiply: Multiply, product: Product, operands: Operands, counts: Collection[int]
    ) -> dict[int, Callable[[], jax.Array]]:
        """Compile programs for the first rows, in parallel; return them by row count."""
        function = jax.jit(functools.partial(multiply, product), static_argnums=1)

        def program(rows: int) -> Callable[[], jax.Array]:
            own = operands.rows(rows)
            return functools.partial(function.lower(own, self.dtype).compile(), own)

        with concurrent.futures.ThreadPoolExecutor() as threads:
            return dict(zip(counts, threads.map(program, counts), strict=True))

    def _awaited(self, run: Callable[[], jax.Array]) -> jax.Array:
        """Return the result of a launch, awaited in a thread that may be abandoned, as JAX cannot be interrupted."""
        answers: queue.SimpleQueue[jax.Array | jax.errors.JaxRuntimeError] = queue.SimpleQueue()

        def wait() -> None:
            try:
                answers.put(jax.block_until_ready(run()))
            except jax.errors.JaxRuntimeError as error:
                answers.put(error)

        threading.Thread(target=wait, name="gemm-trial", daemon=True).start()
        try:
            answer = answers.get(timeout=self.patience)
        except queue.Empty:
            raise KernelLost(f"it did not come back within {self.patience:.0f} s") from None
        if isinstance(answer, jax.errors.JaxRuntimeError):
            if _is_of_memory(answer):
                raise answer
            raise KernelLost(f"the device failed: {_first_line(answer)}") from answer
        return answer

    def _seconds(self, run: Callable[[], jax.Array]) -> float:
        """Return the seconds of one call, the best of several rounds."""
        best = math.inf
        for _ in range(_ROUNDS):
            jax.block_until_ready(run())
            begun = self.clock()
            jax.block_until_ready([run() for _ in range(_CALLS)][-1])
            best = min(best, (self.clock() - begun) / _CALLS)
        return best


@functools.partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return normal values in bfloat16, as a weight may be large."""
    return jax.random.normal(key, shape, jnp.bfloat16)


def _is_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _wrong(product: Product, results: Mapping[int, jax.Array], exact: jax.Array) -> str | None:
    """Return the fault of results by row count, all of them for the first rows of the largest."""
    whole = results[max(results)]
    near_zero = _NEAR_ZERO_FLOAT8 if product.dtype == "float8_e4m3fn" else _NEAR_ZERO
    near, most = _compared(whole, exact, steps=2 if product.gated else 1, near_zero=near_zero)
    if not near:
        return f"its results are off by up to {most:.1e} in {whole.shape[0]} rows"
    for rows, result in results.items():
        if not bool((result == whole[:rows]).all()):
            return f"a row's bits are others among {rows} rows than among {whole.shape[0]}"
    return None


@functools.partial(jax.jit, static_argnames=("steps", "near_zero"))
def _compared(result: jax.Array, exact: jax.Array, steps: int, near_zero: float) -> tuple[jax.Array, jax.Array]:
    """Return whether ``steps`` roundings explain all differences, and the largest difference."""
    difference = jnp.abs(result.astype(jnp.float32) - exact)
    explained = steps * jnp.finfo(result.dtype).eps * jnp.abs(exact) + near_zero
    return (difference <= explained).all(), jnp.where(jnp.isfinite(difference), difference, jnp.inf).max()


def gemm_fault(trees: Iterable[Any], rows: Iterable[int], dtype: Any, mesh: Mesh) -> str | None:
    """Return why this process's devices of a mesh must not use the kernel for models (trees of specs); None if they
    may. One of the devices tests it once.

    Args:
        rows: row counts of the programs.

    Raises:
        KernelLost: see `Trial.fault`; the result is cached for later starts.
    """
    products = sum((products_of(specs, mesh, dtype) for specs in trees), collections.Counter[Product]())
    return _kept(tuple(products.items()), tuple(rows), jnp.dtype(dtype), own_devices(mesh)[0])


@functools.cache
def _kept(products: tuple[tuple[Product, int], ...], rows: tuple[int, ...], dtype: Any, device: Any) -> str | None:
    trial, lost = Trial(dict(products), rows, dtype, device), list[KernelLost]()

    def find_out() -> dict[str, Any]:
        try:
            return {"fault": trial.fault_elsewhere() or trial.fault()}
        except KernelLost as error:
            lost.append(error)
            return {"fault": str(error)}

    settings = f"gemm {products} {rows} {dtype} {device.device_kind}"
    with timed("the GEMM kernel tried, or what is known of it read"):
        found = found_out(device.client.platform_version, settings, find_out, _is_fault)
    if lost:
        raise lost[0]
    fault: str | None = found["fault"]
    return fault


def _is_fault(found: Any) -> bool:
    return isinstance(found, dict) and found.keys() == {"fault"} and isinstance(found["fault"], str | None)
