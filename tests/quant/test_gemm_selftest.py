"""The trial of the GEMM kernel: kernels it accepts, faults it finds, and cached results."""

import dataclasses
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, EngineConfigError
from jaxinfer.engine.execution import prepare as preparing
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.quant import Quantized
from jaxinfer.quant import gemm_selftest as trials
from jaxinfer.quant.gemm_selftest import KernelLost, Operands, Product, Trial, by_xla, gemm_fault, products_of
from jaxinfer.quant.layouts import Grouped
from jaxinfer.types import ParamSpec
from pallas_kernels import matmul as dense_matmul
from tests.fakes import random_model

QKV, GATE_UP = Product((64, 3, 32), "in first", False), Product((2, 96, 64), "in last", True)
INT8, FP8 = (
    Product((2, 96, 128), "in last", gated, dtype) for gated, dtype in ((True, "int8"), (False, "float8_e4m3fn"))
)
ROWS = (7, 64, 130)


def by_rows(product: Product, given: Operands, dtype: object) -> jax.Array:
    """Compute each row separately, so that its bits depend on no other row."""

    def row(index: jax.Array) -> jax.Array:
        x, x_scales = (None if each is None else each[index][None] for each in (given.x, given.x_scales))
        return by_xla(product, given._replace(x=x, x_scales=x_scales), dtype)[0]

    return jax.lax.map(row, jnp.arange(given.x.shape[0]))


def without_the_last_inputs(product: Product, given: Operands, dtype: object) -> jax.Array:
    return by_rows(product, given._replace(x=given.x.at[:, -4:].set(0)), dtype)


def with_a_row_of_nan(product: Product, given: Operands, dtype: object) -> jax.Array:
    return by_rows(product, given, dtype).at[-1].set(jnp.nan)


def with_another_rows_scale(product: Product, given: Operands, dtype: object) -> jax.Array:
    return by_rows(product, given._replace(x_scales=jnp.roll(given.x_scales, 1)), dtype)


def with_another_outputs_scale(product: Product, given: Operands, dtype: object) -> jax.Array:
    return by_rows(product, given._replace(scales=jnp.roll(given.scales, 1)), dtype)


def by_the_number_of_rows(product: Product, given: Operands, dtype: object) -> jax.Array:
    """Differ by one ulp for small row counts."""
    result = by_rows(product, given, dtype)
    return result if given.x.shape[0] > 64 else jnp.nextafter(result, jnp.zeros_like(result))


def refusing(product: Product, given: Operands, dtype: object) -> jax.Array:
    raise NotImplementedError(f"no layout for {given.x.shape[0]} rows\nand a trace of the compiler")


def trial(kernel=by_rows, **changes: object) -> Trial:
    products, given = (
        {QKV: 2, GATE_UP: 1, INT8: 1, FP8: 1},
        {"plain": by_rows, "clock": itertools.count(0.0).__next__, **changes},
    )
    return Trial(products, ROWS, jnp.bfloat16, jax.devices()[0], kernel, **given)


def test_a_right_kernel_passes() -> None:
    assert trial().fault() is None


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (
            without_the_last_inputs,
            r"its results are off by up to .* in 130 rows, bfloat16 weights \(64, 3, 32\) \(in first\)",
        ),
        (with_a_row_of_nan, "its results are off by up to inf in 130 rows"),
        (by_the_number_of_rows, "a row's bits are others among 7 rows than among 130"),
        (refusing, r"it does not compile \(no layout for \d+ rows\), bfloat16 weights"),
    ],
)
def test_what_is_wrong_is_found(kernel, why) -> None:
    assert re.search(why, str(trial(kernel).fault()))


@pytest.mark.parametrize(
    ("product", "wrong"),
    [
        *((product, without_the_last_inputs) for product in (QKV, GATE_UP, INT8, FP8)),
        *(
            (product, wrong)
            for product in (INT8, FP8)
            for wrong in (with_another_rows_scale, with_another_outputs_scale)
        ),
    ],
)
def test_each_product_is_tried(product, wrong) -> None:
    def wrong_once(tried: Product, *rest: object) -> jax.Array:
        return (wrong if tried == product else by_rows)(tried, *rest)

    assert str(product) in str(trial(wrong_once).fault())


@pytest.mark.parametrize(
    ("kernel", "plain", "why"), [(4.0, 4.0, None), (5.0, 4.0, None), (6.0, 4.0, "it takes 1.50 of XLA's time")]
)
def test_a_kernel_that_is_much_slower_is_not_taken(kernel, plain, why) -> None:
    """The kernel's samples of a product come first, then those of the reference."""
    rounds = 2 * trials._ROUNDS  # of the fewest rows and of the most
    steps = itertools.cycle([*[0.0, kernel] * rounds, *[0.0, plain] * rounds])
    assert trial(clock=itertools.accumulate(steps).__next__).fault() == why


def test_a_kernel_that_never_comes_back_is_left_behind() -> None:
    done = threading.Event()

    def waiting(product: Product, given: Operands, dtype: object) -> jax.Array:
        result = by_rows(product, given, dtype)
        return jax.pure_callback(lambda value: (done.wait(), value)[1], result, result)

    try:
        with pytest.raises(KernelLost, match="did not come back within 0 s"):
            trial(waiting, patience=0.3).fault()
    finally:
        done.set()


def test_a_device_that_fails_is_told_of() -> None:
    def failing(product: Product, given: Operands, dtype: object) -> jax.Array:
        def fail(value: np.ndarray) -> np.ndarray:
            raise RuntimeError("an illegal address")

        result = by_rows(product, given, dtype)
        return jax.pure_callback(fail, result, result)

    with pytest.raises(KernelLost, match=r"^the device failed: INTERNAL.*$"):
        trial(failing).fault()


@pytest.mark.parametrize("late", [False, True])
def test_a_product_for_which_there_is_no_room_is_not_tried(late) -> None:
    """Products after one that runs out of memory are still tried."""

    def too_large(product: Product, given: Operands, dtype: object) -> jax.Array:
        if product != QKV:
            return without_the_last_inputs(product, given, dtype)
        if not late:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        def fail(value: np.ndarray) -> np.ndarray:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        result = by_rows(product, given, dtype)
        return jax.pure_callback(fail, result, result)

    assert str(GATE_UP) in str(trial(too_large).fault())


def test_what_float8_is_compared_with_is_added_in_float32() -> None:
    """XLA's own float8 product may be less exact than the kernel's."""

    def product_of_float8(product: Product, given: Operands, dtype: object) -> jax.Array:
        result = by_rows(product, given, dtype)
        return result * 1.1 if given.x.dtype == jnp.float8_e4m3fn else result

    tried = dataclasses.replace(trial(plain=product_of_float8), products={FP8: 1})
    assert tried.fault() is None


def test_what_the_kernel_refuses_is_not_tried() -> None:
    tried = Trial({Product((48, 30), "in first", False): 1}, ROWS, jnp.bfloat16, jax.devices()[0], refusing)
    assert tried.fault() is None


def test_rows_show_each_kind_of_tiles_once() -> None:
    """Row counts cover each tiling once, at its most rows; products with too many results use fewer rows."""
    counts = (1, 128, 256, 512, 1024, 2048, 4096)
    tried = Trial({}, counts, jnp.bfloat16, jax.devices()[0])
    wide = Product((2, 14336, 4096), "in last", True)
    found = tried._counts(wide)
    assert found[-1] == 4096
    assert len(found) < len(counts)

    def tiles(rows: int) -> object:
        x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 4096), wide.shape))
        return dense_matmul.tiles_of(x, weights, layout="in last", gated=True)

    assert {tiles(rows) for rows in counts} == {tiles(rows) for rows in found}
    assert tried._counts(Product((4096, 128_256), "in first", False))[-1] == 1024


def stored(layout: Grouped) -> Quantized:
    """Return the spec of a gate/up weight with 128 inputs."""
    parts = layout.parts(128) | layout.input_parts(128)
    arrays = {
        name: ParamSpec((2, 96, *part.shape), (None, "mlp", *(None,) * len(part.shape)), dtype=part.dtype)
        for name, part in parts.items()
    }
    return Quantized(arrays, layout, (None, "mlp", None), "bfloat16", 128)


def test_products_are_those_of_a_device() -> None:
    specs = {
        "one": {"qkv": ParamSpec((64, 4, 8), (None, "heads", None), inputs=0)},
        "two": {"qkv": ParamSpec((64, 4, 8), (None, "heads", None), inputs=0)},
        "gate_up": ParamSpec((2, 96, 64), (None, "mlp", None), inputs=-1),
        "router": ParamSpec((4, 64), (None, None), inputs=-1, dtype="float32"),
        "scale": ParamSpec((64,), (None,)),
        "rounded": stored(Grouped("int8", 128, activations="int8")),
        "float8": stored(Grouped("float8_e4m3fn", 128, activations="float8_e4m3fn", static=True)),
        "blocks": stored(Grouped("float8_e4m3fn", 64, activations="float8_e4m3fn", activation_group=64)),
        "zeros": stored(Grouped("int8", 128, zeros=True, activations="int8")),
        "plain inputs": stored(Grouped("int8", 128)),
    }
    names, devices = make_mesh(1).axis_names, np.array(jax.devices()[:1] * 2)
    mesh = Mesh(devices.reshape([2 if name == "tensor" else 1 for name in names]), names)
    assert products_of(specs, mesh, jnp.float16) == {
        Product((64, 2, 8), "in first", False, "float16"): 2,
        Product((2, 48, 64), "in last", True, "float16"): 1,
        Product((2, 48, 128), "in last", True, "int8"): 1,
        Product((2, 48, 128), "in last", True, "float8_e4m3fn"): 1,
    }


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    trials._kept.cache_clear()


SPECS = {"qkv": ParamSpec((64, 3, 32), (None, "heads", None), inputs=0)}


def fault_in_a_new_process() -> str | None:
    trials._kept.cache_clear()
    return gemm_fault([SPECS], ROWS, jnp.bfloat16, make_mesh(1))


@pytest.mark.parametrize("fault", [None, "its results are off"])
def test_what_was_found_is_kept(monkeypatch, cache, fault) -> None:
    tried = []
    monkeypatch.setattr(Trial, "fault", lambda self: tried.append(self.products) or fault)
    assert [fault_in_a_new_process() for _ in range(3)] == [fault] * 3
    assert tried == [{QKV: 1}]
    assert gemm_fault([SPECS], (*ROWS, 512), jnp.bfloat16, make_mesh(1)) == fault
    assert len(tried) == 2


def test_a_lost_kernel_is_known_to_the_next_process(monkeypatch, cache) -> None:
    def lose(self: Trial) -> str | None:
        raise KernelLost("it did not come back")

    monkeypatch.setattr(Trial, "fault", lose)
    with pytest.raises(KernelLost):
        fault_in_a_new_process()
    assert fault_in_a_new_process() == "it did not come back"


@pytest.mark.parametrize(("fault", "backend"), [(None, "mosaic"), ("it takes 3.00 of XLA's time", "xla")])
def test_the_trial_decides_what_auto_is(monkeypatch, caplog, fault, backend) -> None:
    monkeypatch.setattr(preparing, "_gemm_fault", lambda *_: fault)
    config = EngineConfig(max_model_len=64)
    assert prepare(random_model("bfloat16"), config, "gpu").config.gemm_backend == backend
    assert [record.getMessage() for record in caplog.records if "gemm_backend" in record.getMessage()] == (
        [] if fault is None else [f"gemm_backend = auto is xla here: the kernel was tried, and {fault}"]
    )


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [({"exactness": "relaxed"}, "bfloat16"), ({"gemm_backend": "xla"}, "bfloat16"), ({}, "float32")],
)
def test_nothing_is_tried_where_it_decides_nothing(monkeypatch, setting, dtype) -> None:
    monkeypatch.setattr(preparing, "_gemm_fault", lambda *_: pytest.fail("tried"))
    config = EngineConfig(max_model_len=64, **setting)
    assert prepare(random_model(dtype), config, "gpu").config.gemm_backend == config.gemm_backend


def test_products_that_a_named_backend_does_not_do_are_logged(caplog) -> None:
    """The weights are too small for the kernel: a log line avoids figures of XLA under the kernel's name."""
    prepare(random_model("bfloat16"), EngineConfig(max_model_len=64, gemm_backend="mosaic"), "gpu")
    told = [record.args for record in caplog.records if "which the kernel does not" in record.msg]
    assert {type(product) for product, _ in told} == {Product}
    assert all("multiples of 64" in why for _, why in told)


def test_a_lost_kernel_ends_the_start(monkeypatch) -> None:
    def lose(*_: object) -> str | None:
        raise KernelLost("it did not come back within 60 s")

    class Gpu:
        platform, process_index = "gpu", 0

    gpu = Gpu()
    monkeypatch.setattr(preparing, "own_devices", lambda mesh: [gpu])
    monkeypatch.setattr(preparing.jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(preparing, "gemm_fault", lose)
    model, config = random_model("bfloat16"), EngineConfig(max_model_len=64)
    engine = preparing.resolve_for(model, config, "gpu")
    with pytest.raises(EngineConfigError, match=r"gemm_backend = auto: .* come back within 60 s.* gemm_backend = x"):
        preparing._gemm_fault(engine, model, make_mesh(1))
