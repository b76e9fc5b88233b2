"""Paged attention below Hopper, interpreted on the CPU with stand-ins for `mma` and asynchronous copies."""

import dataclasses
import inspect
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, paged_attention
from pallas_kernels.check.cases import attention_case
from pallas_kernels.choice import Target
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.ampere import kernel, merge, sums
from pallas_kernels.paged_attention.ampere import launch as ampere
from pallas_kernels.paged_attention.ampere.launch import Tiles
from tests.kernels.paged_attention.test_hopper_decode import assert_close

TINY = Tiles(stages=2, keys_per_split=64)


def run(case, tiles, module=ampere):
    how = {"tiles": tiles, "interpret": compat.interpret_params()}
    path = module.decode if case.starts is None else module.extend
    return np.asarray(compat.interpreted(lambda: path(*case.arrays, case.options, **how)))


CASES = {
    "splits, window, sinks, softcap": (
        TINY,
        {"lengths": (150, 0, 37), "page": 32, "window": 70, "sinks": True, "softcap": 9.0, "kv_heads": 1, "group": 3},
    ),
}
SLOW = {
    "a chunk in parts, window, sinks": (
        TINY,
        {
            "lengths": (150, 0, 37, 20),
            "counts": (24, 0, 1, 20),
            "chunk": 32,
            "page": 32,
            "window": 70,
            "sinks": True,
            "softcap": 9.0,
            "kv_heads": 2,
            "group": 3,
        },
    ),
    "drafts in splits": (TINY, {"lengths": (150, 9), "counts": (5, 4), "page": 32, "kv_heads": 1, "group": 4}),
    "a tree, window": (
        TINY,
        {"lengths": (150, 9), "counts": (9, 7), "page": 32, "kv_heads": 1, "group": 7, "tree": True, "window": 40},
    ),
    "a tree, a part for each token": (
        TINY,
        {"lengths": (70,), "counts": (4,), "page": 32, "kv_heads": 1, "group": 25, "tree": True, "window": 60},
    ),
    "a tree, one part": (TINY, {"lengths": (80,), "counts": (9,), "page": 32, "group": 2, "tree": True}),
    "plain": (TINY, {"lengths": (37, 0, 130), "page": 32}),
    "dim 128, page 16": (Tiles(3, 128), {"lengths": (129, 16), "head_dim": 128, "kv_heads": 1}),
    "page 128, float16, a wide group": (
        Tiles(4, 256),
        {"lengths": (200, 128), "page": 128, "group": 17, "kv_heads": 1, "dtype": jnp.float16, "spread": 30.0},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES | SLOW]
)
def test_equals_float64(name):
    tiles, options = (CASES | SLOW)[name]
    case = attention_case(**options)
    assert_close(case, run(case, tiles))


@pytest.mark.slow
def test_no_bit_of_a_row_depends_on_its_neighbours():
    case = attention_case((100, 70), page=32, kv_heads=1)
    whole, arrays = run(case, TINY), list(case.arrays)
    arrays[0], arrays[2], arrays[3] = arrays[0][1:], arrays[2][1:], arrays[3][1:]
    how = {"tiles": TINY, "interpret": compat.interpret_params()}
    alone = np.asarray(compat.interpreted(lambda: ampere.decode(*arrays, case.options, **how)))
    assert alone[0].tobytes() == whole[1].tobytes()


@pytest.mark.slow
def test_no_bit_of_a_token_depends_on_how_its_text_was_cut():
    """Query tiles have 16 tokens; a chunk that begins 16 tokens later has the same tiles."""
    case = attention_case((64,), counts=(64,), page=32, kv_heads=1, group=3)
    whole, later = run(case, TINY), dataclasses.replace(case, q=case.q[:, 16:], starts=case.starts + 16)
    assert run(later, TINY)[0].tobytes() == whole[0, 16:].tobytes()


# Module, line to change, and its replacement, with which the comparison must fail.
MUTATIONS = {
    "the mask's end": (kernel, "return (at >= unit.low) & (at < unit.high)", "return at >= unit.low"),
    "a window's start": (kernel, "return (at >= unit.low) & (at < unit.high)", "return at < unit.high"),
    "values of unseen keys": (kernel, "(key < unit.low) | (key + BLOCK > unit.high)", "key < 0"),
    "keys and values": (kernel, "enumerate((smem.keys, smem.values))", "enumerate((smem.values, smem.keys))"),
    "a page's place": (
        kernel,
        "pl.multiple_of(lax.rem(key, jnp.int32(shape.page)), shape.piece)",
        "pl.multiple_of(0, 16)",
    ),
    "a slot": (kernel, "lax.rem(jnp.asarray(index, jnp.int32), jnp.int32(shape.tiles.stages))", "jnp.int32(0)"),
    "rescaling": (kernel, "mixed = sums.mixed * across(shrink, shape.head_dim)", "mixed = sums.mixed"),
    "a segment's share": (sums, "segment.mixed * across(new, rows)", "segment.mixed"),
    "the share of those before": (sums, "before.total * old", "before.total"),
    "sinks": (sums, "total * share + jnp.exp2(sinks - higher)", "total * share"),
    "the first segment": (merge, "first = lax.div(blocks.first, jnp.int32(shape.blocks_per_segment))", "first = 0"),
    "the last segment": (merge, "blocks.end + (shape.blocks_per_segment - 1)", "blocks.end"),
    "the last segment again": (merge, "jnp.where(number < count, 0.0, LOWEST)", "0.0"),
}
OF_CHUNKS = {
    "causality": (ampere, "at, at + 1, jnp.zeros_like(at)", "at, at + 2, jnp.zeros_like(at)"),
    "a query's window": (
        ampere,
        "jnp.maximum(depth - (shape.options.window - 1), 0)",
        "jnp.maximum(depth - shape.options.window, 0)",
    ),
    "a part's first token": (
        kernel,
        "start + part * shape.tokens, start",
        "start + (part + 9) * shape.tokens, start",
    ),
    "a part's last token": (kernel, "start + (part + 1) * shape.tokens", "start + part * shape.tokens"),
    "a part's sequence": (kernel, "for operation in (lax.div, lax.rem)", "for operation in (lax.rem, lax.div)"),
    "sums of the segments before": (kernel, "number > first, lambda: load", "number < first, lambda: load"),
    "which sums are kept": (kernel, "@pl.when(number < last)", "@pl.when(number < first)"),
    "a query's head": (ampere, "jnp.tile(grouped, (1, shape.tokens))", "jnp.repeat(grouped, shape.tokens, axis=1)"),
}


def mutant(module, old, new, monkeypatch):
    """Return `ampere` with a changed line, in itself or in a module whose names other modules have imported."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, source.count(old)
    changed = types.ModuleType(module.__name__)
    changed.__dict__.update(module.__dict__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    if module is ampere:
        return changed
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    # Keep the original types, which appear in signatures of the other modules.
    changed.__dict__.update({name: value for name, value in own.items() if isinstance(value, type)})
    for user in (kernel, merge, ampere):
        for name, value in own.items():
            if getattr(user, name, None) is value:
                monkeypatch.setattr(user, name, getattr(changed, name))
    return ampere


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name, monkeypatch):
    lengths, spread = ((3, 1), 1.0) if name == "sinks" else ((500, 37), 4.0)
    case = attention_case(lengths, page=128, window=312, sinks=True, kv_heads=1, spread=spread)
    changed = mutant(*MUTATIONS[name], monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(case, run(case, Tiles(2, 128), changed))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CHUNKS)
def test_a_mutation_of_chunks_is_caught(name, monkeypatch):
    sizes = {"lengths": (90, 60), "counts": (20, 16), "page": 128, "group": 5, "kv_heads": 1}
    case = attention_case(**sizes, window=30, sinks=True, spread=2.0)
    assert_close(case, run(case, TINY))
    changed = mutant(*OF_CHUNKS[name], monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_close(case, run(case, TINY, changed))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head_dim": 80}, "head_dim 80"),
        ({"page": 16}, "pages of 16"),
        ({"group": 49}, "49 heads"),
        ({"dtype": jnp.float32}, "float32"),
        ({"pool_dtype": jnp.int8, "scales": "head"}, "int8"),
    ],
)
def test_what_it_refuses_takes_xla(options, why):
    case = attention_case((5,), **{"page": 32, **options})
    for capability in ((8, 0), (8, 9)):
        chosen = paged_attention.explain_decode(*case.arrays, case.options, target=Target("gpu", capability))
        assert (chosen.path, why in chosen.why) == ("xla", True), chosen


def test_which_kernel_a_gpu_takes():
    case = attention_case((5,), page=32)
    for capability, path in (
        ((8, 0), "mosaic"),
        ((8, 9), "mosaic"),
        ((9, 0), "mosaic"),
        ((7, 5), "xla"),
        ((10, 0), "xla"),
    ):
        chosen = paged_attention.explain_decode(*case.arrays, case.options, target=Target("gpu", capability))
        assert chosen.path == path, chosen
        chunks = attention_case((50,), counts=(40,), page=32)
        chosen = paged_attention.explain_prefill(*chunks.arrays, chunks.options, target=Target("gpu", capability))
        assert chosen.path == path, chosen


def test_tiles_of_impossible_numbers_are_refused():
    for fields in ({"stages": 1}, {"stages": 5}, {"keys_per_split": 65}, {"keys_per_split": 0}):
        with pytest.raises(ValueError, match="stages"):
            Tiles(**fields)
    with pytest.raises(ValueError, match="window"):
        ampere.decode(*attention_case((5,), page=32).arrays, AttentionOptions(1.0, window=0))
