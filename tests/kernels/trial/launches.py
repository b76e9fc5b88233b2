"""Launches of every op, as programs record them: small ones, and each op at least once with an option."""

import jax
import jax.numpy as jnp

from pallas_kernels import (
    grouped_matmul,
    kv_copy,
    kv_write,
    linear_attention,
    lora,
    matmul,
    mla_attention,
    paged_attention,
    quant_matmul,
    token_quant,
)
from pallas_kernels.launches import recording
from pallas_kernels.matmul import Extras
from pallas_kernels.mla_attention.options import LatentOptions
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.token_quant import Rule

BF16, F32, I32, INT8, FP8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8, jnp.float8_e4m3fn


def of(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return of(*shape, dtype=I32)


def _has_arrays(tree):
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def noted(call, *operands, **options):
    """Return the one launch that a call with operands of these shapes records."""
    arrays = {name: given for name, given in options.items() if _has_arrays(given)}
    static = {name: given for name, given in options.items() if name not in arrays}
    with recording() as found:
        jax.eval_shape(lambda given, more: call(*given, **more, **static, path="mosaic"), operands, arrays)
    (one,) = found.values()
    return one


def _grouped(experts, weights, path):
    groups = grouped_matmul.group(experts, 3, 40, path=path)
    tiles = jnp.zeros((*groups.entries.shape, weights.shape[-1]), BF16)
    return grouped_matmul.matmul(tiles, weights, groups, path=path)


def _stored(experts, weights, scales, zeros, path):
    groups = grouped_matmul.group(experts, 3, 40, path=path)
    tiles = jnp.zeros((*groups.entries.shape, weights.shape[-1]), BF16)
    return quant_matmul.matmul_tiles(tiles, weights, scales, zeros, groups, path=path)


def _adapters(slots, x, a, b, path):
    return lora.low_rank(x, a, b, lora.group(slots, 3, 40, path=path), path=path)


POOL, LATENTS = of(64, 2, 2, 16, 64), of(64, 16, 192)
OPTIONS, EVERY = AttentionOptions(0.125), AttentionOptions(0.125, window=40, softcap=30.0, sinks=of(8, dtype=F32))
IN_INT8 = AttentionOptions(0.125, scales=of(64, 2, 2, dtype=F32))
TREE = AttentionOptions(0.125, tree=of(2, 8, 8, dtype=bool))
ROPE = of(3, 5, 32, dtype=F32), of(3, 5, 32, dtype=F32)

LAUNCHES = {
    "decode": lambda: noted(paged_attention.decode, of(5, 8, 64), POOL, ints(5, 3), ints(5), options=OPTIONS),
    "decode, every option": lambda: noted(
        paged_attention.decode, of(5, 8, 64), POOL, ints(5, 3), ints(5), options=EVERY
    ),
    "decode, int8": lambda: noted(
        paged_attention.decode, of(2, 8, 64), of(64, 2, 2, 16, 64, dtype=INT8), ints(2, 2), ints(2), options=IN_INT8
    ),
    "prefill": lambda: noted(
        paged_attention.prefill, of(1, 70, 8, 64), POOL, ints(1, 6), ints(1), ints(1), options=OPTIONS
    ),
    "a tree": lambda: noted(paged_attention.prefill, of(2, 8, 8, 64), POOL, ints(2, 3), ints(2), ints(2), options=TREE),
    "latents": lambda: noted(
        mla_attention.decode, of(3, 16, 192), LATENTS, ints(3, 2), ints(3), options=LatentOptions(0.1, rank=128)
    ),
    "latents of chunks": lambda: noted(
        mla_attention.prefill,
        of(1, 6, 16, 192),
        LATENTS,
        ints(1, 2),
        ints(1),
        ints(1),
        options=LatentOptions(0.1, rank=128),
    ),
    "write": lambda: noted(
        kv_write.write, POOL, of(3, 5, 2, 64), of(3, 5, 2, 64), ints(3, 2), ints(3), rope=ROPE, q=of(3, 5, 4, 64)
    ),
    "write, projected": lambda: noted(
        kv_write.write_projected, POOL, of(3, 5, 2, 6, 64), ints(3, 2), ints(3), rope=ROPE
    ),
    "write, int8": lambda: noted(
        kv_write.write,
        of(64, 2, 2, 16, 64, dtype=INT8),
        of(3, 5, 2, 64),
        of(3, 5, 2, 64),
        ints(3, 2),
        ints(3),
        scales=of(64, 2, 2, 16, dtype=F32),
        rope=ROPE,
    ),
    "copy": lambda: noted(kv_copy.copy_pages, (POOL,), ints(4), ints(4)),
    "move": lambda: noted(kv_copy.move_rows, POOL, ints(6), ints(6), ints(6), ints(6)),
    "states": lambda: noted(
        linear_attention.decode,
        of(3, 2, 64),
        of(3, 2, 64),
        of(3, 4, 64),
        of(3, 4, dtype=F32),
        of(3, 4, dtype=F32),
        of(9, 4, 64, 64, dtype=F32),
        ints(3),
        ints(3),
    ),
    "states of chunks": lambda: noted(
        linear_attention.prefill,
        of(1, 128, 2, 64),
        of(1, 128, 2, 64),
        of(1, 128, 4, 64),
        of(1, 128, 4, dtype=F32),
        of(1, 128, 4, dtype=F32),
        of(9, 4, 64, 64, dtype=F32),
        ints(1),
        ints(1, 2),
    ),
    "product": lambda: noted(matmul.matmul, of(20, 128), of(2, 64, 128), layout="in last", gated=True),
    "product of int8": lambda: noted(
        matmul.matmul,
        of(20, 256, dtype=INT8),
        of(64, 256, dtype=INT8),
        Extras(x_scales=of(20, dtype=F32), scales=of(64, dtype=F32), residual=of(20, 64)),
        layout="in last",
    ),
    "product of int4": lambda: noted(
        quant_matmul.matmul, of(20, 256), of(64, 256, dtype=jnp.int4), of(2, 64), of(2, 64, dtype=INT8)
    ),
    "product of MXFP4": lambda: noted(
        quant_matmul.matmul, of(20, 256), of(64, 256, dtype=jnp.int4), of(8, 64, dtype=jnp.uint8), e2m1=True
    ),
    "experts": lambda: noted(_grouped, ints(40), of(3, 128, 128)),
    "experts of int4": lambda: noted(
        _stored, ints(40), of(3, 64, 256, dtype=jnp.int4), of(2, 3, 64), of(2, 3, 64, dtype=INT8)
    ),
    "adapters": lambda: noted(_adapters, ints(40), of(40, 128), of(3, 16, 128), of(3, 64, 16)),
    "tokens": lambda: noted(token_quant.quantize, of(5, 256), rule=Rule("int8", 127.0)),
    "tokens of float8": lambda: noted(token_quant.quantize, of(5, 256), rule=Rule("float8_e4m3fn", 448.0)),
}
