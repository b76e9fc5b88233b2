"""The Mosaic kernel that writes keys and values, interpreted on the CPU, against the float64 reference.

All unwritten pool contents and all dropped keys and values are poison: NaN, 127 in integer pools, and NaN scales of
unwritten pages. Pools are compared whole.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, kv_write
from pallas_kernels.choice import Target
from pallas_kernels.kv_write import mosaic, reference

PAGES = 6
BF16, FP16, INT8, FP8 = jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of three sequences: one in mid-page, one whose second page is out of range, one of padding."""

    chunk: int = 1
    page: int = 16
    kv_heads: int = 2
    heads: int = 0
    head_dim: int = 64
    half: int = 0
    interleaved: bool = False
    dtype: object = BF16
    pool_dtype: object = None
    scales: str | None = None
    tiles: mosaic.Tiles | None = None

    def operands(self):
        rng = np.random.default_rng(0)
        shape = (PAGES, 2, self.kv_heads, self.page, self.head_dim)
        pool_dtype = self.pool_dtype or self.dtype
        poison = 127 if pool_dtype == INT8 else np.nan
        pages = np.array([[4, 1], [2, PAGES], [-1, PAGES]])[:, : 1 + (self.chunk > 1)]
        offsets = np.array([self.page - 2, self.page - 3, 0])
        k, v = rng.normal(size=(2, 3, self.chunk, self.kv_heads, self.head_dim)) * 3
        k[2], v[2] = np.nan, np.nan
        k[1, 3:], v[1, 3:] = np.nan, np.nan
        scales = None
        if self.scales is not None:
            scales = np.full(shape[: 3 + (self.scales == "token")], np.nan, np.float32)
            if self.scales == "head":
                scales[[4, 1, 2]] = rng.uniform(0.02, 0.08, (3, *shape[1:3]))
        angles = rng.uniform(-3, 3, (3, self.chunk, self.half))
        q = rng.normal(size=(3, self.chunk, self.heads, self.head_dim))
        arrays = [jnp.full(shape, poison, pool_dtype), *(jnp.asarray(x, self.dtype) for x in (k, v))]
        options = {
            "scales": None if scales is None else jnp.asarray(scales),
            "rope": tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)) if self.half else None,
            "interleaved": self.interleaved,
            "q": jnp.asarray(q, self.dtype) if self.heads else None,
        }
        return [*arrays, jnp.asarray(pages), jnp.asarray(offsets)], options

    def got(self):
        arrays, options = self.operands()
        interpret = compat.interpret_params()
        return compat.interpreted(lambda: mosaic.write(*arrays, **options, tiles=self.tiles, interpret=interpret))

    def check(self):
        arrays, options = self.operands()
        with jax.enable_x64(True):
            expected = reference.write(*arrays, **options, dtype=jnp.float64)
        got = self.got()
        # A midpoint may round either way: one step of the pool dtype.
        step = {BF16: 2**-8, FP16: 2**-11, jnp.float32: 1e-6}[self.dtype]
        pool_step = {None: step, INT8: 0, FP8: 2**-3}[self.pool_dtype]
        close(got.pool, expected.pool, rtol=pool_step, atol=1 if self.pool_dtype == INT8 else 3 * step)
        assert (got.scales is None) == (expected.scales is None)
        if got.scales is not None:
            close(got.scales, expected.scales, rtol=step, atol=0)
        assert (got.q is None) == (expected.q is None)
        if got.q is not None:
            close(got.q, expected.q, rtol=step, atol=3 * step)


def close(got, expected, *, rtol, atol):
    got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)


CASES = {
    "decode": Case(heads=8, half=32),
    "chunk over a page's end": Case(chunk=5, kv_heads=4, head_dim=80),
    "partial, int8 per token": Case(head_dim=96, half=24, pool_dtype=INT8, scales="token", page=32, kv_heads=1),
    "interleaved, float8 per head": Case(half=32, interleaved=True, pool_dtype=FP8, scales="head", heads=3, page=64),
    "float16, tiles of one head": Case(dtype=FP16, head_dim=128, half=64, heads=6, tiles=mosaic.Tiles(heads=1)),
    "float32, float8 per token": Case(
        dtype=jnp.float32, head_dim=256, half=128, pool_dtype=FP8, scales="token", chunk=4, page=128
    ),
}
SLOW = {
    f"{head_dim}-{name}-{jnp.dtype(dtype).name}": Case(head_dim=head_dim, dtype=dtype, chunk=3, **options)
    for head_dim in (64, 80, 96, 128, 256)
    for dtype in (BF16, FP16, jnp.float32)
    for name, options in {
        "plain": {"kv_heads": 3},
        "halves": {"half": 24, "heads": 7, "pool_dtype": INT8, "scales": "head"},
        "pairs": {"half": 32, "interleaved": True, "kv_heads": 8, "pool_dtype": FP8, "scales": "token"},
        "pairs-int8": {"half": 16, "interleaved": True, "heads": 2, "pool_dtype": INT8, "scales": "token", "page": 128},
    }.items()
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    CASES[name].check()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_float64_for_every_option(name):
    SLOW[name].check()


PROJECTED = {
    "group of 4": Case(heads=8, half=32),
    "group of 3, pairs, int8": Case(heads=6, half=16, interleaved=True, pool_dtype=INT8, scales="token", chunk=4),
}


@pytest.mark.parametrize("name", PROJECTED)
def test_a_projection_is_read_where_it_lies(name):
    """Writing from one fused QKV array is bitwise identical to `write` of three arrays; XLA splits the array."""
    case = PROJECTED[name]
    (pool, k, v, *places), options = case.operands()
    q = options.pop("q")
    groups = q.reshape(*k.shape[:3], -1, k.shape[-1])
    qkv = jnp.concatenate([groups, k[..., None, :], v[..., None, :]], axis=-2)
    interpret = compat.interpret_params()
    got = compat.interpreted(lambda: mosaic.write_projected(pool, qkv, *places, **options, interpret=interpret))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(case.got()), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    apart = kv_write.write_projected(pool, qkv, *places, **options)
    whole = kv_write.write(pool, k, v, *places, **options, q=q)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_what_is_no_projection_to_rotate_is_refused():
    pool, qkv, half = jnp.zeros((6, 2, 2, 16, 64)), jnp.zeros((1, 1, 2, 2, 64)), jnp.zeros((1, 1, 32))
    assert "(1, 1, 2, 2, 64)" in (mosaic.projected_refusal(pool, qkv, rope=(half, half), interleaved=False) or "")
    whole, hopper = jnp.zeros((1, 1, 2, 6, 64)), Target("gpu", (9, 0))
    assert kv_write.explain_projected(pool, whole, rope=(half, half), target=hopper).path == "mosaic"
    assert "head_dim 64" in kv_write.explain_projected(pool, whole, rope=(half[..., :5],) * 2, target=hopper).why


def a_slot_too_far(monkeypatch):
    place = mosaic._place
    monkeypatch.setattr(mosaic, "_place", lambda *a: (place(*a)[0], (place(*a)[1] + 1) % 16, place(*a)[2]))


def padding_is_written(monkeypatch):
    place = mosaic._place
    monkeypatch.setattr(mosaic, "_place", lambda *a: (jnp.clip(place(*a)[0], 0, PAGES - 1), place(*a)[1], True))


def values_are_rotated(monkeypatch):
    monkeypatch.setattr(mosaic, "KEYS", 1)


def the_largest_of_half_a_head(monkeypatch):
    largest = mosaic._largest
    monkeypatch.setattr(mosaic, "_largest", lambda pieces: largest(pieces[:1]))


@pytest.mark.parametrize("mutation", [a_slot_too_far, the_largest_of_half_a_head])
def test_a_mistake_is_caught(monkeypatch, mutation):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        Case(half=32, pool_dtype=INT8, scales="token").check()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [padding_is_written, values_are_rotated])
def test_more_mistakes_are_caught(monkeypatch, mutation):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        Case(half=32, pool_dtype=INT8, scales="token").check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"half": 20}, "40 numbers rotated"),
        ({"pool_dtype": INT8}, "int8 without scales"),
        ({"scales": "token"}, "bfloat16 with scales"),
    ],
)
def test_refuses_what_it_cannot_do(change, message):
    with pytest.raises(ValueError, match=message):
        Case(**change).got()


def test_refuses_tiles_that_do_not_fit():
    with pytest.raises(ValueError, match="power of two"):
        mosaic.Tiles(heads=6)
