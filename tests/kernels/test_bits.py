"""Conversion of bytes that store float8 bit patterns."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import bits

CODES = np.arange(256, dtype=np.uint8)
FLOAT8 = CODES.view(ml_dtypes.float8_e4m3fn)


def test_every_code_is_its_number():
    want, codes = FLOAT8.astype(np.float32), jnp.asarray(CODES)
    np.testing.assert_array_equal(bits.numbers(codes).astype(jnp.float32), want)
    got, known = np.asarray(jax.jit(bits.widened)(codes)), ~np.isnan(want)
    np.testing.assert_array_equal(got[known], want[known])
    assert (np.signbit(got) == np.signbit(want)).all()
    np.testing.assert_array_equal(np.abs(got[~known]), [480, 480])


def test_what_is_held_comes_back():
    numbers = jnp.asarray(FLOAT8[:127])
    np.testing.assert_array_equal(bits.held(numbers, jnp.uint8), CODES[:127])
    assert bits.held(numbers, jnp.float8_e4m3fn) is numbers
    assert (bits.meant(jnp.uint8), bits.meant(jnp.int8)) == (jnp.float8_e4m3fn, jnp.int8)


def test_other_dtypes_are_widened_as_they_are():
    for dtype in (jnp.int8, jnp.bfloat16, jnp.float8_e4m3fn):
        x = jnp.asarray([-3, 0, 7]).astype(dtype)
        assert bits.numbers(x) is x
        np.testing.assert_array_equal(bits.widened(x), [-3, 0, 7])
