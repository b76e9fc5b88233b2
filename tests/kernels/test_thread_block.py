"""CTA resource limits, computed for every kernel, heuristic and tuner candidate."""

import ast
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import compat
from pallas_kernels.check.ops import shipped
from pallas_kernels.specs import HOPPER
from pallas_kernels.thread_block import SHARED_BYTES, Block, at_launch, block_of, split
from pallas_kernels.tune.kernels import TUNABLES
from pallas_kernels.tune.search import candidates


@pytest.mark.parametrize("producer", [24, 40])
@pytest.mark.parametrize("consumers", range(2, 6))
def test_warpgroups_share_no_more_registers_than_the_block_was_launched_with(consumers, producer):
    shares, warpgroups = split(consumers, producer), consumers + 1
    assert shares.producer + consumers * shares.consumer <= warpgroups * at_launch(warpgroups)
    assert shares.consumer % 8 == 0
    assert shares.consumer > at_launch(warpgroups)
    assert warpgroups * 128 * at_launch(warpgroups) <= 65_536


def test_four_consumers_have_fewer_registers_than_those_that_hung():
    """At 120 registers the fourth consumer waited forever."""
    assert (split(2).consumer, split(3).consumer, split(4).consumer) == (240, 160, 112)


def _asked():
    for path in pathlib.Path(pallas_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_max_registers"):
                yield path.name, ast.unparse(node.args[0])


def test_every_kernel_asks_for_registers_by_the_one_rule():
    asked = list(_asked())
    assert len(asked) >= 10
    assert {what for _, what in asked} == {"shares.producer", "shares.consumer"}


def test_shared_memory_of_scratch_types():
    union = plgpu.RefUnion(
        [plgpu.SMEM((4, 1024), jnp.int8)], plgpu.SMEM((1024,), jnp.float32), plgpu.SMEM((8,), jnp.int8)
    )
    types = {"a": plgpu.SMEM((3, 1024), jnp.int4), "b": (union, plgpu.Barrier(num_arrivals=2, num_barriers=3))}
    assert block_of(3, 2, types) == Block(384, 2048 + 4096 + 24, 2, 256)


@pytest.mark.parametrize(
    "block",
    [
        Block(1025, 0),
        Block(0, 0),
        Block(128, SHARED_BYTES + 1),
        Block(128, 0, cluster=9),
        Block(128, 0, arrivals=2**20),
    ],
)
def test_a_block_beyond_a_limit_has_one_fault(block):
    assert len(list(block.faults())) == 1
    assert not list(Block(1024, SHARED_BYTES, 8, 2**20 - 1).faults())


@pytest.fixture
def blocks(monkeypatch):
    """Record the CTAs of kernels traced in the test; the kernels are replaced by zeros."""
    launched = []

    def kernel(body, *, out_type, scratch_types, num_threads, cluster=(), **_):
        launched.append(block_of(num_threads, math.prod(cluster), scratch_types))
        return lambda *operands: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

    monkeypatch.setattr(compat.plgpu, "kernel", kernel)
    return launched


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda one: one.kernel)
def test_every_candidate_of_the_tuner_and_every_heuristic_can_be_launched(blocks, tunable):
    """`compat.kernel` raises if a CTA exceeds a limit."""
    tried = 0
    for shape in tunable.shapes:
        problem = tunable.problem(shape, 132)
        operands = jax.eval_shape(lambda problem=problem: problem.operands()[0])
        for tiles in candidates(problem, {}):
            jax.eval_shape(lambda *given, tiles=tiles, problem=problem: problem.launch(*given, tiles=tiles), *operands)
            tried += 1
    assert len(blocks) >= tried >= 12
    assert max(block.shared_bytes for block in blocks) > SHARED_BYTES / 2


def test_every_shipped_configuration_can_be_launched(blocks):
    specs = [one for one in shipped() if HOPPER in one.targets]
    for one in specs:
        jax.eval_shape(one.kernel, *one.arguments())
    assert len(blocks) >= len(specs)


def test_a_block_that_cannot_be_launched_is_refused_before_it_is_compiled():
    """This error catches a candidate with one stage too many if the byte count of the kernel is wrong."""
    with pytest.raises(ValueError, match=r"toy: a thread block needs 240640 bytes"):
        compat.kernel(
            lambda *_: None,
            out_type=(),
            scratch_types=[plgpu.SMEM((235, 1024), jnp.int8)],
            grid=(1,),
            grid_names=("block",),
            num_threads=2,
            thread_name="warpgroup",
            kernel_name="toy",
            compiler_params=plgpu.CompilerParams(),
            cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        )
