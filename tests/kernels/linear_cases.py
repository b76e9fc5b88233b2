"""Operands of linear attention and their float64 results, computed by an independent loop."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

STATES = 5


class Case(NamedTuple):
    """Operands of `prefill`, and without a time axis of `decode`. Unread states hold NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray | None
    pool: np.ndarray
    read: np.ndarray
    write: np.ndarray

    @property
    def arrays(self):
        return tuple(None if x is None else jnp.asarray(x) for x in self)


def case(read, write, *, k_heads=1, heads=2, key=64, value=32, dtype=jnp.float32, values=None, delta=True, seed=0):
    """Draw a case with normalised keys, as in models; ``write``: decode [rows], prefill ([sequences, chunks], size)."""
    rng = np.random.default_rng(seed)
    read = np.asarray(read, np.int32)
    write, size = (np.asarray(write[0], np.int32), write[1]) if isinstance(write, tuple) else (np.int32(write), None)
    lead = (len(read),) if size is None else (len(read), write.shape[1] * size)
    q, k = rng.normal(size=(2, *lead, k_heads, key))
    pool = np.full((STATES, heads, key, value), np.nan, np.float32)
    known = [page for page in read if 0 <= page < STATES]
    pool[known] = rng.normal(size=(len(known), *pool.shape[1:]))
    return Case(
        q.astype(dtype),
        (k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype),
        rng.normal(size=(*lead, heads, value)).astype(values or dtype),
        -rng.exponential(0.3, (*lead, heads)).astype(np.float32),
        rng.uniform(0.1, 1, (*lead, heads)).astype(np.float32) if delta else None,
        pool,
        read,
        write,
    )


def expected(one):
    """Return outputs and pool in float64."""
    wide = Case(*(None if x is None else np.array(x, np.float64 if x.dtype.kind != "i" else x.dtype) for x in one))
    if wide.v.ndim == 3:
        outs, states = _token(wide, _begin(wide), np.s_[:])
        return outs, _put(wide.pool, wide.write, states)
    state, outs, pool = _begin(wide), [], wide.pool
    size = wide.v.shape[1] // wide.write.shape[1]
    for time in range(wide.v.shape[1]):
        out, state = _token(wide, state, np.s_[:, time])
        outs.append(out)
        if (time + 1) % size == 0:
            pool = _put(pool, wide.write[:, time // size], state)
    return np.stack(outs, 1), pool


def _begin(wide):
    known = (wide.read >= 0) & (wide.read < STATES)
    return np.where(known[:, None, None, None], wide.pool[np.where(known, wide.read, 0)], 0.0)


def _put(pool, write, states):
    pool = pool.copy()
    for page, state in zip(write, states, strict=True):
        if 0 <= page < STATES:
            pool[page] = state
    return pool


def _token(wide, state, at):
    """Update ``state`` by one token of each row, head by head; return the outputs."""
    q, k, v, decay = wide.q[at], wide.k[at], wide.v[at], wide.decay[at]
    outs, states = np.empty(v.shape), np.empty(state.shape)
    group = v.shape[1] // q.shape[1]
    for row, head in np.ndindex(v.shape[:2]):
        own = state[row, head] * np.exp(decay[row, head])
        key, change = k[row, head // group], v[row, head]
        if wide.beta is not None:
            change = wide.beta[at][row, head] * (change - key @ own)
        states[row, head] = own + np.outer(key, change)
        outs[row, head] = q[row, head // group] @ states[row, head]
    return outs, states


def assert_close(got, one, bound=2e-6):
    """Check within ``bound`` of the largest magnitude; unwritten states must be bitwise unchanged."""
    for mine, other in zip(got, expected(one), strict=True):
        mine = np.asarray(mine)
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, other, rtol=0, atol=bound * np.nanmax(np.abs(other)))
    touched = [page for page in one.write.flat if 0 <= page < STATES]
    others = [page for page in range(STATES) if page not in touched]
    np.testing.assert_array_equal(np.asarray(got[1])[others], one.pool[others])


def equal_keys(one):
    """Return the case with identical keys: every token replaces the whole value under that key, without decay."""
    same = np.broadcast_to(one.k[:1, :1], one.k.shape).copy()
    return one._replace(k=same, decay=np.zeros_like(one.decay), beta=np.ones_like(one.beta))


def strong_decay(one):
    """Return the case with decays that are either near-total or none."""
    decay = np.where(np.random.default_rng(1).random(one.decay.shape) < 0.3, np.float32(-60), np.float32(0))
    return one._replace(decay=decay)


def filled(one, first):
    """Return the case with zero tokens from token ``first`` on."""
    parts = [x if x is None else x.copy() for x in one[:5]]
    for x in parts:
        if x is not None:
            x[:, first:] = 0
    return one._replace(**dict(zip(one._fields[:5], parts, strict=True)))


def part(one, sequences, times):
    """Return a case of some sequences and a range of their tokens, with the same chunk size."""
    size = one.v.shape[1] // one.write.shape[1]
    operands = [x if x is None else x[sequences, times] for x in one[:5]]
    chunks = slice(*(x // size for x in (times.start, times.stop)))
    return Case(*operands, one.pool, one.read[sequences], one.write[sequences, chunks])
